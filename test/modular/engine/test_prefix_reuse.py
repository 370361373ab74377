"""Sealing, adopting and evicting pages, one case at a time; pages of four tokens whose contents name their tokens."""

import numpy as np
import pytest
from support.engine_rig import GREEDY, EngineRig, take
from support.memory_rig import PAGE, Armed, MemoryRig

from mstar.communication.messages import MediaSpan
from mstar.engine.resources.base import OpenConfig

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]  # two full pages and a token
OTHER = [9, 9, 9, 9, 8, 8, 8, 8, 7]


def computed(prompt: list[int] = PROMPT, *, close: bool = True, **settings: object) -> MemoryRig:
    """A rig in which request 0 has computed its prompt."""
    rig = MemoryRig(**settings)  # type: ignore[arg-type]
    assert rig.admit(0, prompt, len(prompt) + 3)
    rig.compute(0)
    if close:
        rig.close(0)
    return rig


def pages_of(rig: MemoryRig, handle: int) -> list[int]:
    return rig.kv.stream(handle).pages.tolist()


# adopting


def test_a_prompt_adopts_the_full_pages_of_an_equal_one():
    rig = computed(close=False)
    assert rig.admit(1, [*PROMPT, 7, 7], 20)
    assert rig.length(1) == 8 and pages_of(rig, 1) == pages_of(rig, 0)[:2]
    assert rig.holdings.num_adopted[1] == 8
    rig.compute(1)
    rig.close(0)
    rig.check()
    rig.check_contents()


def test_the_last_token_of_a_prompt_is_always_computed():
    rig = computed(PROMPT[:8])
    assert rig.arena.num_cached == 2
    assert rig.admit(1, PROMPT[:8], 12)
    assert rig.length(1) == 4


def test_adopted_pages_are_cached_no_longer():
    rig = computed()
    assert (rig.arena.num_cached, rig.arena.num_owned) == (2, 0)
    assert rig.admit(1, PROMPT, 12)
    assert (rig.arena.num_cached, rig.arena.num_owned) == (0, 2)
    rig.check()


@pytest.mark.parametrize(("changed", "length"), [(8, 8), (7, 4), (4, 4), (3, 0), (0, 0)])
def test_only_the_equal_head_is_adopted(changed: int, length: int):
    rig = computed()
    prompt = list(PROMPT)
    prompt[changed] = 50
    assert rig.admit(1, prompt, 12)
    assert rig.length(1) == length


def test_a_salt_separates_and_the_same_salt_does_not():
    rig = MemoryRig()
    for handle, salt, length in ((0, "ours", 0), (1, "", 0), (2, "ours", 8), (3, "theirs", 0)):
        row = rig.introduce(handle, PROMPT, 12)
        rig.kv.close(handle)
        rig.kv.introduce(handle, row.config._replace(cache_salt=salt))
        row.admitted = rig.kv.reserve(handle)
        assert row.admitted and rig.length(handle) == length
        rig.compute(handle)
        rig.close(handle)


def test_media_behind_equal_ids_are_told_apart():
    rig = MemoryRig(num_pages=40)
    spans = [MediaSpan(2, 3, b"one")], [MediaSpan(2, 3, b"two")], [MediaSpan(2, 3, b"one")], [MediaSpan(4, 3, b"one")]
    for handle, (media, length) in enumerate(zip(spans, (0, 0, 8, 0), strict=True)):
        row = rig.introduce(handle, PROMPT, 12, media=media)
        row.admitted = rig.kv.reserve(handle)
        assert rig.length(handle) == length
        rig.compute(handle)


@pytest.mark.parametrize(
    ("reads_inputs", "has_inputs", "media", "reused"),
    [(True, True, (), False), (True, True, (MediaSpan(0, 1, b"d"),), True), (True, False, (), True),
     (False, True, (), True)],
)  # fmt: skip
def test_what_no_span_names_is_not_reused(reads_inputs: bool, has_inputs: bool, media: tuple, reused: bool):
    rig = MemoryRig(reads_inputs=reads_inputs)
    for handle, length in ((0, 0), (1, 8 if reused else 0)):
        row = rig.introduce(handle, PROMPT, 12)
        rig.kv.close(handle)
        rig.kv.introduce(handle, row.config._replace(has_inputs=has_inputs, media=media))
        row.admitted = rig.kv.reserve(handle)
        assert rig.length(handle) == length
        rig.compute(handle)


def test_before_a_chunk_a_row_takes_what_others_have_sealed_meanwhile():
    rig = MemoryRig(num_pages=20)
    long = [*range(20), 1]
    assert rig.admit(0, long, 24) and rig.admit(1, long, 24)
    rig.compute(1, 4)
    rig.compute(0, 14)
    assert rig.holdings.extend(1) == 8 and rig.length(1) == 12
    assert rig.holdings.num_adopted[1] == 8
    assert rig.holdings.extend(1) == 0
    rig.compute(0)
    rig.compute(1, 14)
    assert rig.holdings.extend(1) == 0  # its third page is begun
    rig.compute(1)
    rig.check_contents()
    rig.check()


# sealing


def test_rows_that_compute_the_same_page_at_once_keep_their_own():
    rig = MemoryRig()
    assert rig.admit(0, PROMPT, 12) and rig.admit(1, PROMPT, 12)
    rig.run({0: 9, 1: 9})
    assert set(pages_of(rig, 0)).isdisjoint(pages_of(rig, 1))
    assert len(rig.arena.index) == 2
    rig.check()
    rig.close(1)
    assert rig.arena.num_cached == 0  # the second's pages were its own: free
    rig.close(0)
    assert rig.arena.num_cached == 2
    rig.check()


def test_a_step_seals_what_it_has_filled_and_not_what_its_successor_fills():
    """Both steps have advanced the row when the first is published."""
    rig = MemoryRig()
    assert rig.admit(0, PROMPT, 12)
    for span in (6, 3):
        armed = rig.arm({0: span})
        assert isinstance(armed, Armed)
        rig.submit(armed)
    assert rig.length(0) == 9
    rig.publish()
    assert len(rig.arena.index) == 1
    rig.publish()
    assert len(rig.arena.index) == 2


@pytest.mark.parametrize("end", ["fails", "stops"])
def test_rows_that_fail_or_have_stopped_seal_nothing(end: str):
    rig = MemoryRig()
    assert rig.admit(0, PROMPT, 12) and rig.admit(1, OTHER, 12)
    rig.run({0: 5, 1: 5})
    armed = rig.arm({0: 4, 1: 4})
    assert isinstance(armed, Armed)
    setattr(rig.rows[0], "failing" if end == "fails" else "dead", True)
    rig.submit(armed)
    rig.publish()
    assert len(rig.arena.index) == 1 + 2
    rig.close(0)
    assert rig.admit(0, PROMPT, 12) and rig.length(0) == 4
    rig.check_contents()


def test_generated_pages_are_sealed_on_request():
    for generated, sealed in ((False, 2), (True, 4)):
        rig = MemoryRig(reuse_generated=generated)
        row = rig.introduce(0, PROMPT, 20)
        row.admitted = rig.kv.reserve(0)
        rig.compute(0, 17)
        assert len(rig.arena.index) == sealed
        rig.close(0)
        assert rig.admit(1, row.ids[:17], 20)
        assert rig.length(1) == 4 * sealed
        rig.compute(1)
        rig.check_contents()


def test_a_prompt_shorter_than_a_page_seals_its_page_when_answers_fill_it():
    rig = MemoryRig(reuse_generated=True)
    row = rig.introduce(0, [1, 2], 12)
    row.admitted = rig.kv.reserve(0)
    rig.compute(0, 10)
    assert len(rig.arena.index) == 2


# evicting


def test_evicted_leaves_first_and_the_oldest_first():
    rig = computed([*range(1, 13), 0])
    assert rig.admit(1, [1, 2, 3, 4, 50, 50, 50, 50, 0], 12)  # shares the first page
    rig.compute(1)
    rig.close(1)
    assert rig.arena.num_cached == 4
    order = [rig.arena.index.evict() for _ in range(4)]
    k = rig.kv.layer(0).k
    ends = [float(k[page, PAGE - 1, 0, 0]) for page in order]
    expected = [rig.value(ids) for ids in ([*range(1, 13)], [*range(1, 9)], [1, 2, 3, 4, *[50] * 4], [1, 2, 3, 4])]
    assert ends == expected


def test_a_live_request_is_never_refused_because_of_cached_pages():
    rig = computed(num_pages=4)
    assert rig.arena.num_cached == 2
    assert rig.arena.num_unpromised == 4
    assert rig.admit(1, OTHER, 16)
    rig.compute(1, 15)
    assert rig.arena.num_cached == 0 and rig.arena.num_evicted == 2
    rig.check()


def test_an_abandoned_step_that_evicted_leaves_pages_in_balance():
    rig = computed(num_pages=4)
    assert rig.admit(1, OTHER, 16)
    armed = rig.arm({1: 9})
    assert isinstance(armed, Armed) and rig.arena.num_evicted == 1
    rig.abandon(armed)
    rig.check()
    assert (rig.arena.num_free, rig.arena.num_cached) == (3, 1)
    rig.compute(1)
    rig.check_contents()


def test_only_pages_that_nobody_may_read_are_poisoned():
    rig = computed(num_pages=6)
    rig.run_ops()
    poisoned = rig.kv.layer(0).k.isnan().all(dim=(1, 2, 3)).numpy()
    cached = np.flatnonzero(rig.arena.index.indexed)
    assert cached.size == 2 and not poisoned[cached].any()
    assert poisoned.sum() == 1 + 4 == poisoned.size - 2  # the sink and every free page
    assert rig.admit(1, OTHER, 24)
    rig.arm({1: 9})
    rig.arm({1: 12})
    rig.run_ops()
    assert rig.arena.num_evicted == 2
    assert rig.kv.layer(0).k[cached].isnan().all()


def test_a_page_behind_anothers_pages_is_not_older_than_they_are():
    """Two rows compute the same first pages at once; what the second adds hangs on the first's pages."""
    rig = MemoryRig(num_pages=20)
    assert rig.admit(0, PROMPT, 12) and rig.admit(1, [*PROMPT[:8], 30, 30, 30, 30, 1], 16)
    rig.run({0: 9, 1: 13})
    rig.close(0)  # the canonical first pages are cached now, older than the page behind them will be
    rig.close(1)
    leaf = rig.arena.index.evict()
    assert float(rig.kv.layer(0).k[leaf, 3, 0, 0]) == rig.value([*PROMPT[:8], 30, 30, 30, 30])


# in an engine


def test_reuse_changes_no_token_and_is_counted():
    rig = EngineRig()
    prompt = [(5 * i) % 61 for i in range(18)]
    expected = rig.decoder.reference_greedy(prompt, 6)
    for handle, cached in ((0, 0), (1, 16)):
        rig.open(handle, prompt)
        assert rig.engine.memory.num_cached_tokens(handle) == cached
        step = rig.arm(take("prefill", [handle]))
        assert step.spans.tolist() == [18 - cached]
        rig.engine.submit(step)
        rig.end(step)
        for _ in range(5):
            rig.decode(handle)
        assert rig.out[handle] == expected
    gauges = rig.engine.gauges()
    assert gauges["mstar_prefix_hit_tokens_total"] == 16
    rig.close_all()
    assert rig.engine.gauges()['mstar_pages{pool="kv",state="cached"}'] == 4


def test_generated_tokens_are_reused_by_the_next_turn():
    rig = EngineRig(reuse_generated=True)
    prompt = [(5 * i) % 61 for i in range(10)]
    rig.open(0, prompt)
    rig.generate([0], 12)
    answer = rig.out[0]
    rig.close_all()
    rig.out.clear()
    longer = [*prompt, *answer, 7, 7]
    rig.open(1, longer)
    assert rig.engine.memory.num_cached_tokens(1) == 20  # 10 + 11 tokens were written
    rig.generate([1], 4)
    assert rig.out[1] == rig.decoder.reference_greedy(longer, 4)


def test_without_the_cache_nothing_is_kept():
    rig = EngineRig(prefix_cache=False)
    for handle in (0, 1):
        rig.open(handle, list(range(18)))
        rig.prefill(handle)
        assert rig.engine.memory.num_cached_tokens(handle) == 0
    rig.close_all()
    assert rig.kv.arena.num_cached == 0


def test_other_weights_are_another_root():
    roots = {EngineRig(fingerprint=name).kv.holdings.policy.root for name in ("a", "b")}
    assert len(roots) == 2 and None not in roots


def test_a_request_is_introduced_once_and_forgotten_when_closed():
    rig = EngineRig()
    config = OpenConfig(GREEDY, np.arange(9, dtype=np.int32), 20)
    rig.engine.memory.introduce(0, config)
    with pytest.raises(RuntimeError, match="introduced twice"):
        rig.engine.memory.introduce(0, config)
    rig.engine.memory.close(0)
    rig.engine.memory.introduce(0, config)
