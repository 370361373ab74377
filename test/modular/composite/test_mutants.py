"""The composite's equality with its reference notices broken machinery: each mutant below makes it fail.

A mutant breaks one mechanism of the product; the run is the same as without it, where it passes.
"""

import pytest
import torch
from support.composite.declarations import CODES
from support.composite.deployment import Composite, make_requests
from support.composite.submodules import CodePredictor
from support.instance import Tuning

from mstar.engine.cuda_graph_runner import Bucket
from mstar.engine.step_runner import StepWork
from mstar.engine.submodule import EngineInputs
from mstar.graph.stream_desk import StreamDesk
from mstar.streaming.buffer import StreamBuffer

REQUESTS = make_requests(8, seed=4, max_tokens=9)
CREDIT = 7
CAPTURED = Tuning(capture_sizes=(4, 8))


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


@pytest.fixture(scope="module")
def tight(tmp_path_factory) -> Composite:
    """With as little credit as the codec's windows allow, less than the frames of a request."""
    return Composite(tmp_path_factory.mktemp("tight"), stream_credit=CREDIT)


def _run_and_check(composite: Composite, placement: str, tuning: Tuning) -> None:
    instance = composite.instance(placement, tuning)
    try:
        for index, request in enumerate(REQUESTS):
            composite.submit(instance, f"r{index}", request)
            instance.tick()
        instance.run(max_ticks=3000)
        for index, request in enumerate(REQUESTS):
            composite.check(instance, f"r{index}", request)
    finally:
        instance.close()


def _drop_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third item of every stream is lost, and its end agrees with that."""
    put, end = StreamBuffer.put, StreamBuffer.end
    seen: dict[int, int] = {}

    def lossy_put(self: StreamBuffer, tensor_id: int, tag: int) -> None:
        seen[id(self)] = seen.get(id(self), 0) + 1
        if seen[id(self)] != 3:
            put(self, tensor_id, tag)

    def lossy_end(self: StreamBuffer, total: int) -> None:
        end(self, total - (total >= 3))

    monkeypatch.setattr(StreamBuffer, "put", lossy_put)
    monkeypatch.setattr(StreamBuffer, "end", lossy_end)


def _swap_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two rows of stored outputs change places."""
    kept = StepWork._kept

    def swapped(self: StepWork, value):
        value = kept(self, value)
        if isinstance(value, torch.Tensor) and len(value) > 1:
            value[[0, 1]] = value[[1, 0]]
        return value

    monkeypatch.setattr(StepWork, "_kept", swapped)


@pytest.mark.parametrize("placement", ["one_worker", "three_workers"])
def test_unbroken_machinery_passes(composite: Composite, placement: str):
    _run_and_check(composite, placement, CAPTURED)


@pytest.mark.parametrize("mutate", [_drop_a_chunk, _swap_two_rows])
@pytest.mark.parametrize("placement", ["one_worker", "three_workers"])
def test_lost_and_swapped_values_are_noticed(composite: Composite, monkeypatch, mutate, placement: str):
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=r"r\d"):
        _run_and_check(composite, placement, CAPTURED)


def test_a_missing_output_ring_is_noticed(composite: Composite):
    """Outputs that are handed out as the step's own buffers are overwritten by the step after it."""
    with pytest.raises(AssertionError, match=r"r\d"):
        _run_and_check(composite, "one_worker", Tuning(capture_sizes=(4, 8), engine={"guard_outputs": False}))


def _read_padding(self: CodePredictor, graph_walk: str, inputs: EngineInputs):
    """A forward that reads rows past its own, with a weight of zero: harmless as long as they hold numbers."""
    stray = 0.0 * inputs.tensors["hidden"].sum()
    return _FORWARD(self, graph_walk, _Nudged(inputs, stray))


_FORWARD = CodePredictor.forward_batched


class _Nudged:
    """Engine inputs whose hidden states have something added."""

    def __init__(self, inputs: EngineInputs, stray: torch.Tensor) -> None:
        self.tokens, self.iterations = inputs.tokens, inputs.iterations
        self.tensors = {"hidden": inputs.tensors["hidden"] + stray}


def test_the_nan_fill_notices_a_node_that_reads_padding(composite: Composite, monkeypatch):
    monkeypatch.setattr(CodePredictor, "forward_batched", _read_padding)
    with pytest.raises(AssertionError, match="not finite"):
        _run_and_check(composite, "one_worker", CAPTURED)


def test_without_the_nan_fill_that_node_would_pass(composite: Composite, monkeypatch):
    """So that the test above fails when the fill is disabled: zeros in the padding make the stray read harmless."""
    monkeypatch.setattr(CodePredictor, "forward_batched", _read_padding)
    write = Bucket.write_inputs
    monkeypatch.setattr(Bucket, "write_inputs", lambda self, values, n, *, poison: write(self, values, n, poison=False))
    _run_and_check(composite, "one_worker", CAPTURED)


def _run_with_a_slow_codec(composite: Composite) -> int:
    """The codec's worker gets no turn until nothing moves; returns the most frames that any request made meanwhile."""
    instance = composite.instance("codec_apart", Tuning())
    try:
        for index, request in enumerate(REQUESTS):
            composite.submit(instance, f"r{index}", request)
        while any(result.num_opened < 2 for result in instance.results.values()):
            instance.tick()
        while instance.tick([0]):
            pass
        frames = max(len(result.tokens) for result in instance.results.values())
        instance.run(max_ticks=3000)
        for index, request in enumerate(REQUESTS):
            composite.check(instance, f"r{index}", request)
    finally:
        instance.close()
    return frames


def _check_credit(composite: Composite) -> None:
    frames = _run_with_a_slow_codec(composite)
    assert frames <= CREDIT, f"a producer was {frames} items ahead with a credit of {CREDIT}"


def test_a_producer_waits_for_credit(tight: Composite):
    _check_credit(tight)


def test_missing_stream_credit_is_noticed(tight: Composite, monkeypatch):
    produce = StreamDesk.produce

    def ungated(self: StreamDesk, request, op, tensor_id: int) -> bool:
        request.credited[op.edge] = request.made.get(op.edge, 0) + 1
        return produce(self, request, op, tensor_id)

    monkeypatch.setattr(StreamDesk, "produce", ungated)
    with pytest.raises(AssertionError, match="items ahead"):
        _check_credit(tight)


def test_captured_steps_with_padding_occur(composite: Composite):
    """Otherwise the tests of padding would test nothing."""
    instance = composite.instance("one_worker", CAPTURED)
    for index, request in enumerate(REQUESTS[:3]):
        composite.submit(instance, f"r{index}", request)
    instance.run()
    instance.close()
    rows = {len(step.rows) for step in instance.steps if step.node == CODES}
    assert rows & {1, 2, 3}
