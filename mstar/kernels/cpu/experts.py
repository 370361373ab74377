"""Calls into the compiled kernels of a mixture of experts; the rules are those of `mstar.kernels.cpu.native`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mstar.kernels.cpu.layout import is_index, is_token_columns, is_wide
from mstar.kernels.cpu.library import Library
from mstar.kernels.cpu.packing import packed_words
from mstar.kernels.packed import PackedExperts

_BF16, _FP32 = torch.bfloat16, torch.float32


class ExpertKernels:
    """The operations of `mstar.kernels.experts`."""

    def __init__(self, library: Library) -> None:
        self._vector_width = library.vector_width
        self._moe_mlp = library.call("mstar_moe_mlp", "17q")
        self._router_top_k = library.call("mstar_router_top_k", "8q")

    def pack(self, weight: Tensor) -> PackedExperts:
        num_experts, num_out, num_in = weight.shape
        data: Tensor | None = None
        for expert, each in enumerate(weight):  # one by one: weights of experts are most of a model
            packed = packed_words(each, self._vector_width)
            data = torch.empty((num_experts, *packed.shape), dtype=packed.dtype) if data is None else data
            data[expert] = packed
        if data is None:
            raise ValueError("a mixture of no experts")
        return PackedExperts(data, num_experts, num_out, num_in, weight.dtype, self._vector_width)

    def router_top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if not is_token_columns(logits, logits) or logits.dtype is not _FP32:
            return NotImplemented
        tokens, experts = logits.shape
        ids = torch.empty((tokens, k), dtype=torch.int32)
        weights = torch.empty((tokens, k), dtype=_FP32)
        self._router_top_k(
            torch.get_num_threads(), tokens, experts, k, logits.stride(0), logits.data_ptr(), ids.data_ptr(),
            weights.data_ptr(),
        )  # fmt: skip
        return ids, weights

    def moe_mlp(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        plus: Tensor | None,
        out: Tensor | None,
    ) -> Any:
        tokens, hidden = x.shape
        dtype, width = x.dtype, down.in_features
        if out is None:
            out = torch.empty((tokens, hidden), dtype=dtype)
        if not (is_index(expert_ids) and is_wide(expert_weights) and is_token_columns(x, x)):
            return NotImplemented
        if gate_up.dtype is not dtype or down.dtype is not dtype:
            raise ValueError(f"experts hold {gate_up.dtype} and {down.dtype}, the step computes {dtype}")
        if (gate_up.out_features, gate_up.in_features, down.out_features) != (2 * width, hidden, hidden):
            raise ValueError(
                f"moe_mlp: x {tuple(x.shape)}, gate_up {gate_up.out_features} × {gate_up.in_features}, "
                f"down {down.out_features} × {width}"
            )
        if expert_ids.shape != expert_weights.shape or expert_ids.shape[0] != tokens:
            raise ValueError(f"moe_mlp: {tokens} tokens, ids {tuple(expert_ids.shape)}")
        if gate_up.num_experts != down.num_experts:
            raise ValueError(f"moe_mlp: {gate_up.num_experts} and {down.num_experts} experts")
        for each in (out, x if plus is None else plus):
            if each.shape != x.shape or not is_token_columns(each, x):
                raise ValueError(f"moe_mlp: {tuple(each.shape)} {each.dtype} beside x {tuple(x.shape)} {dtype}")
        self._moe_mlp(
            torch.get_num_threads(), tokens, expert_ids.shape[1], gate_up.num_experts, hidden, width, x.stride(0),
            0 if plus is None else plus.stride(0), out.stride(0), dtype is _BF16, x.data_ptr(), expert_ids.data_ptr(),
            expert_weights.data_ptr(), gate_up.data.data_ptr(), down.data.data_ptr(),
            0 if plus is None else plus.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out
