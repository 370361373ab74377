"""A request's life on a worker: waiting, running, leaving; and what fails fails alone. After each, nothing is left."""

from dataclasses import replace

import pytest
import torch
from support.instance import LOOPS, Instance, Tuning

from mstar.engine.submodule import NodeBatch

PAGE = 64


def idle(instance: Instance) -> dict[str, float]:
    return instance.held(0)


def with_pages(tuning: Tuning, pages: int, **more) -> Tuning:
    return replace(tuning, num_pages={"kv": pages}, **more)


def test_requests_that_do_not_fit_together_run_one_after_the_other(tiny, tuning):
    instance = tiny.instance(with_pages(tuning, 3))
    baseline = idle(instance)
    prompts = {f"r{i}": tiny.prompt(70, i) for i in range(4)}
    for rid, prompt in prompts.items():
        tiny.submit(instance, rid, prompt, max_tokens=40)  # two pages each, three there are
    most = 0
    while not all(result.done for result in instance.results.values()):
        instance.tick()
        most = max(most, int(instance.gauges(0)["mstar_running_rows"]))
    instance.run()
    assert most == 1
    for rid, prompt in prompts.items():
        assert instance.results[rid].tokens == tiny.greedy(prompt, 40)
    assert idle(instance) == baseline
    instance.close()


def test_nobody_overtakes_the_head_of_the_line(tiny, tuning):
    instance = tiny.instance(with_pages(tuning, 4))
    order: list[str] = []
    tiny.submit(instance, "first", tiny.prompt(70), max_tokens=30)
    tiny.submit(instance, "large", tiny.prompt(100), max_tokens=28 + 2 * PAGE - 64)
    tiny.submit(instance, "small", tiny.prompt(3), max_tokens=2)
    while len(order) < 3:
        instance.tick()
        order += [rid for rid, result in instance.results.items() if result.tokens and rid not in order]
    assert order == ["first", "large", "small"]
    instance.run()
    instance.close()


def test_what_can_never_fit_is_refused_at_once(tiny, tuning):
    instance = tiny.instance(with_pages(tuning, 1))
    baseline = idle(instance)
    refused = tiny.submit(instance, "r", tiny.prompt(30), max_tokens=35)
    neighbour = tiny.submit(instance, "n", tiny.prompt(30), max_tokens=34)
    instance.run()
    assert refused.failure is not None
    assert "65 tokens" in refused.failure
    assert "holds 64" in refused.failure
    assert (neighbour.failure, len(neighbour.tokens)) == (None, 34)
    assert idle(instance) == baseline
    instance.close()


@pytest.mark.parametrize("after_ticks", [0, 1, 2, 3, 9])
def test_an_aborted_request_is_gone_within_two_steps(tiny, tuning, after_ticks):
    instance = tiny.instance(tuning)
    baseline = idle(instance)
    tiny.submit(instance, "stays", tiny.prompt(5, 1), max_tokens=40)
    tiny.submit(instance, "leaves", tiny.prompt(6, 2), max_tokens=100)
    for _ in range(after_ticks):
        instance.tick()
    instance.abort("leaves")
    for _ in range(3):
        instance.tick()
    assert instance.num_handles == 1
    instance.run()
    assert instance.results["stays"].tokens == tiny.greedy(tiny.prompt(5, 1), 40)
    assert idle(instance) == baseline
    instance.close()


def test_a_removed_row_makes_no_work(tiny, tuning):
    """Case G3: rows of a request that is being removed wait to be scheduled."""
    instance = tiny.instance(tuning)
    tiny.submit(instance, "r", tiny.prompt(5), max_tokens=50)
    instance.abort("r")
    instance.run()
    counters = instance.parts[0].counters
    assert counters.speculated + counters.fresh == 0
    instance.close()


def test_a_row_hook_that_raises_fails_its_row_alone(tiny, tuning):
    node = tiny.build_node()
    prepare = node.prepare_batch

    def by_row(walk, rows):
        return None

    def one_row(walk, rows, index):
        if walk == "prefill" and rows.num_prompt[index] == 6:
            raise RuntimeError("six is not allowed")
        single = type(rows)(
            *(
                column[index : index + 1]
                if hasattr(column, "__len__") and not isinstance(column, frozenset)
                else column
                for column in rows
            )
        )
        batch: NodeBatch = prepare(walk, single)
        from mstar.engine.submodule import NodeInputs

        return NodeInputs(int(batch.spans[0]), batch.token_ids)

    node.prepare_batch = by_row
    node.prepare_inputs = one_row
    instance = tiny.instance(tuning, node)
    baseline = idle(instance)
    tiny.submit(instance, "good", tiny.prompt(5), max_tokens=8)
    tiny.submit(instance, "bad", tiny.prompt(6), max_tokens=8)
    instance.run()
    assert "six is not allowed" in (instance.results["bad"].failure or "")
    assert instance.results["good"].tokens == tiny.greedy(tiny.prompt(5), 8)
    assert idle(instance) == baseline
    instance.close()


@pytest.mark.parametrize("hook", ["prepare_batch", "declare_step", "forward_batched"])
def test_a_batch_hook_that_raises_fails_its_rows_and_not_the_worker(tiny, tuning, hook):
    """Case G4: every row of a batch fails; no empty step runs, and the next request is served."""
    node = tiny.build_node()
    original = getattr(node, hook)
    fails = [True]

    def broken(*args, **kwargs):
        if fails[0]:
            raise RuntimeError("broken on purpose")
        return original(*args, **kwargs)

    instance = tiny.instance(tuning, node)
    setattr(node, hook, broken)
    baseline = idle(instance)
    for index in range(3):
        tiny.submit(instance, f"r{index}", tiny.prompt(5, index), max_tokens=8)
    instance.run()
    for index in range(3):
        assert "broken on purpose" in (instance.results[f"r{index}"].failure or "")
    fails[0] = False
    tiny.submit(instance, "after", tiny.prompt(9), max_tokens=8)
    instance.run()
    assert instance.results["after"].tokens == tiny.greedy(tiny.prompt(9), 8)
    assert idle(instance) == baseline
    instance.close()


def test_nan_logits_fail_their_request_and_not_the_batch(tiny, tuning):
    node = tiny.build_node()
    network = node.network.forward
    poisoned: list[int] = []

    def forward(tokens, last):
        logits = network(tokens, last)
        if len(last) == 3 and not poisoned:
            poisoned.append(1)
            logits[1] = float("nan")
        return logits

    instance = tiny.instance(tuning, node)
    node.network.forward = forward
    baseline = idle(instance)
    for index in range(3):
        tiny.submit(instance, f"r{index}", tiny.prompt(5, index), max_tokens=12)
    instance.run()
    failed = [rid for rid, result in instance.results.items() if result.failure]
    assert len(failed) == 1
    for index in range(3):
        if f"r{index}" not in failed:
            assert instance.results[f"r{index}"].tokens == tiny.greedy(tiny.prompt(5, index), 12)
    assert idle(instance) == baseline
    instance.close()


@pytest.mark.parametrize("max_rows", [1, 2, 5])
def test_rows_that_do_not_fit_the_batch_keep_their_place_and_all_run(tiny, tuning, max_rows):
    """Case G5."""
    instance = tiny.instance(replace(tuning, max_rows=max_rows))
    finished: list[str] = []
    for index in range(9):
        tiny.submit(instance, f"r{index}", tiny.prompt(4 + index), max_tokens=6)
    while len(finished) < 9:
        instance.tick()
        finished += [rid for rid, result in instance.results.items() if result.done and rid not in finished]
    assert finished == [f"r{index}" for index in range(9)]
    for index in range(9):
        assert instance.results[f"r{index}"].tokens == tiny.greedy(tiny.prompt(4 + index), 6)
    instance.run()
    instance.close()


def test_a_long_prompt_is_not_starved_by_rows_that_never_end(tiny, tuning):
    instance = tiny.instance(replace(tuning, max_step_tokens=16))
    for index in range(6):
        tiny.submit(instance, f"r{index}", tiny.prompt(4, index), max_tokens=100)
    for _ in range(12):
        instance.tick()
    long = tiny.submit(instance, "long", tiny.prompt(60), max_tokens=4)
    for _ in range(12):
        instance.tick()
    assert long.tokens, "a prompt larger than a step's budget waits for one turn, not for the others' end"
    instance.run()
    assert long.tokens == tiny.greedy(tiny.prompt(60), 4)
    instance.close()


def test_seeded_draws_are_the_same_alone_and_in_a_batch(tiny, tuning):
    sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "max_tokens": 24}
    alone = tiny.instance(tuning)
    for index in range(5):
        tiny.submit(alone, f"r{index}", tiny.prompt(8, index), seed=index, **sampling)
        alone.run()
    batch = tiny.instance(tuning)
    for index in range(5):
        tiny.submit(batch, f"r{index}", tiny.prompt(8, index), seed=index, **sampling)
    batch.run()
    for index in range(5):
        assert batch.results[f"r{index}"].tokens == alone.results[f"r{index}"].tokens
    texts = {tuple(result.tokens) for result in batch.results.values()}
    assert len(texts) == 5
    tiny.submit(batch, "other seed", tiny.prompt(8, 0), seed=99, **sampling)
    batch.run()
    assert batch.results["other seed"].tokens != batch.results["r0"].tokens
    alone.close()
    batch.close()


@pytest.mark.parametrize(
    "penalties", [{"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}]
)
def test_penalties_do_not_depend_on_the_loop(tiny, penalties):
    """Case D8, without load: counts follow the draws in step order whatever runs ahead."""
    tokens: list[list[list[int]]] = []
    for tuning in LOOPS.values():
        instance = tiny.instance(tuning)
        for index in range(4):
            tiny.submit(instance, f"r{index}", tiny.prompt(6, index), max_tokens=30, **penalties)
        instance.run()
        tokens.append([instance.results[f"r{index}"].tokens for index in range(4)])
        instance.close()
    assert all(others == tokens[0] for others in tokens[1:])
    assert tokens[0] != [tiny.greedy(tiny.prompt(6, index), 30) for index in range(4)]


def test_end_token_biased_up_waits_for_min_tokens(tiny, tuning):
    """Case B6: exactly four other tokens, then the end token."""
    instance = tiny.instance(tuning)
    result = tiny.submit(
        instance,
        "r",
        tiny.prompt(5),
        max_tokens=20,
        min_tokens=4,
        stop_token_ids=(2,),
        bias_ids=(2,),
        bias_values=(100.0,),
    )
    instance.run()
    assert len(result.tokens) == 5
    assert result.tokens[4] == 2
    assert 2 not in result.tokens[:4]
    assert result.reasons == {"text": "stop"}
    instance.close()


def test_every_batch_size_equals_its_rows_alone(tiny, tuning):
    """Case D7: sizes 1 to 10, mixed lengths, after slots were used before."""
    prompts = [tiny.prompt(3 + 5 * index, index) for index in range(10)]
    expected = [tiny.greedy(prompt, 6) for prompt in prompts]
    instance = tiny.instance(tuning)
    with torch.no_grad():
        for size in range(1, 11):
            for index in range(size):
                tiny.submit(instance, f"{size}.{index}", prompts[index], max_tokens=6)
            instance.run()
            assert [instance.results[f"{size}.{index}"].tokens for index in range(size)] == expected[:size]
    instance.close()


def test_prompt_tokens_are_counted_once(tiny, tuning):
    instance = tiny.instance(tuning)
    for index, length in enumerate((5, 31, 64)):
        tiny.submit(instance, f"r{index}", tiny.prompt(length), max_tokens=7)
    instance.run()
    assert instance.parts[0].counters.num_prefill_tokens == 5 + 31 + 64
    instance.close()
