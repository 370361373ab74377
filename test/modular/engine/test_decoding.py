"""Whole steps of a tiny attention model against a function that recomputes every sequence: batching, two-part steps,
padded replays, planning ahead, executors."""

from functools import cache

import numpy as np
import pytest
from support.engine_rig import EngineRig, alone, prompts, take

from mstar.platforms.executor import ThreadedExecutor

PROMPTS = prompts(9, seed=3)


@cache
def _alone(index: int, kernels: str) -> list[int]:
    return alone(PROMPTS[index], 10)


def expected(rig: EngineRig, index: int, num_tokens: int) -> list[int]:
    return rig.decoder.reference_greedy(PROMPTS[index], num_tokens)


def test_a_batch_equals_the_reference():
    rig = EngineRig()
    for handle in range(5):
        rig.open(handle, PROMPTS[handle])
    rig.generate(range(5), 12)
    assert rig.out == {handle: expected(rig, handle, 12) for handle in range(5)}
    assert len({tuple(tokens) for tokens in rig.out.values()}) == 5  # prompts matter
    rig.close_all()


def test_rows_come_and_go_in_two_part_steps():
    rig = EngineRig()
    rig.open(7, PROMPTS[0])
    rig.prefill(7)
    rig.open(2, PROMPTS[1])
    rig.open(4, PROMPTS[2])
    step = rig.run(take("decode", [7]), take("prefill", [4, 2]))
    assert [(part.taken.key.walk, part.begin, part.end) for part in step.parts] == [("decode", 0, 1), ("prefill", 1, 3)]
    rig.decode(2, 7, 4)
    rig.engine.memory.close(7)
    rig.open(7, PROMPTS[3])  # the handle and its pages are another request's now
    del rig.out[7]
    rig.out[7] = []
    rig.run(take("decode", [4, 2]), take("prefill", [7]))
    rig.decode(4, 7)
    assert rig.out[4] == expected(rig, 2, 4)
    assert rig.out[2] == expected(rig, 1, 3)
    assert rig.out[7] == expected(rig, 3, 2)
    rig.close_all()


@pytest.mark.parametrize("threaded", [False, True])
def test_planning_ahead_changes_nothing(threaded: bool, kernels: str):
    executor = ThreadedExecutor() if threaded else None
    rig = EngineRig(executor=executor, capture_sizes=(8,))
    for handle in range(6):
        rig.open(handle, PROMPTS[handle])
    rig.generate(range(6), 15, ahead=True)
    assert rig.out == {handle: expected(rig, handle, 15) for handle in range(6)}
    rig.close_all()
    rig.executor.close()


@pytest.mark.parametrize("num_rows", range(1, 10))
def test_padded_replays_equal_one_row_alone(num_rows: int, kernels: str):
    """Every batch size from 1 to one above the largest bucket, sizes between the buckets, rows of mixed lengths,
    handles used before. Padding, the sink page and static buffers hold NaN outside of what the step wrote."""
    rig = EngineRig(capture_sizes=(1, 2, 4, 8), max_rows=16, capacity=16)
    assert rig.engine._nodes["LLM"].graphs.num_buckets == 4
    for handle in range(num_rows):
        rig.open(handle, [handle, 5, 7])
    rig.generate(range(num_rows), 2)
    rig.close_all()
    rig.out.clear()
    order = np.random.default_rng(num_rows).permutation(num_rows).tolist()
    for handle in order:
        rig.open(handle, PROMPTS[handle])
    rig.decoder.batch_sizes.clear()
    rig.generate(order, 10)
    bucket = next((size for size in (1, 2, 4, 8) if size >= num_rows), None)
    if bucket is None:
        assert rig.decoder.batch_sizes == [num_rows] * 10
    else:  # a tape runs no Python of the forward
        assert rig.decoder.batch_sizes == [num_rows] + [bucket] * (9 if kernels == "torch" else 0)
    for handle in range(num_rows):
        assert rig.out[handle] == _alone(handle, kernels), handle
    rig.close_all()


def test_a_page_border_in_every_position():
    """Prompts of one to nine tokens over pages of four: growth happens at another step for each."""
    rig = EngineRig(max_rows=9, capacity=9)
    texts = [list(range(10, 10 + length)) for length in range(1, 10)]
    for handle, text in enumerate(texts):
        rig.open(handle, text)
    rig.generate(range(9), 14)
    for handle, text in enumerate(texts):
        assert rig.out[handle] == rig.decoder.reference_greedy(text, 14)
        assert rig.kv.stream(handle).length == len(text) + 13  # the last token is not in the cache
    rig.close_all()


def test_two_caches_of_one_engine_differ_only_in_page_size():
    from support.tiny_decoder import NODE, TinyDecoder, decoder_spec

    rigs = [EngineRig({NODE: TinyDecoder()}, (decoder_spec(page_size),)) for page_size in (1, 16, 64)]
    for rig in rigs:
        rig.open(0, PROMPTS[0])
        rig.open(1, PROMPTS[1])
        rig.generate([0, 1], 10)
    assert rigs[0].out == rigs[1].out == rigs[2].out


def test_hidden_states_go_to_the_store_and_tokens_stay_live():
    rig = EngineRig()
    rig.open(0, PROMPTS[0])
    rig.open(1, PROMPTS[1])
    step = rig.arm(take("prefill", [0, 1]))
    rig.engine.submit(step)
    rig.engine.finish(step)
    ids = step.outputs.ids_of(step.parts[0])
    assert ids["token"] == [-1, -1]
    hidden = rig.store.gather(ids["hidden"])
    logits = hidden @ rig.decoder.lm_head
    for row in range(2):
        np.testing.assert_allclose(logits[row], rig.decoder.reference_logits(PROMPTS[row])[-1], rtol=2e-4, atol=2e-4)
    rig.engine.publish(step, np.array([True, False]))  # the second row's output is unwanted
    assert rig.store.num_live == 1


def test_stored_signals_are_tensors_as_well():
    rig = EngineRig(stored_signals={"LLM": frozenset({"token"})})
    rig.open(0, PROMPTS[0])
    step = rig.arm(take("prefill", [0]))
    rig.engine.submit(step)
    rig.engine.finish(step)
    token_id = step.outputs.ids_of(step.parts[0])["token"][0]
    assert rig.store.get(token_id).item() == step.host("token")[0] == expected(rig, 0, 1)[0]
