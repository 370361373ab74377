"""Checkpoints: find or fetch them, read their configuration, weights and tokenizer. This file imports nothing, so that
the modules here stay usable in processes without torch; only `weights`, `gguf_weights` and `module_loading` load it.
"""
