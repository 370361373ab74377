"""Constrained text on a worker: grammars compiled for its tokenizer, and followed token by token."""
