"""Text of tokens, one at a time: equal to one decode of all, no character split, cut and counted at stop strings."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_text import CORPUS, build_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from mstar.api_server.stop_strings import StopAutomaton
from mstar.api_server.text import ChoiceText, Detokenizer

TEXTS = (
    *CORPUS,
    " leading space",
    "    indented\n\t\tcode  ",
    "👩‍👩‍👧‍👦🇫🇷",
    "e\u0301\u0301 ñ ñ",
    "\u200b\u00a0\u3000",
    "\x00\x01\x7f",
)


@cache
def byte_level() -> Tokenizer:
    return build_tokenizer()


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: words with a mark for the space before them, single bytes, and a decoder that drops the very
    first space."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ("▁", "▁hello", "▁world", "he", "l", "o", ",", "▁▁", "é", "你"):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def deltas(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_joined_deltas_are_one_decode_of_all_ids(text: str):
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in part for part in parts)


@given(st.text(max_size=40))
def test_any_text_survives(text: str):
    tokenizer = byte_level()
    text = text.encode("utf-8", "ignore").decode()
    parts = deltas(tokenizer, tokenizer.encode(text).ids)
    assert "".join(parts) == text
    assert text.count("\ufffd") == "".join(parts).count("\ufffd")


@given(st.lists(st.integers(0, 399), max_size=30))
def test_any_ids_give_one_decode_of_all_except_a_broken_end(ids: list[int]):
    """Also ids whose bytes are no UTF-8: replacement characters that stay are those of the whole decode."""
    tokenizer = byte_level()
    whole = tokenizer.decode(ids)
    assert "".join(deltas(tokenizer, ids)) == whole.rstrip("\ufffd")


@given(st.lists(st.integers(0, 268), max_size=30))
def test_byte_fallback_never_raises_and_keeps_order(ids: list[int]):
    deltas(byte_fallback(), ids)


def test_byte_fallback_text_equals_one_decode():
    tokenizer = byte_fallback()
    vocabulary = tokenizer.get_vocab()
    smile = [vocabulary[f"<0x{byte:02X}>"] for byte in "😀".encode()]
    ids = [vocabulary["▁hello"], *smile, vocabulary["▁world"], vocabulary["<0x0A>"], vocabulary["▁▁"], vocabulary["é"]]
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == "hello😀 world\n  é"
    assert not any("\ufffd" in part for part in parts)


def test_a_continuation_keeps_the_space_that_a_decoder_drops_at_the_beginning():
    tokenizer = byte_fallback()
    hello, world = tokenizer.token_to_id("▁hello"), tokenizer.token_to_id("▁world")
    assert "".join(deltas(tokenizer, [world], prompt=[hello])) == " world"
    assert "".join(deltas(tokenizer, [world])) == "world"


def test_a_character_cut_off_by_the_limit_is_not_shown():
    tokenizer = byte_level()
    first_byte = tokenizer.token_to_id("ð")  # byte 0xF0
    assert deltas(tokenizer, [*tokenizer.encode("ok").ids, first_byte])[-2:] == ["", ""]


def run(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], ends: tuple[int, ...] = ()
) -> tuple[list[str], ChoiceText]:
    choice: ChoiceText[int] = ChoiceText(tokenizer, end_tokens=ends, stops=StopAutomaton(stops) if stops else None)
    parts = [choice.push(token) for token in ids]
    parts.append(choice.finish().text)
    return parts, choice


@given(
    st.lists(st.sampled_from(range(3, 400)), max_size=20),
    st.lists(st.text(alphabet="abe \n你", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_is_cut_where_the_whole_text_would_be(ids: list[int], stops: list[str]):
    tokenizer = byte_level()
    whole = tokenizer.decode(ids).rstrip("\ufffd")
    ends = [(end, -len(stop)) for stop in stops for end in range(len(whole) + 1) if whole[:end].endswith(stop)]
    expected = whole if not ends else whole[: min(ends)[0] + min(ends)[1]]
    parts, choice = run(tokenizer, ids, stops)
    assert "".join(parts) == expected
    assert choice.is_stopped == bool(ends)


def test_only_tokens_whose_text_is_shown_count():
    """Tokens of "one two three", one word each with its space; a stop string cuts inside the second."""
    tokenizer = byte_level()
    ids = [*tokenizer.encode(" The").ids, *tokenizer.encode(" capit").ids, *tokenizer.encode(" of").ids]
    assert len(ids) == 3
    for stop, shown, counted in ((" of", " The capit", 2), ("it of", " The cap", 2), ("T", " ", 1), (" T", "", 0)):
        parts, choice = run(tokenizer, ids, [stop])
        assert ("".join(parts), choice.num_tokens) == (shown, counted), stop


def test_an_end_token_counts_and_has_no_text():
    tokenizer = byte_level()
    (word,) = tokenizer.encode(" The").ids
    (end,) = tokenizer.encode(" of").ids
    for stops in ([], ["zzz"]):
        parts, choice = run(tokenizer, [word, end], stops, ends=(end,))
        assert ("".join(parts), choice.num_tokens, choice.is_stopped) == (" The", 2, False)
        parts, choice = run(tokenizer, [word, end], stops)
        assert ("".join(parts), choice.num_tokens) == (" The of", 2)


def test_special_tokens_have_no_text():
    tokenizer = byte_level()
    special = tokenizer.token_to_id("<|im_start|>")
    (word,) = tokenizer.encode(" The").ids
    parts, choice = run(tokenizer, [special, word, special, word], [])
    assert ("".join(parts), choice.num_tokens) == (" The The", 4)


def test_held_back_text_can_complete_a_stop_string_at_the_end():
    """One token is a space and the first bytes of a character that never comes."""
    tokenizer = byte_level()
    space_and_bytes = next(
        index for text, index in tokenizer.get_vocab().items() if text.startswith("Ġð") and len(text) < 5
    )
    parts, choice = run(tokenizer, [*tokenizer.encode(" The").ids, space_and_bytes], [" "])
    assert ("".join(parts), choice.is_stopped, choice.num_tokens) == ("", True, 0)
    parts, choice = run(tokenizer, [*tokenizer.encode("x").ids, space_and_bytes], [" "])
    assert ("".join(parts), choice.is_stopped, choice.num_tokens) == ("x", True, 1)


def test_notes_leave_with_their_text():
    tokenizer = byte_level()
    ids = [*tokenizer.encode(" The").ids, *tokenizer.encode(" 😀").ids, *tokenizer.encode(" of").ids]
    choice: ChoiceText[int] = ChoiceText(tokenizer, stops=StopAutomaton([" of!"]))
    shown, noted = "", []
    for index, token in enumerate(ids):
        piece = choice.push_noted(token, index)
        shown += piece.text
        noted += piece.notes
        complete = [i for i in range(index + 1) if len(tokenizer.decode(ids[: i + 1]).rstrip("\ufffd")) <= len(shown)]
        assert set(noted) <= set(range(index + 1)) and set(complete) - set(noted) <= {index, index - 1}
    assert noted == list(range(len(ids) - 1)), "the last word may still become the stop string"
    piece = choice.finish()
    assert (piece.text, piece.notes) == (" of", [len(ids) - 1])


def test_notes_of_cut_tokens_are_dropped():
    tokenizer = byte_level()
    ids = [*tokenizer.encode(" The").ids, *tokenizer.encode(" capit").ids, *tokenizer.encode(" of").ids]
    choice: ChoiceText[int] = ChoiceText(tokenizer, stops=StopAutomaton(["apit of"]))
    notes = [note for index, token in enumerate(ids) for note in choice.push_noted(token, index).notes]
    assert notes == [0, 1]
    assert choice.num_tokens == 2
