"""What a seed chooses of a deployment: pool, host memory, chunk budget, queue, replay; and the files it needs.

Every target is served twice: under pressure, with faults in its nodes, and alone, with room for everything and without
prefix cache, overlap, replay and chunks, by the nodes as they are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.checkpoints import tiny_llama, write_directory
from support.composite import reference
from support.composite.deployment import PLACEMENTS, write_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from soak.models import PAGE

LLAMA_VOCAB = 160
MAX_SEQ_LEN = 256
CHAT_TEMPLATE = "{% for m in messages %}{{ 't140 ' + m['content'] + ' t141 ' }}{% endfor %}t142"
TARGETS = ("llama", "composite", "composite_two_workers")
LLAMA_KV = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16}


@dataclass(frozen=True)
class Target:
    """A deployment under test. `page_bytes`: of one page of its cache. `served`, `alone`: import strings of cards."""

    name: str
    served: str
    alone: str
    vocab_size: int
    has_chat: bool
    page_bytes: int
    placement: Mapping[str, int]


def target_of(name: str) -> Target:
    if name == "llama":
        values = 2 * LLAMA_KV["num_hidden_layers"] * LLAMA_KV["num_key_value_heads"] * LLAMA_KV["head_dim"]
        cards = ("soak.models:LLAMA", "soak.models:LLAMA_ALONE")
        return Target(name, *cards, LLAMA_VOCAB, True, 4 * PAGE * values, {})
    placement = PLACEMENTS["one_worker" if name == "composite" else "codec_apart"]
    values = 2 * reference.NUM_LAYERS * reference.NUM_KV_HEADS * reference.HEAD_DIM
    cards = ("soak.models:COMPOSITE_SERVED", "soak.models:COMPOSITE_ALONE")
    return Target(name, *cards, reference.VOCAB, False, 4 * PAGE * values, placement)


@dataclass(frozen=True)
class Knobs:
    """What the seed chose."""

    num_pages: int
    host_pages: int
    max_step_tokens: int | str
    max_rows: int
    max_queue: int
    prefix_cache: bool
    reuse_generated: bool
    captures: bool

    @property
    def room(self) -> int:
        """Tokens that one request may have at most."""
        return min(MAX_SEQ_LEN, self.num_pages * PAGE)


def choose_knobs(rng: random.Random) -> Knobs:
    return Knobs(
        num_pages=rng.choice((14, 20, 32, 64)),
        host_pages=rng.choice((0, 8, 64)),
        max_step_tokens=rng.choice((PAGE, 3 * PAGE, "auto", 2048)),
        max_rows=rng.choice((4, 8, 24)),
        max_queue=rng.choice((16, 40)),
        prefix_cache=rng.random() < 0.8,
        reuse_generated=rng.random() < 0.5,
        captures=rng.random() < 0.6,
    )


def write_configs(target: Target, knobs: Knobs, directory: Path) -> tuple[Path, Path]:
    """Deployment files of the server under pressure and of the one that answers alone."""
    checkpoint = directory / "checkpoint"
    if target.name == "llama":
        write_llama(checkpoint)
    else:
        write_checkpoint(checkpoint)
    common: dict[str, Any] = {"checkpoint": str(checkpoint), "dtype": "float32", "num_threads": 1}
    common |= {"max_seq_len": MAX_SEQ_LEN, "server": {"served_names": ["soak"]}}
    served = common | {
        "model": target.served,
        "resources": {"kv": {"num_pages": knobs.num_pages, "host_bytes": knobs.host_pages * target.page_bytes}},
        "prefix_cache": {"enabled": knobs.prefix_cache, "reuse_generated": knobs.reuse_generated},
        "scheduler": {
            "async_scheduling": True,
            "max_rows": knobs.max_rows,
            "max_step_tokens": knobs.max_step_tokens,
            "max_queue": knobs.max_queue,
        },
        "capture": {"enabled": knobs.captures},
        "node_groups": _groups(target.placement),
    }
    alone = common | {
        "model": target.alone,
        "resources": {"kv": {"num_pages": 256}},
        "prefix_cache": {"enabled": False},
        "scheduler": {"async_scheduling": False, "max_step_tokens": 4096},
        "capture": {"enabled": False},
    }
    paths = (directory / "served.yaml", directory / "alone.yaml")
    for path, config in zip(paths, (served, alone), strict=True):
        path.write_text(json.dumps(config))
    return paths


def _groups(placement: Mapping[str, int]) -> list[dict[str, Any]]:
    ranks = sorted(set(placement.values()))
    return [{"node_names": [node for node, at in placement.items() if at == rank], "ranks": [rank]} for rank in ranks]


def write_llama(directory: Path) -> LlamaForCausalLM:
    """Weights whose greedy texts differ between prompts, and a tokenizer of words t0, t1 and so on, so that a text
    tells its tokens."""
    model = tiny_llama(vocab_size=LLAMA_VOCAB, max_position_embeddings=MAX_SEQ_LEN, initializer_range=0.5, **LLAMA_KV)
    write_directory(directory, model, with_tokenizer=False)
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(LLAMA_VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return model
