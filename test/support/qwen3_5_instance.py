"""A random Qwen3.5 checkpoint in this process: instances of it, and prompts with transformers' logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from support.instance import Instance, Tuning
from support.qwen3_5_media import MediaReference

from mstar.engine.submodule import NodeSubmodule
from mstar.model.base import ModelSetup
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.loader.tokenizer_writing import write_tokenizer
from mstar.model.qwen3_5.model import LANGUAGE, VISION, Qwen35Model
from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint
from mstar.model.registry import build_submodule, find_card
from mstar.model.submodule_context import SubmoduleContext

ONE_WORKER = {LANGUAGE: 0, VISION: 0}


class QwenInProcess:
    """Nodes are loaded once and serve every instance."""

    def __init__(self, directory: Path, size: str, *, max_seq_len: int, max_step_patches: int = 2048) -> None:
        write_random_checkpoint(size, directory / "checkpoint", seed=5)
        loaded = resolve_checkpoint(str(directory / "checkpoint"), cache_dir=directory)
        write_tokenizer(loaded, directory / "tokenizer")
        setup = ModelSetup(loaded.config(), directory / "tokenizer", max_seq_len, max_step_patches)
        self.model = Qwen35Model(setup)
        context = SubmoduleContext(setup, loaded, torch.float32, torch.device("cpu"))
        assert self.model.config.media is not None
        self.reference = MediaReference(directory / "checkpoint", self.model.config.media)
        self._max_seq_len = max_seq_len
        self._node = cache(lambda node: build_submodule(find_card("qwen3_5"), node, context))

    def instance(self, tuning: Tuning, placement: Mapping[str, int] = ONE_WORKER) -> Instance:
        """With as long requests as there are prompts for."""
        return Instance(self.model, self._built, placement, replace(tuning, max_seq_len=self._max_seq_len))

    def _built(self, node: str) -> NodeSubmodule:
        return self._node(node)
