"""What a language model's node is asked with, outside of an engine."""

from collections.abc import Sequence

import numpy as np
from torch import nn

from mstar.engine.submodule import RowColumns


class OddRowsStopAt7(nn.Module):
    """In place of a node's sampler: rows with an odd handle stop at token 7."""

    def stopped(self, handles: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return (handles % 2 == 1) & (tokens == 7)


def row_columns(handles: Sequence[int], lengths: Sequence[int], prompts: Sequence[Sequence[int]]) -> RowColumns:
    """Rows that have drawn nothing, with `lengths` tokens in their caches."""
    zeros = np.zeros(len(handles), np.int32)
    return RowColumns(
        handles=np.asarray(handles, np.int32),
        lengths=np.asarray(lengths, np.int32),
        num_prompt=np.asarray([len(prompt) for prompt in prompts], np.int32),
        num_draws=zeros,
        iterations=zeros,
        finals=np.zeros(len(handles), bool),
        prompts=[np.asarray(prompt, np.int32) for prompt in prompts],
        live=frozenset(),
    )
