"""What the scheduler may put into a step, and that it goes on when a step cannot run."""

import pytest
from support.composite.declarations import CODES, FLOW
from support.composite.deployment import Composite, make_requests
from support.composite.reference import NUM_CODES
from support.instance import Tuning

from mstar.communication.messages import SamplingParams
from mstar.engine.execution import AdmitOutcome
from mstar.engine.submodule import StopDecision
from mstar.graph.protocol import ReadyKey
from mstar.worker.turns import Turns


@pytest.mark.parametrize("overlap", [False, True])
def test_a_node_gets_no_more_rows_than_it_takes_and_every_row_has_its_turn(tiny, overlap):
    node = tiny.build_node()
    node.max_rows = 2
    instance = tiny.instance(Tuning(overlap=overlap), node)
    early = [tiny.submit(instance, f"e{index}", tiny.prompt(5, index), max_tokens=40) for index in range(3)]
    for _ in range(6):
        instance.tick()
    late = [tiny.submit(instance, f"l{index}", tiny.prompt(6, index), max_tokens=10) for index in range(2)]
    for _ in range(40):
        instance.tick()
    assert not early[2].done
    assert all(len(result.tokens) == 10 for result in late), "rows that run ahead do not keep others waiting"
    instance.run()
    assert max(len(step.rows) for step in instance.steps) == 2
    for index, result in enumerate(early):
        assert result.tokens == tiny.greedy(tiny.prompt(5, index), 40)
    instance.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_are_short_of_room_do_not_put_the_others_to_sleep(tiny, overlap):
    """They run in the same tick."""
    instance = tiny.instance(Tuning(overlap=overlap))
    engine = instance.parts[0].engine
    admit, refused = engine.admit, []

    def short_once(step):
        if not refused and len(step.handles) == 2:
            refused.append(int(step.handles[0]))
            return AdmitOutcome((refused[0],), "kv")
        return admit(step)

    engine.admit = short_once
    results = [tiny.submit(instance, f"r{index}", tiny.prompt(5, index), max_tokens=6) for index in range(2)]
    assert instance.workers[0].tick_once()
    assert refused, "the first step was composed and could not run"
    assert [len(step.rows) for step in instance.steps] == [1]
    instance.run()
    assert [result.tokens for result in results] == [tiny.greedy(tiny.prompt(5, index), 6) for index in range(2)]
    instance.close()


def test_a_row_that_nobody_can_make_room_for_fails(tiny):
    instance = tiny.instance(Tuning())
    baseline = dict(instance.gauges(0))
    engine = instance.parts[0].engine
    admit = engine.admit
    engine.admit = lambda step: AdmitOutcome(tuple(step.handles.tolist()), "kv")
    result = tiny.submit(instance, "r", tiny.prompt(5))
    instance.run()
    assert "kv has no room left" in (result.failure or "")
    engine.admit = admit
    after = tiny.submit(instance, "after", tiny.prompt(7), max_tokens=5)
    instance.run()
    assert after.tokens == tiny.greedy(tiny.prompt(7), 5)
    assert dict(instance.gauges(0)) == baseline
    instance.close()


def test_a_row_whose_outer_loop_is_stopped_goes_on_in_the_inner_one(tmp_path):
    """A step armed for it is kept: what it drew counts, as without overlap."""

    def stop_speaking(walk, rows, host):
        in_second = (rows.iterations == 0) & (rows.num_draws == NUM_CODES)  # the first step is not speculated on
        return [StopDecision((in_second & (rows.handles % 2 == 0)).nonzero()[0], "speak", finish=False)]

    composite = Composite(tmp_path / "composite")
    outputs = []
    for overlap in (False, True):
        instance = composite.instance("one_worker", Tuning(overlap=overlap))
        node = instance.parts[0].engine._nodes[CODES].submodule
        node.check_stop = stop_speaking
        for index, request in enumerate(make_requests(4, max_tokens=6)):
            prompt = composite.model.process_prompt(request.as_prompt())
            instance.submit(f"r{index}", prompt, SamplingParams(temperature=1.0, seed=index, max_tokens=6))
        results = instance.run()
        assert sorted(len(result.tokens) for result in results.values()) == [3, 3, 6, 6]
        outputs.append({rid: [t.tolist() for t in result.tensors["audio"]] for rid, result in results.items()})
        assert any(step.speculated for step in instance.steps) == overlap
        instance.close()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_of_more_important_requests_are_computed_first(tiny, overlap):
    """A chunk that is under way is left where it is, and taken up again behind them."""
    instance = tiny.instance(Tuning(overlap=overlap, max_step_tokens=16))
    results = {}
    for rid, length, priority in (("low", 100, 5), ("mid", 60, 0), ("high", 40, -3)):
        results[rid] = instance.submit(
            rid, tiny.prompt(length), SamplingParams(temperature=0.0, max_tokens=3), priority=priority
        )
        instance.tick()
    order: list[str] = []
    while len(order) < 3:
        instance.tick()
        order += [rid for rid, result in results.items() if result.tokens and rid not in order]
    assert order == ["high", "mid", "low"]
    instance.run()
    for rid, length in (("low", 100), ("mid", 60), ("high", 40)):
        assert results[rid].tokens == tiny.greedy(tiny.prompt(length), 3)
    counters = instance.parts[0].counters
    assert (counters.num_prefill_tokens, counters.num_recomputed_tokens) == (200, 0)
    instance.close()


def test_rows_that_are_declined_beside_others_do_not_cost_the_others_their_turn(tmp_path):
    """A node without room for all its rows in one step has its turn with those that it takes."""
    composite = Composite(tmp_path / "composite")
    instance = composite.instance("one_worker", Tuning())
    requests = make_requests(4, max_tokens=8)
    engine = instance.parts[0].engine
    build, events = engine.build, []

    def one_of_flow(portions):
        node = portions[0].taken.key.node
        rows = [row for portion in portions for row in portion.taken.rows]
        taken = node != FLOW or len(rows) == 1
        events.append((node, taken))
        return build(portions) if taken else (None, set(rows[1:]))

    engine.build = one_of_flow
    for index, request in enumerate(requests):
        composite.submit(instance, f"r{index}", request)
    instance.run()
    for index, request in enumerate(requests):
        composite.check(instance, f"r{index}", request)
    declined = [index for index, event in enumerate(events) if event == (FLOW, False)]
    assert len(declined) > 4
    assert {events[index + 1] for index in declined} == {(FLOW, True)}
    instance.close()


def test_who_was_served_longest_ago_comes_first():
    turns = Turns()
    decode, prefill, encode = (ReadyKey(*key) for key in (("LLM", "decode"), ("LLM", "prefill"), ("Vision", "encode")))
    assert turns.in_order([encode, prefill, decode]) == [decode, prefill, encode]
    turns.served("LLM", [decode])
    assert turns.in_order([encode, prefill, decode]) == [prefill, encode, decode]
    turns.served("Vision", [encode])
    turns.served("LLM", [decode, prefill])
    assert turns.in_order([decode, encode]) == [encode, decode]


def test_a_node_has_waited_for_the_steps_of_others_since_its_own():
    turns = Turns()
    assert turns.waited_s("LLM") == 0.0
    turns.served("LLM", [])
    turns.ended("LLM", 0.07)
    turns.served("Vision", [])
    assert turns.waited_s("LLM") == 0.0, "how long the other takes is not known yet"
    turns.ended("Vision", 0.05)
    turns.served("LLM", [])
    turns.served("Vision", [])
    turns.served("Vision", [])
    assert turns.waited_s("LLM") == pytest.approx(0.10)
    turns.ended("Vision", 0.02)
    turns.served("Vision", [])
    assert turns.waited_s("LLM") == pytest.approx(0.12)
    assert turns.waited_s("Vision") == 0.0
    turns.served("LLM", [])
    assert turns.waited_s("LLM") == 0.0
    assert turns.waited_s("Vision") == pytest.approx(0.07)
