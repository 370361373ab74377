"""Rotary tables: cosines and sines by position, with the frequency scalings that checkpoints ask for.

Pure functions, run once at load. Formulas: Su et al. 2021 (RoFormer); Llama 3.1's frequency scaling as published with
its reference code (wavelengths above `original_max_position / low_freq_factor` are stretched by `factor`, those below
`original_max_position / high_freq_factor` are kept, those between are interpolated).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mstar.engine.spec import RopeScaling, RotarySpec


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """fp32 `[rotary_dim / 2]`: radians per position of each rotated pair."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    frequencies = 1.0 / (spec.theta**exponents)
    match spec.scaling:
        case None:
            return frequencies
        case RopeScaling(kind="linear", factor=factor):
            return frequencies / factor
        case scaling:
            return _llama3(frequencies, scaling)


def rotary_tables(spec: RotarySpec, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`(cos, sin)`, each fp32 `[num_positions, rotary_dim / 2]`."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(spec))
    return angles.cos().to(device), angles.sin().to(device)


def frequency_axes(spec: RotarySpec, device: torch.device) -> Tensor | None:
    """int32 `[rotary_dim / 2]`: which of a token's three positions each frequency follows (see `RotarySpec.sections`);
    None without sections. Raises `ValueError` for sections that do not add up to the frequencies."""
    if spec.sections is None:
        return None
    half = spec.rotary_dim // 2
    if sum(spec.sections) != half:
        raise ValueError(f"rotary sections {spec.sections} do not add up to the {half} frequencies")
    index = torch.arange(half, dtype=torch.int32)
    axes = index % 3
    for axis in (1, 2):
        axes[(index % 3 == axis) & (index >= 3 * spec.sections[axis])] = 0
    return axes.to(device)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    share = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), between, scaled)
