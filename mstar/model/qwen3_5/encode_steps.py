"""How the encoding of a request's media is divided into steps, so that none is longer than a chunk of a prompt may be.

Pure arithmetic, known to the declarations (which bound the loop) and to the node (which runs it). No torch.
"""

from __future__ import annotations


def num_encode_steps(num_patches: int, depth: int, budget: int) -> int:
    """Steps of at most `budget` patches times blocks each; a block is never divided."""
    blocks = depth if num_patches == 0 else max(1, min(depth, budget // num_patches))
    return -(-depth // blocks)


def blocks_of_step(step: int, num_steps: int, depth: int) -> range:
    """The blocks that step `step` of `num_steps` runs; none past the last step."""
    return range(depth * min(step, num_steps) // num_steps, depth * min(step + 1, num_steps) // num_steps)
