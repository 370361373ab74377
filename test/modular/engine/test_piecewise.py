"""Regions of a forward that are captured by themselves: which size a call takes, what its padding holds and reaches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_rig import EngineRig, take
from torch import Tensor

from mstar.engine.capture_failure import CaptureError
from mstar.engine.cuda_graph_config import (
    PiecewiseBatchedConfig,
    PiecewiseConfig,
    PiecewisePackedConfig,
    RegionInputs,
    StaticInput,
)
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeOutputs, NodeSubmodule, RowColumns

X = StaticInput("x", (2,), "float32")


class Encoder(NodeSubmodule):
    """Rows bring items `x [items, 2]`; each is given the sum of its segment, once in a packed region, and its double in
    a batched one of the rows' sums. `seen`: items and segments' borders of each run of the packed region."""

    leaky = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[int], bool]] = []

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        return NodeBatch(np.zeros(len(rows.handles), np.int32))

    def get_piecewise_cuda_graph_configs(self) -> Sequence[PiecewiseConfig]:
        return (
            PiecewisePackedConfig("sums", self.sums, (X,), max_items=16, max_segments=3),
            PiecewiseBatchedConfig("double", lambda given: given.items["x"] * 2, (X,)),
        )

    def sums(self, given: RegionInputs) -> Tensor:
        x, starts = given.items["x"], given.starts
        assert starts is not None
        self.seen.append((x.shape[0], starts.tolist(), bool(x.isnan().any())))
        if self.leaky:
            return x + x.sum()
        out = torch.full_like(x, float("nan"))
        for begin, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
            out[begin:end] = x[begin:end].sum(0)
        return out

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        rows = inputs.ragged["x"] if "x" in inputs.ragged else inputs.tensors["x"].unbind()
        lengths = [row.shape[0] for row in rows]
        made = self.regions["sums"]({"x": torch.cat(list(rows))}, lengths)
        first = torch.stack([piece[0] for piece in made.split(lengths)])
        return {"sum": list(made.split(lengths)), "double": self.regions["double"]({"x": first})}


def rig_of(node: Encoder, **config: Any) -> EngineRig:
    return EngineRig({"encoder": node}, (), **{"capture_tokens": (4, 8, 32), "capture_sizes": (2, 4), **config})


def run(rig: EngineRig, lengths: Sequence[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    values = [torch.randn(length, 2) for length in lengths]
    ids = [rig.store.put(value) for value in values]
    step = rig.arm(take("encode", range(len(ids)), "encoder", x=ids))
    rig.engine.submit(step)
    rig.engine.finish(step)
    assert step.error is None, step.error
    made = step.outputs.ids_of(step.parts[0])
    return values, rig.store.gather_list(made["sum"]), rig.store.gather_list(made["double"])


CALLS = {
    (1,): (4, [0, 1, 1, 1], True),
    (4,): (4, [0, 4, 4, 4], False),
    (2, 3): (8, [0, 2, 5, 5], True),
    (1, 6, 1): (8, [0, 1, 7, 8], False),
    (9,): (9, [0, 9], False),  # 16 is not captured, and 32 is more than declared
    (1, 1, 1, 1): (4, [0, 1, 2, 3, 4], False),  # more segments than declared
}
"""Lengths of the rows: items that the region sees, borders, and whether there is padding."""


@pytest.mark.parametrize("lengths", CALLS)
def test_a_call_takes_the_smallest_size_that_holds_it(lengths: tuple[int, ...]):
    node = Encoder()
    rig = rig_of(node)
    for _ in range(2):
        node.seen.clear()
        values, sums, doubles = run(rig, lengths)
        assert node.seen == [CALLS[lengths]]
        for value, own, double in zip(values, sums, doubles, strict=True):
            torch.testing.assert_close(own, value.sum(0).expand_as(value))
            torch.testing.assert_close(double, own[0] * 2)


def test_padding_that_reaches_the_items_shows():
    node = Encoder()
    rig = rig_of(node)
    node.leaky = True
    assert run(rig, (4,))[1][0].isfinite().all()
    assert run(rig, (3,))[1][0].isnan().all()


def test_sizes_are_the_deployments():
    node = Encoder()
    rig_of(node)
    assert [list(node.regions[name].sizes) for name in ("sums", "double")] == [[4, 8], [2, 4]]
    rig_of(node, capture_sizes=(4, 16, 16), capture_tokens=())  # of at most 8 rows
    assert list(node.regions["double"].sizes) == [4, 8]
    rig_of(node, capture_sizes=None, capture_tokens=())  # on a CPU nothing by itself
    assert [list(node.regions[name].sizes) for name in ("sums", "double")] == [[], []]


def test_regions_report_each_size():
    rig, seen = rig_of(Encoder()), []
    assert rig.engine.capture(lambda *state: seen.append(state)) == 4
    assert seen == [
        ("capture encoder sums", 0, 4),
        ("capture encoder sums", 1, 4),
        ("capture encoder double", 2, 4),
        ("capture encoder double", 3, 4),
        ("capture", 4, 4),
    ]


def test_a_region_that_fails_ends_start_up_by_name():
    class Unready(Encoder):
        def sums(self, given: RegionInputs) -> Tensor:
            raise RuntimeError("no kernel for this shape")

    with pytest.raises(CaptureError, match="region 'sums' of encoder failed: no kernel"):
        rig_of(Unready())


def test_without_an_engine_a_region_is_what_it_runs():
    node, x = Encoder(), torch.randn(5, 2)
    assert torch.equal(node.regions["double"]({"x": x}), x * 2)
    made = node.regions["sums"]({"x": x}, (2, 3))
    torch.testing.assert_close(made, torch.cat([x[:2].sum(0).expand(2, 2), x[2:].sum(0).expand(3, 2)]))
