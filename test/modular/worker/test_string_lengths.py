"""Strings of a bounded length: exactly those, at any length, at a cost that the length does not change."""

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mstar.api_server.grammar.call_formats import CallableTool, calls
from mstar.api_server.grammar.formats import Format, json_text
from mstar.worker.grammars.compiler import CompiledGrammar, GrammarCompiler
from mstar.worker.grammars.constraints import Matcher
from mstar.worker.grammars.native import RAW, load_core
from mstar.worker.grammars.string_lengths import exact_lengths
from mstar.worker.grammars.trial_messages import Passed, Refused, Trial
from mstar.worker.grammars.trial_process import attempt
from mstar.worker.grammars.vocabulary import Vocabulary

END = 0
NUM_WORDS = 20_000
WIDE = tuple(letter.encode() for letter in "é漢😀")
BREAKS = (b"\t", b"\n", b"a\tb", b'"\t', b"\r\n")


def words() -> list[bytes]:
    """The bytes, and words of several letters, of which some hold quotes, white space and half characters."""
    draw = random.Random(0)
    letters = [*"abcdefghijklmnop qrstuvwxyz", *"0123456789.,:;<>/\\", *'""', "é", "漢", "😀"]
    made = {"".join(draw.choices(letters, k=draw.randint(2, 7))).encode() for _ in range(NUM_WORDS)}
    made.update(text[1:] for text in [*made] if text[0] >= 0x80)
    return [b"", *(bytes([byte]) for byte in (9, 10, *range(0x20, 0x100))), *BREAKS[2:], *WIDE, *sorted(made)]


TOKENS = words()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    info = load_core().TokenizerInfo(TOKENS, RAW, len(TOKENS), [END], False)
    vocabulary = Vocabulary(info=str(info.serialize_json()), end_ids=(END,), textless=frozenset((END,)))
    yield GrammarCompiler(vocabulary, 1)


def compiled(compiler: GrammarCompiler, form: Format) -> CompiledGrammar:
    return compiler.compile(json.dumps(form), "")


def mask(matcher: Matcher) -> np.ndarray:
    bits = np.zeros((1, -(-len(TOKENS) // 32)), np.int32)
    if not matcher.fill_next_token_bitmask(bits, 0):
        bits.fill(-1)
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(TOKENS)].astype(bool)


LETTERS = {token: index for index, token in enumerate(TOKENS) if len(token) == 1 or token in WIDE}


def takes(grammar: CompiledGrammar, text: str, *, bytewise: bool = True) -> bool:
    """As a whole text, by bytes or by characters."""
    matcher = grammar.matcher((END,))
    pieces = [bytes([byte]) for byte in text.encode()] if bytewise else [letter.encode() for letter in text]
    return all(matcher.accept_token(LETTERS[piece]) for piece in pieces) and bool(mask(matcher)[END])


def string(least: int, most: int | None) -> dict[str, Any]:
    bounds = {"minLength": least or None, "maxLength": most}
    return {"type": "string"} | {keyword: bound for keyword, bound in bounds.items() if bound is not None}


BOUNDS = [(0, 1), (1, 1), (1, None), (0, 5), (3, 3), (0, 127), (128, 129), (0, 500), (499, 2000), (300, None)]


def edges(least: int, most: int | None) -> set[int]:
    top = least + 9 if most is None else most
    return {n for n in (0, 1, least - 1, least, least + 1, top - 1, top, top + 1) if n >= 0}


@pytest.mark.parametrize(("least", "most"), BOUNDS)
def test_texts_at_the_limits(compiler: GrammarCompiler, least: int, most: int | None):
    """Characters are counted, of however many bytes."""
    grammar = compiled(compiler, json_text({"type": "object", "properties": {"a": string(least, most)}}))
    for length in edges(least, most):
        fits = least <= length and (most is None or length <= most)
        for letter in "aé漢😀\x7f":
            for bytewise in (True, False) if letter in "é漢😀" else (True,):
                text = '{"a": "%s"}' % (letter * length)
                assert takes(grammar, text, bytewise=bytewise) == fits, (letter, length)
        if fits and length:
            assert not takes(grammar, '{"a": "%s\t"}' % ("a" * (length - 1)))


@pytest.mark.parametrize(("least", "most"), [(0, 1), (2, 2), (0, 30), (25, 200)])
def test_whatever_is_drawn_is_valid(compiler: GrammarCompiler, least: int, most: int):
    grammar = compiled(compiler, json_text({"type": "array", "items": string(least, most), "minItems": 1}))
    draw, num_whole = random.Random(0), 0
    for _ in range(12):
        matcher, text = grammar.matcher((END,)), b""
        for _ in range(400):
            allowed = np.flatnonzero(mask(matcher))
            assert len(allowed), text
            ends = [token for token in allowed if token == END or TOKENS[token][:1] in (b'"', b"]")]
            token = int(draw.choice(ends if ends and draw.random() < 0.3 else allowed))
            assert matcher.accept_token(token), (text, TOKENS[token])
            if token == END:
                num_whole += 1
                values = json.loads(text)
                assert values and all(least <= len(value) <= most for value in values), text
                break
            text += TOKENS[token]
    assert num_whole >= 6


AWKWARD = {
    "type": "object",
    "properties": {
        'q"\\[^"\\\r\n]é😀\t\u2028': {"enum": ['[^"\\\r\n]', "\x7f\u0000", '{"a": "minLength"}', 1.5, None]},
        "bounded": string(2, 300),
        "free": {"type": "string"},
        "any": {},
        "code": {"type": "string", "pattern": r'^[^"\\\r\n]{2,3}-[A-Z]{2}$'},
        "when": {"type": "string", "format": "date-time"},
        "id": {"type": "string", "format": "uuid"},
        "n": {"type": "number", "minimum": -1.5, "maximum": 7},
        "deep": {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1, "maxItems": 300},
    },
    "$defs": {"d": {"type": "object", "additionalProperties": string(0, 1), "maxProperties": 3}},
}


def test_the_rest_of_a_schema_is_as_the_library_takes_it(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch):
    """Only controls are left out."""
    form = json_text({**AWKWARD, "required": list(AWKWARD["properties"])})
    ours = compiled(compiler, form)
    monkeypatch.setattr("mstar.worker.grammars.compiler.exact_lengths", lambda form: form)
    theirs = compiled(compiler, form)
    draw, num_ended, num_left_out = random.Random(1), 0, 0
    for _ in range(6):
        one, other = ours.matcher((END,)), theirs.matcher((END,))
        for _ in range(500):
            allowed, library = mask(one), mask(other)
            beyond = [TOKENS[token] for token in np.flatnonzero(allowed != library)]
            assert not (allowed & ~library).any() and all(b"\t" in token for token in beyond), beyond
            num_left_out += len(beyond)
            fitting = np.flatnonzero(allowed)
            short = [token for token in fitting if TOKENS[token][:1] in (b'"', b"}", b"]", b",", b"")]
            token = int(draw.choice(short if short and draw.random() < 0.5 else fitting))
            assert one.accept_token(token) and other.accept_token(token)
            if token == END:
                num_ended += 1
                break
    assert num_left_out


PATTERNS: dict[str, tuple[str, bool]] = {
    "^.{0,400}$": ("", True),
    "^[a-c ]{40}$": ("", True),
    r"^\w{1,35}$": ("", True),
    r"^[\w.+-]{2,300}$": ("", True),
    "^[^,;]{33,}$": ("", True),
    r"^[-:\u00e0-\u00ff\x41]{1,40}$": ("", True),
    "^A[a-c0-9-]{0,253}$": ("A", True),
    r"^a?b://\d.{1,300}$": ("b://0", True),
    '^é[^漢"]{0,99}$': ("é", True),
    r"^[^\s]{1,300}$": ("", False),
    "^(a|b){1,40}$": ("", False),
    "^(a|b)c{1,40}$": ("a", False),
    "^a+a{1,40}$": ("a", False),
    "^.{1,40}a$": ("", False),
    "^a|b{1,40}$": ("", False),
}
"""By what a text begins with, and whether the repetition is counted by a rule."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_that_end_in_a_long_repetition_mean_what_they_did(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, pattern: str
):
    head, is_counted = PATTERNS[pattern]
    form = json_text({"type": "array", "items": {"type": "string", "pattern": pattern}})
    assert (exact_lengths(form) != form) == is_counted
    ours = compiled(compiler, form)
    monkeypatch.setattr("mstar.worker.grammars.compiler.exact_lengths", lambda form: form)
    theirs = compiled(compiler, form)
    lengths = {0, 1, 2, 3, 31, 32, 33, 34, 35, 36, 39, 40, 41, 99, 100, 253, 254, 299, 300, 301, 400, 401}
    bodies = [letter * length for letter in "a -é漢,;1" for length in lengths]
    bodies += [letter * 34 for letter in (*map(chr, range(0x20, 0x80)), '\\"', "\\n", "\t", "😀")]
    num_taken = 0
    for body in bodies:
        text = f'["{head}{body}"]'
        whole = takes(theirs, text)
        assert takes(ours, text) == whole, text
        num_taken += whole
        if whole:
            assert re.fullmatch(pattern[1:-1], json.loads(text)[0], re.ASCII), text
    assert num_taken


def seconds_of_masks(grammar: CompiledGrammar, inside: bytes) -> float:
    """Of 40 masks in a string of ordinary letters: the mean of the fastest half."""
    matcher, taken = grammar.matcher((END,)), []
    for byte in inside:
        assert matcher.accept_token(LETTERS[bytes([byte])])
    bits = np.zeros((1, -(-len(TOKENS) // 32)), np.int32)
    for _ in range(40):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(bits, 0)
        taken.append(time.thread_time() - began)
        assert matcher.accept_token(LETTERS[b"a"])
    return sum(sorted(taken)[:20]) / 20


def called(**rules: Any) -> Format:
    parameters = {"type": "object", "properties": {"a": {"type": "string", **rules}}, "required": ["a"]}
    return calls([CallableTool("f", parameters, strict=True)], most="one")


CALL = b"<tool_call>\n<function=f>\n<parameter=a>\n"


def test_long_strings_cost_what_short_ones_do(compiler: GrammarCompiler):
    """Found token by token, a mask of a long string takes a thousand times as long."""
    short = seconds_of_masks(compiled(compiler, json_text({"type": "string", "pattern": "^[^b]*$"})), b'"')
    for form, inside in (
        (json_text(string(0, 500)), b'"'),
        (json_text(string(300, 5000)), b'"'),
        (json_text({"type": "array", "items": string(0, 1000)}), b'["'),
        (json_text({"type": "string", "pattern": "^[a-z ]{1,1000}$"}), b'"'),
        (json_text({"type": "string", "pattern": "^[a-z]-.{1,1000}$"}), b'"a-'),
        (called(maxLength=2000), CALL),
    ):
        began = time.thread_time()
        grammar = compiled(compiler, form)
        assert time.thread_time() - began < 1
        assert seconds_of_masks(grammar, inside) < 30 * short + 1e-4, form


@pytest.mark.parametrize(("least", "most"), [(0, 5), (2, 5), (3, 3), (4, None), (0, 700), (20, 300)])
def test_texts_of_calls_at_the_limits(compiler: GrammarCompiler, least: int, most: int | None):
    """As much as a reader takes for the text: up to the closing tag, without the line break before that."""
    grammar = compiled(compiler, called(**{k: v for k, v in string(least, most).items() if k != "type"}))
    before, after = CALL.decode(), "\n</parameter>\n</function>\n</tool_call>"
    for length in edges(least, most):
        fits = least <= length and (most is None or length <= most)
        for letter in "aé漢😀":
            assert takes(grammar, before + letter * length + after, bytewise=False) == fits, (letter, length)
        if length > least:
            assert takes(grammar, before + "a" * (length - 1) + "\n" + after) == fits
    assert not takes(grammar, before + "a" * least + "</parameter>" + after)


def test_what_is_slow_at_every_token_is_refused_before_it_is_followed(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
):
    """Limits are lower here, as there are few tokens."""
    monkeypatch.setattr("mstar.worker.grammars.rehearsal.SUSTAINED_NS", 500_000)
    lists = {"type": "array", "items": {"type": "integer"}, "maxItems": 500}
    for form in (json_text(string(0, 2000)), json_text(lists), json_text(AWKWARD), called(maxLength=2000)):
        assert attempt(compiler, Trial(json.dumps(form), ""), len(TOKENS), 1 << 30) == Passed()
    slow = json_text({"type": "string", "pattern": "^A-.{0,400}-[A-Z]$"})
    reply = attempt(compiler, Trial(json.dumps(slow), ""), len(TOKENS), 1 << 30)
    assert isinstance(reply, Refused) and "repetitions" in reply.message
