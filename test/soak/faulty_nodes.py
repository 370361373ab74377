"""Tensor halves of the soak's models: the nodes themselves, with the faults that a prompt may ask for around them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from support.composite.declarations import CODEC, FLOW, LLM
from support.composite.submodules import build_submodule as build_composite_node

from mstar.engine.submodule import EngineInputs, NodeOutputs, NodeSubmodule, RowColumns
from mstar.model.llama.submodules import build_submodule as build_llama_node
from mstar.model.submodule_context import SubmoduleContext
from soak.triggers import MARK, SLOW_S, Fault, first_reserved

STOPS_AFTER = 3
"""Draws of a row before its `stop` fault happens."""


class InjectedError(Exception):
    """A fault that a prompt asked for."""


def build_llama(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    node = build_llama_node(node_name, context)
    return with_faults(node, first_reserved(context.setup.config["vocab_size"]))


def build_composite(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    node = build_composite_node(node_name, context)
    first = first_reserved(context.setup.config["vocab_size"])
    if node_name == LLM:
        return with_faults(node, first)
    if node_name in (FLOW, CODEC):
        return with_row_faults(node, first + Fault.row)
    return node


def with_faults(node: NodeSubmodule, first: int) -> NodeSubmodule:
    """Faults of a language model, in forwards of prompts and in host hooks."""
    forward, prepare, check_stop = node.forward_batched, node.prepare_batch, node.check_stop

    def faulty_forward(walk: str, inputs: EngineInputs) -> NodeOutputs:
        if walk == "prefill" and inputs.tokens is not None:
            for fault in faults_in(inputs.tokens, first):
                raise_in_forward(fault, inputs.num_rows)
        return forward(walk, inputs)

    def faulty_prepare(walk: str, rows: RowColumns) -> Any:
        if walk == "prefill" and any(has_pair(prompt, first + Fault.prepare) for prompt in rows.prompts):
            raise InjectedError(f"{MARK}: prepare_batch")
        return prepare(walk, rows)

    def faulty_check_stop(walk: str, rows: RowColumns, host_rows: Any) -> Any:
        for prompt, num_draws in zip(rows.prompts, rows.num_draws.tolist(), strict=True):
            if num_draws >= STOPS_AFTER and has_pair(prompt, first + Fault.stop):
                raise InjectedError(f"{MARK}: check_stop")
        return check_stop(walk, rows, host_rows)

    node.forward_batched, node.prepare_batch, node.check_stop = faulty_forward, faulty_prepare, faulty_check_stop
    return node


def with_row_faults(node: NodeSubmodule, token: int) -> NodeSubmodule:
    """A host hook fails: the node's own for a batch, or the one for a row."""
    prepare, prepare_row = node.prepare_batch, node.prepare_inputs

    def faulty_prepare(walk: str, rows: RowColumns) -> Any:
        batch = prepare(walk, rows)
        if batch is not None and any(has_pair(prompt, token) for prompt in rows.prompts):
            raise InjectedError(f"{MARK}: prepare_batch of {type(node).__name__}")
        return batch

    def faulty_prepare_row(walk: str, rows: RowColumns, index: int) -> Any:
        if has_pair(rows.prompts[index], token):
            raise InjectedError(f"{MARK}: prepare_inputs of {type(node).__name__}")
        return prepare_row(walk, rows, index)

    node.prepare_batch, node.prepare_inputs = faulty_prepare, faulty_prepare_row
    return node


def has_pair(prompt: np.ndarray | None, token: int) -> bool:
    if prompt is None or len(prompt) < 2:
        return False
    return bool(((prompt[1:] == token) & (prompt[:-1] == token)).any())


def faults_in(tokens: torch.Tensor, first: int) -> Sequence[Fault]:
    """Faults whose pair is among the packed tokens of a forward."""
    pairs = tokens[1:][(tokens[1:] == tokens[:-1]) & (tokens[1:] >= first)]
    return [Fault(token - first) for token in pairs.tolist() if token - first in (0, 1, 2, 3)]


def raise_in_forward(fault: Fault, num_rows: int) -> None:
    match fault:
        case Fault.forward:
            raise InjectedError(f"{MARK}: forward")
        case Fault.memory:
            raise torch.OutOfMemoryError(f"{MARK}: out of memory")
        case Fault.memory_of_many if num_rows > 1:
            raise torch.OutOfMemoryError(f"{MARK}: out of memory with {num_rows} rows")
        case Fault.slow:
            time.sleep(SLOW_S)
        case _:
            pass
