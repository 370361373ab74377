"""The gated delta rule in plain torch: the specification of `mstar.kernels.ops.gated_delta`, and its fallback.

Runs on the thread of the forward, on any device and floating dtype. Reads rows' lengths and slots on the host. The
rule is written twice: token by token, as it is defined, and in chunks, where a prompt costs matrix products.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
_NORM_EPS = 1e-6


class Operands(NamedTuple):
    """Of some rows of equal length, all fp32."""

    q: Tensor
    """[rows, value_heads, tokens, key_dim], as `k`: normalized, `q` scaled, key heads repeated."""
    k: Tensor
    v: Tensor
    """[rows, value_heads, tokens, value_dim]"""
    log_decay: Tensor
    """[rows, value_heads, tokens], as `beta`"""
    beta: Tensor


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
    out: Tensor,
) -> None:
    """See `mstar.kernels.ops.gated_delta`. Rows of one token go together, token by token; others alone, in chunks."""
    starts, taken = q_starts.tolist(), slots.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    single = [row for row, length in enumerate(lengths) if length == 1 and taken[row] >= 0]
    longer = [[row] for row, length in enumerate(lengths) if length > 1 and taken[row] >= 0]
    for row, slot in enumerate(taken):
        if slot < 0:
            out[starts[row] : starts[row + 1]] = 0
    past, num_heads, key_dim = conv_state.shape[1], *delta_state.shape[1:3]
    for rows in ([single] if single else []) + longer:
        index = torch.tensor(rows, device=qkv.device)
        slot, known = slots[index].long(), has_state[index].bool()
        tokens = q_starts[index].long()[:, None] + torch.arange(lengths[rows[0]], device=qkv.device)  # [rows, tokens]
        history = torch.where(known[:, None, None], conv_state[slot], 0)
        state = torch.where(known[:, None, None, None], delta_state[slot].float(), 0)
        window = torch.cat([history, qkv[tokens]], 1)  # [rows, past + tokens, channels]
        mixed = functional.silu(functional.conv1d(
            window.float().transpose(1, 2), conv_weight.float()[:, None], groups=conv_weight.shape[0]
        )).transpose(1, 2)  # fmt: skip
        operands = _operands(mixed, b[tokens], a[tokens], a_log, dt_bias, key_heads, key_dim, num_heads)
        rule = token_by_token if lengths[rows[0]] == 1 else in_chunks
        result, state = rule(operands, state)
        out[tokens] = result.transpose(1, 2).flatten(2).to(out.dtype)
        delta_state[slot] = state.to(delta_state.dtype)
        conv_state[slot] = window[:, window.shape[1] - past :]


def token_by_token(operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as it is defined. `state [rows, value_heads, key_dim, value_dim]` → (`[rows, value_heads, tokens,
    value_dim]`, the state after them)."""
    results: list[Tensor] = []
    for q, k, v, log_decay, beta in zip(*(each.unbind(2) for each in operands), strict=True):
        state = state * log_decay.exp()[..., None, None]
        known = (k[..., None, :] @ state).squeeze(-2)  # [rows, value_heads, value_dim]
        state = state + k[..., :, None] * ((v - known) * beta[..., None])[..., None, :]
        results.append((q[..., None, :] @ state).squeeze(-2))
    return torch.stack(results, 2), state


def in_chunks(operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same, `CHUNK` tokens at a time.

    With decays ``e_ij = exp(g_i + ... )`` of the tokens after ``j`` up to ``i``, what the tokens of a chunk add to the
    state, ``u``, solves ``u_i = beta_i (v_i - e_i Sᵀk_i - sum over j < i of e_ij (k_i·k_j) u_j)``.
    """
    results: list[Tensor] = []
    for start in range(0, operands.q.shape[2], CHUNK):
        q, k, v, log_decay, beta = (each[:, :, start : start + CHUNK] for each in operands)
        total = log_decay.cumsum(-1)  # [rows, value_heads, tokens]
        later = torch.ones(2 * (total.shape[-1],), dtype=torch.bool, device=q.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
        from_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
        system = (k @ k.mT) * decay * beta[..., None]
        wanted = (v - (k * from_start) @ state) * beta[..., None]
        added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        results.append((q * from_start) @ state + ((q @ k.mT) * decay) @ added)
        state = state * from_start[..., -1:, :] + (k * to_end).mT @ added
    return torch.cat(results, 2), state


def _operands(
    mixed: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, key_heads: int, key_dim: int, num_heads: int
) -> Operands:
    """`mixed [rows, tokens, channels]` after convolution and silu; `b`, `a` `[rows, tokens, value_heads]`."""
    q, k, v = mixed.split([key_heads * key_dim, key_heads * key_dim, mixed.shape[2] - 2 * key_heads * key_dim], -1)
    q, k = (x.unflatten(-1, (key_heads, key_dim)).repeat_interleave(num_heads // key_heads, 2) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS) for x in (q, k))
    log_decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return Operands(
        (q * key_dim**-0.5).transpose(1, 2),
        k.transpose(1, 2),
        v.unflatten(-1, (num_heads, -1)).transpose(1, 2),
        log_decay.transpose(1, 2),
        torch.sigmoid(b.float()).transpose(1, 2),
    )
