"""Page keys: equal exactly where the bytes of the pages are."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.communication.messages import MediaSpan
from mstar.engine.resources.page_keys import CacheContents, chain_keys, salted

ROOT = b"0123456789abcdef"
CONTENTS = CacheContents("weights", "kv", "layout", "torch.float32", 64, "cpu", "rope")
TOKENS = st.lists(st.integers(0, 3), max_size=14)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@given(a=TOKENS, b=TOKENS)
def test_keys_are_equal_as_far_as_the_prompts_are(a: list[int], b: list[int]):
    keys_a, keys_b = chain_keys(ROOT, ids(a), 3), chain_keys(ROOT, ids(b), 3)
    assert (len(keys_a), len(keys_b)) == (len(a) // 3, len(b) // 3)
    for page in range(min(len(keys_a), len(keys_b))):
        assert (keys_a[page] == keys_b[page]) == (a[: 3 * (page + 1)] == b[: 3 * (page + 1)])


@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=9, max_size=9), cut=st.integers(0, 3))
def test_a_chain_can_be_continued(tokens: list[int], cut: int):
    media = [MediaSpan(2, 5, b"d")]
    whole = chain_keys(ROOT, ids(tokens), 3, media)
    head = chain_keys(ROOT, ids(tokens[: 3 * cut]), 3, media)
    assert [*head, *chain_keys(head[-1] if head else ROOT, ids(tokens[3 * cut :]), 3, media, 3 * cut)] == whole


@pytest.mark.parametrize("field", CacheContents._fields)
def test_everything_in_the_root_changes_every_key(field: str):
    other = CONTENTS._replace(**{field: 32 if field == "page_size" else "other"})
    mine, others = (chain_keys(root, ids([1, 2, 3, 4]), 2) for root in (CONTENTS.root(), other.root()))
    assert set(mine).isdisjoint(others)


def test_names_in_the_root_cannot_run_into_each_other():
    a, b = CONTENTS._replace(cache="a', 'b", layout="c"), CONTENTS._replace(cache="a", layout="b', 'c")
    assert a.root() != b.root()


def test_salts_separate():
    roots = [salted(ROOT, salt) for salt in ("", "a", "b", "ab")]
    assert roots[0] == ROOT and len(set(roots)) == 4


def test_a_salt_is_no_page_of_tokens():
    """A salt whose bytes are those of a page of token ids must not lead into another's chain."""
    page = ids([0x61616161, 0x61616161])
    assert salted(ROOT, page.tobytes().decode()) != chain_keys(ROOT, page, 2)[0]


def keys_with(*media: MediaSpan) -> list[bytes]:
    """Twelve placeholder tokens, three pages."""
    return chain_keys(ROOT, np.zeros(12, np.int32), 4, media)


def test_other_media_behind_equal_ids_are_other_pages():
    plain, one, two = keys_with(), keys_with(MediaSpan(5, 2, b"one")), keys_with(MediaSpan(5, 2, b"two"))
    assert plain[0] == one[0] == two[0]
    for page in (1, 2):
        assert len({plain[page], one[page], two[page]}) == 3


def test_media_that_begin_in_an_earlier_page_name_the_later_ones():
    """The page is told from the parent key too; here the parents are equal and only the span differs."""
    tokens = np.zeros(4, np.int32)
    (inside,) = chain_keys(ROOT, tokens, 4, [MediaSpan(2, 8, b"d")], start=4)
    for media in ([], [MediaSpan(2, 8, b"e")], [MediaSpan(1, 8, b"d")], [MediaSpan(2, 9, b"d")]):
        assert chain_keys(ROOT, tokens, 4, media, start=4) != [inside]
    assert chain_keys(ROOT, tokens, 4, [MediaSpan(2, 2, b"d")], start=4) == chain_keys(ROOT, tokens, 4, [], start=4)


def test_the_place_of_media_within_a_page_counts():
    assert keys_with(MediaSpan(4, 2, b"d"))[1] != keys_with(MediaSpan(5, 2, b"d"))[1]
    assert keys_with(MediaSpan(4, 1, b"d"), MediaSpan(5, 1, b"e"))[1] != keys_with(MediaSpan(4, 1, b"de"))[1]


def test_ids_of_any_integer_type_and_stride_name_the_same_pages():
    tokens = np.arange(16)
    expected = chain_keys(ROOT, tokens.astype(np.int32), 4)
    assert chain_keys(ROOT, tokens, 4) == chain_keys(ROOT, np.repeat(tokens, 2)[::2].astype(">i4"), 4) == expected


def test_chaining_a_prompt_is_cheap():
    """600 tokens in pages of 16; 17 us on an idle machine."""
    tokens = np.arange(600, dtype=np.int32)
    taken = []
    for _ in range(50):
        begin = time.perf_counter()
        chain_keys(ROOT, tokens, 16)
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 100e-6
