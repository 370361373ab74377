"""Names of the tiny composite model that its two halves share. No torch."""

ENCODER = "Encoder"
LLM = "LLM"
CODES = "Codes"
FRAME = "Frame"
FLOW = "Flow"
CODEC = "Codec"

MAIN = "main"
AUDIO = "audio"

MEDIA_TOKEN = 63
"""Stands in the prompt ids for one encoded feature; a prompt may not contain it."""
