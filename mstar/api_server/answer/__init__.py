"""What a chat answer's text is made of: reasoning, content and tool calls, told apart while the text arrives."""
