"""The operations of a gated delta net: part of `mstar.kernels.ops`, which see for the rules.

Runs on the thread of the forward. The states belong to the caller; which rows use which, the arguments say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.kernels import reference, reference_gated_delta
from mstar.kernels.fused_norms import GatedNorm
from mstar.kernels.selection import compiled_for, kernels_for, refuse_recording, triton_kernels


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Root-mean-square norm of each head of ``x [tokens, heads * dim]`` with ``weight [dim]``, times ``silu(z)``.

    ``z`` is shaped as ``x`` and may be columns of a wider tensor. ``out`` may be ``x``.
    """
    if (native := kernels_for(x)) is not None:
        result = native.linear_attention.gated_rms_norm(x, z, weight, eps, out)
        if result is not NotImplemented:
            return result
    result = reference.gated_rms_norm(x, z, weight, eps)
    return result if out is None else out.copy_(result)


def gated_delta(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    delta_state: Tensor,
    slots: Tensor,
    has_state: Tensor,
    q_starts: Tensor,
    key_heads: int,
    out: Tensor | None = None,
    max_tokens: int | None = None,
    norm: GatedNorm | None = None,
) -> Tensor:
    """Causal convolution, silu and the gated delta rule (Yang et al. 2024, "Gated Delta Networks"), per row over its
    state, which goes on by the row's tokens.

    Row ``r`` owns tokens ``q_starts[r]:q_starts[r + 1]`` and slot ``slots[r]`` of the states. With ``has_state[r] ==
    0`` it begins from zero, whatever the slot holds. Slots of rows with tokens are distinct; a row with a negative one
    touches no state and gets zeros. Tokens from ``q_starts[-1]`` on are padding: neither read nor written.

    Per head with keys and values of a token, state ``S [key_dim, value_dim]``, ``beta = sigmoid(b)`` and
    ``g = -exp(a_log) · softplus(a + dt_bias)``::

        S = exp(g) · S;  S = S + k ⊗ beta · (v - Sᵀk);  out = Sᵀq

    where q and k are divided by ``sqrt(sum of squares + 1e-6)`` and q by ``sqrt(key_dim)``. All of it in fp32, from the
    inputs of the convolution on; the result is rounded once. ``value_heads`` is a multiple of ``key_heads``: each key
    head serves neighbouring value heads. The compiled kernel goes token by token, so that a prompt may be cut anywhere.

    Args:
        qkv: ``[tokens, channels]``, queries, keys and values side by side before the convolution; not modified.
        b: ``[tokens, value_heads]``, as ``a``; both in the dtype of ``qkv``. The three may be columns of one tensor.
        conv_weight: ``[channels, kernel]``, in the dtype of ``qkv``; the last tap meets the token itself.
        a_log: fp32 ``[value_heads]``, as ``dt_bias``.
        conv_state: ``[slots, kernel - 1, channels]`` in the dtype of ``qkv``: the inputs of the last tokens.
        delta_state: fp32 ``[slots, value_heads, key_dim, value_dim]``, or bf16, which rounds the state after each
            step; a CPU's compiled kernel takes fp32 only.
        slots: int32 ``[rows]``, as ``has_state``.
        q_starts: int32 ``[rows + 1]``.
        max_tokens: no row has more, as far as the host knows without a look; 1, a decode step, has a faster kernel.
        norm: `gated_rms_norm` of the result, on the way.

    Returns:
        ``[tokens, value_heads * value_dim]`` in the dtype of ``qkv``.
    """
    if out is None:
        width = delta_state.shape[1] * delta_state.shape[3]
        out = torch.empty((qkv.shape[0], width), dtype=qkv.dtype, device=qkv.device)
    arguments = (
        qkv, b, a, conv_weight, a_log, dt_bias, conv_state, delta_state, slots, has_state, q_starts, key_heads, out
    )  # fmt: skip
    if qkv.is_cuda and (device_kernels := triton_kernels()) is not None:
        if device_kernels.linear_attention.gated_delta(*arguments, max_tokens, norm) is not NotImplemented:
            return out
    if (native := compiled_for(qkv)) is not None:
        if native.linear_attention.gated_delta(*arguments) is not NotImplemented:
            return out if norm is None else gated_rms_norm(out, *norm, out=out)
    refuse_recording("gated_delta")  # the reference reads lengths in Python
    reference_gated_delta.gated_delta(*arguments)
    return out if norm is None else gated_rms_norm(out, *norm, out=out)
