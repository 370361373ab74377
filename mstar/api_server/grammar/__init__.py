"""From what a request asks of its text to one grammar: pure Python, no grammar is compiled here."""
