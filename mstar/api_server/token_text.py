"""What single tokens look like in logprobs: text and bytes. Front process; the tables are built once per tokenizer."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (Radford et al. 2019, GPT-2): printable Latin-1 stands for itself, the other
    68 bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class TokenTexts:
    """Bytes of tokens. A token may hold part of a character, so bytes are what is exact."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        names = b"" if decoder is None else decoder.__getstate__()
        self._alphabet = byte_alphabet() if b'"ByteLevel"' in names else None
        self._added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

    def token_bytes(self, token: int) -> bytes:
        """Empty for an id that the tokenizer does not know."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if text in self._added:
            return text.encode()
        if self._alphabet is not None:
            try:
                return bytes(map(self._alphabet.__getitem__, text))
            except KeyError:
                return text.encode()
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes((int(match[1], 16),))
        return text.replace("▁", " ").encode()

    def text_and_bytes(self, token: int) -> tuple[str, list[int]]:
        """Text with U+FFFD for what is no whole character, and the bytes."""
        raw = self.token_bytes(token)
        return raw.decode("utf-8", errors="replace"), list(raw)
