"""`DeviceGraph`: a forward recorded once by the accelerator. `GraphMemory`: what the graphs of one engine share.

Recording at start-up on the thread that loads, replays on the executor. Must not know what it records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UP_RUNS = 2
"""Kernels are compiled and libraries choose theirs before the recording, which may do neither."""


class GraphMemory:
    """One pool for the temporaries of all graphs, which run one after the other, and the stream they are recorded on.
    Largest first, so that the smaller ones find room in it. On a CPU there is nothing to share."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.on_device else None
        self.pool = torch.cuda.graph_pool_handle() if self.on_device else None


class DeviceGraph:
    """See the module docstring. What the forward leaves behind lies outside of the pool: an earlier graph's
    temporaries are overwritten by the next replay of any."""

    def __init__(self, memory: GraphMemory, run: Callable[[], None]) -> None:
        """Runs it a few times, then records it. What `run` raises comes out of here."""
        stream = memory.stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory.pool, stream=stream, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        self._graph.replay()


class _Address:
    """Device memory by its address alone."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """An fp32 temporary of a graph, to be read behind its replay, without keeping the memory from the graphs that are
    recorded later: each of them may write over it. On a CPU the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    assert tensor.dtype is torch.float32
    return torch.as_tensor(_Address(tensor), device=tensor.device)
