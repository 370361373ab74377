"""The answer of `/v1/embeddings`: vectors, and the JSON that they come in. Pure."""

from __future__ import annotations

import struct

from mstar.client.answers import Struct, Usage


class Embeddings(Struct, frozen=True):
    """Answer of `/v1/embeddings`: one vector of fp32 numbers and length 1 for each input, in their order."""

    vectors: tuple[tuple[float, ...], ...]
    model: str
    usage: Usage


class EncodedEmbedding(Struct, frozen=True):
    """One entry of the answer's JSON; `embedding`: little-endian fp32 numbers, base64 in the JSON."""

    index: int
    embedding: bytes


class EncodedEmbeddings(Struct, frozen=True):
    """The answer's JSON."""

    data: tuple[EncodedEmbedding, ...]
    model: str
    usage: Usage

    def decoded(self) -> Embeddings:
        """Raises `struct.error` where there are no whole numbers."""
        blobs = [entry.embedding for entry in sorted(self.data, key=lambda entry: entry.index)]
        vectors = tuple(struct.unpack(f"<{len(blob) // 4}f", blob) for blob in blobs)
        return Embeddings(vectors, self.model, self.usage)
