"""The built-in page at `/`: a chat, the model's controls, and a live view of its walks. Files that a browser runs."""
