"""Prompts computed over several steps: equal outputs whatever the cuts, running ahead is safe, nobody starves."""

from dataclasses import dataclass, replace

import pytest
import torch
from support.instance import LOOPS, Instance, Result, Tuning
from support.tiny_serving import TinyLlama

from mstar.engine.execution import AdmitOutcome, Step, StepState

BUDGET = 16
TUNINGS = {name: replace(tuning, max_step_tokens=BUDGET) for name, tuning in LOOPS.items()}


@pytest.fixture(params=list(TUNINGS))
def tuning(request: pytest.FixtureRequest) -> Tuning:
    return TUNINGS[request.param]


@pytest.fixture(params=["overlap", "threaded", "late"])
def ahead(request: pytest.FixtureRequest) -> Tuning:
    return TUNINGS[request.param]


@dataclass
class Chunk:
    """A row of a step that computed prompt tokens. `beside`: rows of one token in that step."""

    handle: int
    tokens: int
    last: bool
    carried: bool
    beside: int


class Watched:
    """An instance whose steps are kept."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.submitted: list[Step] = []
        self.abandoned: list[Step] = []
        engine = instance.parts[0].engine
        submit, abandon = engine.submit, engine.abandon

        def note_submit(step: Step, **how: bool) -> None:
            self.submitted.append(step)
            submit(step, **how)

        def note_abandon(step: Step) -> None:
            self.abandoned.append(step)
            abandon(step)

        engine.submit, engine.abandon = note_submit, note_abandon

    def chunks(self) -> list[list[Chunk]]:
        """Of each submitted step."""
        return [_chunks_of(step) for step in self.submitted]


def _chunks_of(step: Step) -> list[Chunk]:
    going = [False] * step.num_rows if step.unfinished is None else step.unfinished.tolist()
    prompts = [part.taken.key.walk == "prefill" for part in step.parts for _ in part.taken.rows]
    carried = [index in step.carried for index, part in enumerate(step.parts) for _ in part.taken.rows]
    return [
        Chunk(int(step.handles[row]), int(step.spans[row]), not going[row], carried[row], prompts.count(False))
        for row in range(step.num_rows)
        if prompts[row]
    ]


def watched(tiny: TinyLlama, tuning: Tuning, node=None) -> Watched:
    return Watched(tiny.instance(tuning, node))


def run_all(instance: Instance, baseline: dict[str, float]) -> None:
    instance.run()
    after = dict(instance.gauges(0))
    for name in ("mstar_handles", "mstar_running_rows", "mstar_queue_depth", "mstar_tensors"):
        assert after[name] == baseline[name] == 0
    owned = 'mstar_pages{pool="kv",state="owned"}'
    assert after[owned] == baseline[owned] == 0


def idle(instance: Instance) -> dict[str, float]:
    return dict(instance.gauges(0))


LENGTHS = (70, 5, 100, 33, 16, 17, 1, 48)


def test_outputs_are_those_of_whole_prompts(tiny, tuning):
    run = watched(tiny, tuning)
    baseline = idle(run.instance)
    prompts = [tiny.prompt(length, index) for index, length in enumerate(LENGTHS)]
    for index, prompt in enumerate(prompts):
        tiny.submit(run.instance, f"r{index}", prompt, max_tokens=12)
        run.instance.tick()
    run_all(run.instance, baseline)
    for index, prompt in enumerate(prompts):
        assert run.instance.results[f"r{index}"].tokens == tiny.greedy(prompt, 12)
    chunks = run.chunks()
    assert sum(chunk.tokens for step in chunks for chunk in step) == sum(LENGTHS)
    assert sum(len(step) for step in chunks) > len(LENGTHS) + 10, "prompts were cut"
    assert any(step and step[0].beside for step in chunks), "chunks share steps with rows that decode"
    counters = run.instance.parts[0].counters
    assert (counters.num_prefill_tokens, counters.num_recomputed_tokens) == (sum(LENGTHS), 0)
    run.instance.close()


def test_seeded_draws_do_not_depend_on_the_cuts(tiny):
    sampling = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5, "max_tokens": 14}
    drawn: list[list[list[int]]] = []
    tunings = [replace(tuning, max_step_tokens=budget) for tuning in TUNINGS.values() for budget in (7, 40)]
    for tuning in (Tuning(overlap=False), *tunings):
        instance = tiny.instance(tuning)
        results = [
            tiny.submit(instance, f"r{index}", tiny.prompt(length, index), seed=index, **sampling)
            for index, length in enumerate(LENGTHS)
        ]
        instance.run()
        drawn.append([result.tokens for result in results])
        instance.close()
    assert all(tokens == drawn[0] for tokens in drawn[1:])


def test_a_step_has_no_more_of_prompts_than_its_budget_and_never_nothing(tiny, tuning):
    run = watched(tiny, tuning)
    for index in range(3):
        tiny.submit(run.instance, f"s{index}", tiny.prompt(4, index), max_tokens=60)
    for _ in range(4):
        run.instance.tick()
    for index in range(3):
        tiny.submit(run.instance, f"long{index}", tiny.prompt(90, index), max_tokens=3)
    run.instance.run()
    for step, chunks in zip(run.submitted, run.chunks(), strict=True):
        most = BUDGET + chunks[0].beside if chunks else 3 + 3
        assert 0 < step.spans.sum() <= most
        assert sum(chunk.tokens for chunk in chunks) <= BUDGET
    run.instance.close()


# running ahead


def test_the_next_chunk_is_planned_while_this_one_runs(tiny, ahead):
    run = watched(tiny, ahead)
    result = tiny.submit(run.instance, "r", tiny.prompt(100), max_tokens=4)
    run.instance.run()
    assert result.tokens == tiny.greedy(tiny.prompt(100), 4)
    chunks = [chunk for step in run.chunks() for chunk in step]
    assert [chunk.tokens for chunk in chunks] == [16] * 6 + [4]
    assert [chunk.carried for chunk in chunks] == [False] + [True] * 6
    assert not run.abandoned
    run.instance.close()


def test_the_plain_loop_carries_nothing(tiny):
    run = watched(tiny, TUNINGS["plain"])
    tiny.submit(run.instance, "r", tiny.prompt(60), max_tokens=2)
    run.instance.run()
    chunks = [chunk for step in run.chunks() for chunk in step]
    assert [chunk.tokens for chunk in chunks] == [16, 16, 16, 12]
    assert not any(chunk.carried for chunk in chunks)
    run.instance.close()


def test_abandoning_the_next_step_leaves_the_chunk_in_this_one(tiny, ahead):
    """A stream fails while the next step, with it and the next chunk, is armed."""
    node = tiny.build_node()
    instance = tiny.instance(ahead, node)
    run = Watched(instance)
    baseline = idle(instance)
    failing = tiny.submit(instance, "failing", tiny.prompt(5), max_tokens=100)
    long = [tiny.submit(instance, f"long{index}", tiny.prompt(130, index), max_tokens=5) for index in range(2)]
    forward, shared = node.network.forward, []

    def spoil_a_stream(tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        logits = forward(tokens, last)
        if len(last) > 1:
            shared.append(len(last))
            if len(shared) == 4:
                logits[0] = float("nan")  # the rows that decode come first
        return logits

    node.network.forward = spoil_a_stream
    run_all(instance, baseline)
    assert "NaN" in (failing.failure or "")
    for index, result in enumerate(long):
        assert result.tokens == tiny.greedy(tiny.prompt(130, index), 5)
    if ahead.late:
        assert any(step.dropped for step in run.submitted)
    else:
        assert any(step.carried and step.state is StepState.ABANDONED for step in run.abandoned)
    assert instance.parts[0].counters.num_prefill_tokens == 265, "an abandoned chunk counts when it is computed"
    instance.close()


@pytest.mark.parametrize("at_chunk", [1, 2, 4])
def test_a_chunk_that_fails_takes_its_successor_with_it(tiny, tuning, at_chunk):
    node = tiny.build_node()
    instance = tiny.instance(tuning, node)
    run = Watched(instance)
    baseline = idle(instance)
    forward = node.forward_batched
    calls: list[int] = []

    def fail_one(walk, inputs):
        calls.append(1)
        if len(calls) == at_chunk:
            raise RuntimeError("this chunk is broken")
        return forward(walk, inputs)

    node.forward_batched = fail_one
    doomed = tiny.submit(instance, "doomed", tiny.prompt(64), max_tokens=5)
    run_all(instance, baseline)
    assert "this chunk is broken" in (doomed.failure or "") and not doomed.tokens
    assert not any(len(step.failed) for step in run.submitted if step.state is StepState.SUBMITTED)
    again = tiny.submit(instance, "again", tiny.prompt(64), max_tokens=5)
    run_all(instance, baseline)
    assert again.tokens == tiny.greedy(tiny.prompt(64), 5)
    instance.close()


@pytest.mark.parametrize("after_ticks", range(1, 8))
def test_a_row_that_leaves_between_two_chunks(tiny, tuning, after_ticks):
    run = watched(tiny, tuning)
    instance = run.instance
    baseline = idle(instance)
    stays = tiny.submit(instance, "stays", tiny.prompt(80, 1), max_tokens=6)
    tiny.submit(instance, "leaves", tiny.prompt(90, 2), max_tokens=6)
    for _ in range(after_ticks):
        instance.tick()
    instance.abort("leaves")
    for _ in range(3):
        instance.tick()
    assert instance.num_handles == 1, "a chunk that is planned is the last"
    run_all(instance, baseline)
    assert stays.tokens == tiny.greedy(tiny.prompt(80, 1), 6)
    instance.close()


@pytest.mark.parametrize("name", list(TUNINGS))
def test_memory_that_runs_out_in_a_step_with_chunks(tiny, name):
    """Once: the halves run. Always: the rows fail, and the next request is served."""
    node = tiny.build_node()
    instance = tiny.instance(TUNINGS[name], node)
    baseline = idle(instance)
    forward = node.forward_batched
    broken = [False]
    halved: list[int] = []

    def short(walk, inputs):
        if broken[0] or inputs.num_rows > 2:
            halved.append(inputs.num_rows)
            raise torch.OutOfMemoryError("too much")
        return forward(walk, inputs)

    node.forward_batched = short
    streams = [tiny.submit(instance, f"s{index}", tiny.prompt(4, index), max_tokens=16) for index in range(2)]
    long = [tiny.submit(instance, f"long{index}", tiny.prompt(60, index), max_tokens=3) for index in range(2)]
    run_all(instance, baseline)
    assert halved, "no step was too large"
    assert [result.tokens for result in streams] == [tiny.greedy(tiny.prompt(4, index), 16) for index in range(2)]
    assert [result.tokens for result in long] == [tiny.greedy(tiny.prompt(60, index), 3) for index in range(2)]
    broken[0] = True
    doomed = tiny.submit(instance, "doomed", tiny.prompt(60, 9), max_tokens=3)
    run_all(instance, baseline)
    assert "out of memory" in (doomed.failure or "")
    broken[0] = False
    after = tiny.submit(instance, "after", tiny.prompt(60, 9), max_tokens=3)
    run_all(instance, baseline)
    assert after.tokens == tiny.greedy(tiny.prompt(60, 9), 3)
    instance.close()


@pytest.mark.parametrize("at_admission", [2, 3, 4, 5])
def test_a_row_that_is_held_in_the_middle_of_its_prompt(tiny, tuning, at_admission):
    """It is not carried while it is held, and goes on behind what it has."""
    instance = tiny.instance(tuning)
    run = Watched(instance)
    baseline = idle(instance)
    engine = instance.parts[0].engine
    admit, seen = engine.admit, []
    other = tiny.submit(instance, "other", tiny.prompt(5), max_tokens=30)
    long = tiny.submit(instance, "long", tiny.prompt(90), max_tokens=4)

    def short_once(step: Step) -> AdmitOutcome:
        prompts = [chunk.handle for chunk in _chunks_of(step) if chunk.handle == 2]
        if prompts:
            seen.append(step)
            if len(seen) == at_admission:
                return AdmitOutcome((prompts[0],), "kv", 1)
        return admit(step)

    engine.admit = short_once
    run_all(instance, baseline)
    assert len(seen) > at_admission
    assert other.tokens == tiny.greedy(tiny.prompt(5), 30)
    assert long.tokens == tiny.greedy(tiny.prompt(90), 4)
    assert sum(chunk.tokens for step in run.chunks() for chunk in step) == 95
    instance.close()


def test_a_hook_that_fails_for_a_carried_row(tiny, tuning):
    """While the chunk before is on the device; the row leaves when that has ended."""
    node = tiny.build_node()
    instance = tiny.instance(tuning, node)
    baseline = idle(instance)
    prepare = node.prepare_batch

    def broken_in_the_middle(walk, rows):
        if walk == "prefill" and any(
            length >= 32 and total == 77 for length, total in zip(rows.lengths, rows.num_prompt, strict=True)
        ):
            raise RuntimeError("not beyond 32")
        return prepare(walk, rows)

    node.prepare_batch = broken_in_the_middle
    stream = tiny.submit(instance, "stream", tiny.prompt(5), max_tokens=20)
    for _ in range(3):
        instance.tick()
    doomed = tiny.submit(instance, "doomed", tiny.prompt(77), max_tokens=4)
    run_all(instance, baseline)
    assert "not beyond 32" in (doomed.failure or "")
    assert stream.tokens == tiny.greedy(tiny.prompt(5), 20)
    instance.close()


# turns


def test_streams_go_on_with_every_chunk(tiny, tuning):
    run = watched(tiny, tuning)
    streams = [tiny.submit(run.instance, f"s{index}", tiny.prompt(4, index), max_tokens=120) for index in range(4)]
    while min(len(stream.tokens) for stream in streams) < 4:
        run.instance.tick()
    before = [len(stream.tokens) for stream in streams]
    long = tiny.submit(run.instance, "long", tiny.prompt(120), max_tokens=2)
    ticks = 0
    while not long.tokens:
        run.instance.tick()
        ticks += 1
    assert 8 <= ticks <= 11, "16 tokens a step"
    gained = [len(stream.tokens) - had for stream, had in zip(streams, before, strict=True)]
    assert min(gained) >= ticks - 1
    run.instance.run()
    assert all(chunk.beside == 4 for step in run.chunks() for chunk in step if chunk.handle == 5)
    run.instance.close()


@pytest.mark.parametrize("budget", [1, 4, 12])
def test_a_prompt_is_not_starved_by_more_streams_than_a_step_has_tokens(tiny, tuning, budget):
    run = watched(tiny, replace(tuning, max_step_tokens=budget))
    streams = [tiny.submit(run.instance, f"s{index}", tiny.prompt(2, index), max_tokens=150) for index in range(12)]
    while min(len(stream.tokens) for stream in streams) < 2:
        run.instance.tick()
    long = tiny.submit(run.instance, "long", tiny.prompt(64), max_tokens=4)
    begin = [len(stream.tokens) for stream in streams]
    ticks = 0
    while not long.tokens and ticks < 100:
        run.instance.tick()
        ticks += 1
    assert long.tokens, f"{len(run.submitted)} steps and no token"
    gained = [len(stream.tokens) - had for stream, had in zip(streams, begin, strict=True)]
    assert min(gained) >= ticks - 2, "nor do streams pay for it with turns"
    chunks = [chunk for step in run.chunks() for chunk in step if chunk.handle == 13]
    assert [chunk.tokens for chunk in chunks[:-1]] == [budget] * (-(-64 // budget) - 1)
    run.instance.run()
    assert long.tokens == tiny.greedy(tiny.prompt(64), 4)
    run.instance.close()


def test_prompts_come_first_come_first_served(tiny, tuning):
    run = watched(tiny, tuning)
    order: list[str] = []
    for index, length in enumerate((60, 40, 20, 5)):
        tiny.submit(run.instance, f"r{index}", tiny.prompt(length, index), max_tokens=3)
    while len(order) < 4:
        run.instance.tick()
        order += [rid for rid, result in run.instance.results.items() if result.tokens and rid not in order]
    assert order == ["r0", "r1", "r2", "r3"]
    chunks = [chunk for step in run.chunks() for chunk in step]
    assert [chunk.handle for chunk in chunks] == sorted(chunk.handle for chunk in chunks), "nobody overtakes"
    run.instance.run()
    run.instance.close()


def test_a_finished_prompt_decodes_as_soon_as_it_can(tiny, tuning):
    """In the next step that is composed after its token is there."""
    run = watched(tiny, tuning)
    tiny.submit(run.instance, "stream", tiny.prompt(4), max_tokens=60)
    for _ in range(4):
        run.instance.tick()
    tiny.submit(run.instance, "short", tiny.prompt(20, 1), max_tokens=10)
    tiny.submit(run.instance, "long", tiny.prompt(100, 2), max_tokens=3)
    run.instance.run()
    ends = next(i for i, step in enumerate(run.chunks()) if any(c.handle == 2 and c.last for c in step))
    decodes = next(i for i, step in enumerate(run.submitted) if i > ends and 2 in step.handles.tolist())
    assert decodes - ends == (2 if tuning.overlap else 1)
    run.instance.close()


def test_a_prompt_that_is_all(tiny, tuning):
    """One token is asked for: the request ends with its last chunk."""
    run = watched(tiny, tuning)
    baseline = idle(run.instance)
    results: list[Result] = [
        tiny.submit(run.instance, f"r{index}", tiny.prompt(50, index), max_tokens=1) for index in range(3)
    ]
    run_all(run.instance, baseline)
    assert [result.tokens for result in results] == [tiny.greedy(tiny.prompt(50, index), 1) for index in range(3)]
    assert all(step.spans.sum() <= BUDGET for step in run.submitted)
    run.instance.close()


def test_random_arrivals_and_aborts_leave_nothing(tiny, tuning):
    generator = torch.Generator().manual_seed(7)

    def roll(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    run = watched(tiny, replace(tuning, max_rows=5))
    baseline = idle(run.instance)
    prompts = [tiny.prompt(roll(1, 110), index) for index in range(16)]
    aborted: set[int] = set()
    for index, prompt in enumerate(prompts):
        tiny.submit(run.instance, f"r{index}", prompt, max_tokens=roll(1, 9))
        for _ in range(roll(0, 5)):
            run.instance.tick()
        if index % 4 == 3:
            gone = roll(0, index + 1)
            if not run.instance.results[f"r{gone}"].done:
                aborted.add(gone)
                run.instance.abort(f"r{gone}")
    run_all(run.instance, baseline)
    assert aborted
    for index, prompt in enumerate(prompts):
        result = run.instance.results[f"r{index}"]
        if index not in aborted:
            assert result.tokens == tiny.greedy(prompt, len(result.tokens)) and result.tokens
    run.instance.close()
