"""What fails whom: a forward that raises, memory that runs out, rows that may not share a forward."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_rig import GREEDY, EngineRig, prompts, take
from support.tiny_decoder import NODE, TinyDecoder

from mstar.communication.messages import SamplingParams
from mstar.engine import fault_log
from mstar.engine.resources import logit_adjust
from mstar.engine.resources.logit_adjust import TokenBiases, TokenCounts
from mstar.engine.resources.sampler import Sampler
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeOutputs, RowColumns
from mstar.platforms.executor import ThreadedExecutor

PROMPTS = prompts(6, seed=5)


@pytest.mark.parametrize("threaded", [False, True])
def test_an_exception_in_a_forward_fails_its_rows_and_nobody_else(threaded: bool):
    rig = EngineRig(executor=ThreadedExecutor() if threaded else None)
    for handle in range(4):
        rig.open(handle, PROMPTS[handle])
    rig.prefill(0, 1, 2, 3)
    rig.decoder.fail = [ValueError("shapes")]
    step = rig.decode(1, 3)
    assert step.failed.keys() == {1, 3}
    assert "the forward of LLM failed: ValueError: shapes" in step.failed[1]
    assert isinstance(step.error, ValueError)
    assert rig.engine.check_stop(step) == []
    for handle in (1, 3):
        rig.engine.memory.close(handle)
        del rig.out[handle]
    rig.decode(0, 2)
    assert rig.out[2] == rig.decoder.reference_greedy(PROMPTS[2], 2)
    rig.close_all()
    rig.executor.close()


class Slips(TinyDecoder):
    """With a mistake in the hook or in the forward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        self._slip("hook")
        return super().prepare_batch(graph_walk, rows)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        self._slip("forward")
        return super().forward_batched(graph_walk, inputs)

    def _slip(self, place: str) -> None:
        if place == self.where:
            raise AttributeError("no_such_answer")  # MISTAKE


@pytest.mark.parametrize("where", ["hook", "forward"])
def test_the_line_of_a_mistake_in_a_model_is_in_the_log_once(where: str, caplog: pytest.LogCaptureFixture):
    fault_log._written.clear()
    rig = EngineRig({NODE: Slips("")})
    node = rig.nodes[NODE]
    assert isinstance(node, Slips)
    for handle in range(3):
        rig.open(handle, PROMPTS[handle])
    node.where = where
    for handle in range(3):
        step, _ = rig.engine.build([take("prefill", [handle])])
        assert step is not None
        if not step.failed:
            step = rig.run(take("prefill", [handle]))
        assert step.failed.keys() == {handle} and "no_such_answer" in step.failed[handle]
        assert "Traceback" not in step.failed[handle]
    lines = [(number, text) for number, text in enumerate(Path(__file__).read_text().split("\n"), 1)]
    (mistake,) = (number for number, text in lines if text.endswith("# MISTAKE"))
    assert caplog.text.count(f'test_failures.py", line {mistake}, in _slip') == 1
    assert caplog.text.count("its traceback is further up") == 2
    rig.close_all()


def test_nan_logits_fail_their_row_and_the_row_planned_ahead_is_harmless():
    rig = EngineRig()
    for handle in range(3):
        rig.open(handle, [5, 6, handle + 10])
    rig.decoder.poison_token = 11
    cur = rig.arm(take("prefill", [0, 1, 2]))
    rig.engine.submit(cur)
    nxt = rig.arm(take("decode", [0, 1, 2]))  # planned before anybody knows
    rig.end(cur)
    assert cur.failed.keys() == {1}
    rig.engine.abandon(nxt)
    rig.engine.memory.close(1)
    del rig.out[1]
    for _ in range(5):
        rig.decode(0, 2)
    for handle in (0, 2):
        assert rig.out[handle] == rig.decoder.reference_greedy([5, 6, handle + 10], 6)
    rig.close_all()


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried ..."),
]
PENALIZED = SamplingParams(temperature=0.0, frequency_penalty=0.7, num_logprobs=2, max_tokens=24)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_out_of_memory_is_tried_again_in_two_halves(error: BaseException):
    rigs = [EngineRig(), EngineRig()]
    for rig in rigs:
        for handle in range(5):
            rig.open(handle, PROMPTS[handle], PENALIZED)
    calm, short = rigs
    calm.generate(range(5), 6)
    short.decoder.fail = [error]
    first = short.prefill(0, 1, 2, 3, 4)
    assert not first.failed and first.outputs.logprobs is not None
    assert [entry is not None for entry in map(first.outputs.logprobs.__getitem__, range(5))] == [True] * 5
    for _ in range(5):
        short.decoder.fail = [error]
        short.decode(0, 1, 2, 3, 4)
    assert short.decoder.batch_sizes == [5, 3, 2] * 6
    assert short.out == calm.out  # tokens, counts and positions are those of whole steps


def test_a_half_that_does_not_fit_either_fails_alone():
    rig = EngineRig()
    for handle in range(4):
        rig.open(handle, PROMPTS[handle])
    rig.prefill(0, 1, 2, 3)
    whole = torch.OutOfMemoryError("whole")
    rig.decoder.fail = [torch.OutOfMemoryError("first half"), whole]
    step = rig.decode(0, 1, 2, 3)
    assert step.failed.keys() == {0, 1} and "out of memory" in step.failed[0]
    assert rig.out[2] == rig.decoder.reference_greedy(PROMPTS[2], 2)
    assert rig.out[3] == rig.decoder.reference_greedy(PROMPTS[3], 2)
    rig.decoder.fail = [torch.OutOfMemoryError("b"), torch.OutOfMemoryError("a"), whole]
    step = rig.decode(2, 3)
    assert step.failed.keys() == {2, 3} and isinstance(step.error, MemoryError)
    rig.close_all()


def test_halves_of_which_one_has_asked_for_logprobs():
    """Also where it is the one that does not fit."""
    rig = EngineRig()
    for handle in range(4):
        rig.open(handle, PROMPTS[handle], PENALIZED if handle == 3 else GREEDY)
    rig.decoder.fail = [torch.OutOfMemoryError("whole")]
    step = rig.prefill(0, 1, 2, 3)
    assert not step.failed and step.outputs.logprobs is not None
    assert [step.outputs.logprobs[row] is not None for row in range(4)] == [False, False, False, True]
    rig.decoder.fail = [torch.OutOfMemoryError("first half"), torch.OutOfMemoryError("whole")]
    step = rig.run(take("decode", [3, 2, 1, 0]))
    assert step.failed.keys() == {3, 2}
    for handle in (0, 1):
        assert rig.out[handle] == rig.decoder.reference_greedy(PROMPTS[handle], 2)
    rig.close_all()


BIASED = SamplingParams(
    temperature=0.7, top_p=0.5, repetition_penalty=1.7, bias_ids=(5,), bias_values=(3.0,), seed=3, max_tokens=24,
    min_tokens=4, stop_token_ids=(7,),
)  # fmt: skip


def raising(plain: Callable[..., Any], error: BaseException, at: int) -> Callable[..., Any]:
    """`plain`, but call number `at` (from 0) raises."""
    calls: list[None] = []

    def run(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == at + 1:
            raise error
        return plain(*args)

    return run


LOST = [
    (Sampler, "_write_params", 0, {1, 2, 3}),
    (TokenCounts, "reset", 0, {1}),
    (TokenCounts, "reset", 1, {2}),
    (TokenCounts, "reset", 2, {3}),
    (TokenBiases, "reset", 0, {2}),
    (TokenBiases, "reset", 1, {3}),
    (logit_adjust, "_grown", 1, {1}),
    (logit_adjust, "_grown", 4, {2}),
]


@pytest.mark.parametrize(("owner", "name", "at", "failing"), LOST)
@pytest.mark.parametrize("first", [[0, 1], [0, 1, 2, 3], [0]])
def test_memory_for_a_table_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, failing: set[int], first: list[int]
):
    """Whoever is in the step with which the tables are written; the others' tokens are those that they always have."""
    params = [GREEDY, PENALIZED, BIASED, BIASED]
    rigs = [EngineRig(), EngineRig()]
    for rig in rigs:
        for handle in range(4):
            rig.open(handle, PROMPTS[handle], params[handle])
    calm, short = rigs
    calm.generate(range(4), 6)
    with monkeypatch.context() as patch:
        error = OUT_OF_MEMORY[at % len(OUT_OF_MEMORY)]
        patch.setattr(owner, name, raising(getattr(owner, name), error, at))
        step = short.prefill(*first)
    failed = dict(step.failed)
    later = [handle for handle in range(4) if handle not in first]
    if later:
        failed |= short.prefill(*later).failed
    assert failed.keys() == failing
    assert all("could not be written" in reason for reason in failed.values())
    for handle in failing:
        short.engine.memory.close(handle)
    left = sorted({0, 1, 2, 3} - failing)
    for _ in range(5):
        assert not short.decode(*left).failed
    assert [short.out[handle] for handle in left] == [calm.out[handle] for handle in left]
    for handle in failing:  # memory is there again
        short.open(handle, PROMPTS[handle], params[handle])
    assert not short.prefill(*failing).failed
    for _ in range(5):
        short.decode(*failing)
    assert [short.out[handle] for handle in failing] == [calm.out[handle] for handle in failing]
    short.close_all()


def test_a_row_without_its_table_that_was_planned_ahead_is_harmless(monkeypatch: pytest.MonkeyPatch):
    rig = EngineRig()
    for handle in range(3):
        rig.open(handle, PROMPTS[handle], PENALIZED if handle == 1 else GREEDY)
    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(logit_adjust, "_grown", raising(logit_adjust._grown, error, 0))
    cur = rig.arm(take("prefill", [0, 1, 2]))
    rig.engine.submit(cur)
    nxt = rig.arm(take("decode", [0, 1, 2]))
    rig.engine.submit(nxt)  # before anybody knows
    rig.end(cur)
    assert cur.failed.keys() == {1}
    rig.end(nxt)
    for handle in (0, 2):
        assert rig.out[handle] == rig.decoder.reference_greedy(PROMPTS[handle], 2)
    rig.close_all()


def test_a_request_that_ends_before_its_first_step_takes_no_table():
    rig = EngineRig()
    rig.open(0, PROMPTS[0])
    rig.open(1, PROMPTS[1], PENALIZED)
    rig.engine.memory.close(1)
    rig.open(1, PROMPTS[1])
    assert not rig.prefill(0, 1).failed
    assert rig.sampler._counts.num_bytes == 0


@pytest.mark.parametrize("threaded", [False, True])
def test_device_work_that_raises_takes_no_later_work_with_it(threaded: bool):
    rig = EngineRig(executor=ThreadedExecutor() if threaded else None)
    calm = EngineRig()
    for each in (rig, calm):
        for handle in (0, 1):
            each.open(handle, PROMPTS[handle], BIASED)
    calm.generate([0, 1], 4)
    plain = rig.kv.drain_work

    def broken() -> None:
        raise ValueError("no such page")

    rig.kv.drain_work = lambda: [broken, *plain()]
    step = rig.prefill(0)
    assert step.failed.keys() == {0} and "no such page" in step.failed[0]
    rig.kv.drain_work = plain
    rig.generate([1], 4)
    assert rig.out[1] == calm.out[1]
    rig.executor.close()


class Alone(TinyDecoder):
    """Prompts of different lengths may not share a forward."""

    def can_batch(self, graph_walk: str, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> bool:
        return len({shape.get("media") for shape in shapes}) == 1

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        made = dict(super().forward_batched(graph_walk, inputs))
        if "media" in inputs.tensors:
            made["echo"] = inputs.tensors["media"] * 2
        return made


def test_rows_that_cannot_share_a_forward_run_one_after_the_other():
    rig = EngineRig({NODE: Alone()})
    for handle in range(4):
        rig.open(handle, PROMPTS[handle])
    shapes = [(2, 3), (4,), (2, 3), (1, 1)]
    media = [rig.store.put(torch.full(shape, float(row + 1))) for row, shape in enumerate(shapes)]
    step = rig.arm(take("prefill", [0, 1, 2, 3], media=media))
    rig.engine.submit(step)
    assert rig.decoder.batch_sizes == [1, 1, 1, 1]
    rig.engine.finish(step)
    for row, tensor_id in enumerate(step.outputs.ids_of(step.parts[0])["echo"]):
        assert torch.equal(rig.store.get(tensor_id), torch.full(shapes[row], 2.0 * (row + 1)))
    expected = [rig.decoder.reference_greedy(PROMPTS[handle], 1)[0] for handle in range(4)]
    assert step.host("token").tolist() == expected
    rig.decoder.batch_sizes.clear()
    rig.decode(3, 1, 0)
    assert rig.decoder.batch_sizes == [3]
    assert rig.out[1] == rig.decoder.reference_greedy(PROMPTS[1], 2)[1:]


def test_wrong_row_counts_and_host_signals_are_named():
    class Wrong(TinyDecoder):
        def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
            made = dict(super().forward_batched(graph_walk, inputs))
            return made | ({"hidden": torch.zeros(7, 2)} if graph_walk == "decode" else {"token": [torch.zeros(1)]})

    rig = EngineRig({NODE: Wrong()})
    rig.open(0, PROMPTS[0])
    assert "host signal 'token'" in rig.prefill(0).failed[0]
    assert "output 'hidden' has 7 rows for a step of 1" in rig.decode(0).failed[0]


def test_stop_decisions_leave_failed_rows_out_and_count_within_their_part():
    rig = EngineRig()
    first = TinyDecoder().reference_greedy([5, 6], 1)[0]
    rig.open(0, [9, 9])
    rig.prefill(0)
    for handle, prompt in ((1, [1, 2, 11]), (2, [5, 6])):
        rig.open(handle, prompt, SamplingParams(temperature=0.0, stop_token_ids=tuple({first, 0, 60}), max_tokens=24))
    rig.decoder.poison_token = 11
    step = rig.arm(take("decode", [0]), take("prefill", [1, 2]))
    rig.engine.submit(step)
    rig.engine.finish(step)
    assert step.failed.keys() == {1}
    ((part, decision),) = rig.engine.check_stop(step)
    assert part.taken.key.walk == "prefill"
    assert decision.index.tolist() == [1] and decision.finish
    assert np.isin(step.host("token")[2], [first])
