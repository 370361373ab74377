"""Texts that follow a grammar, through the real loop: what they look like, and that nobody else notices."""

import json
import re

import pytest
from support.constrained_texts import PERSON, SCHEMAS, ConstrainedTexts, format_of, is_valid, run
from support.instance import Instance

from mstar.api_server.answer.reader import AnswerFormat, AnswerReader, WholeAnswer
from mstar.api_server.grammar.call_formats import CallableTool, calls, text_with_calls
from mstar.api_server.grammar.formats import context_free, json_text, literal, one_of, regular


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> ConstrainedTexts:
    return ConstrainedTexts(tmp_path_factory.mktemp("texts"))


LOOPS = {"plain": {"overlap": False}, "late device": {"late": True}, "thread": {"threaded": True}}


def submit_plain(texts: ConstrainedTexts, instance: Instance) -> list:
    return [
        texts.submit(instance, f"free {i}", None, temperature=i / 2, seed=i, max_tokens=60, stop_token_ids=())
        for i in range(4)
    ]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_every_complete_text_is_valid_beside_rows_that_are_not_constrained(texts: ConstrainedTexts, temperature: float):
    alone = texts.instance(late=True)
    expected = submit_plain(texts, alone)
    run(alone)
    instance = texts.instance(late=True, max_rows=40)
    results = {
        name: texts.submit(instance, name, format_of(name), temperature=temperature, seed=3, max_tokens=100)
        for name in SCHEMAS
    }
    free = submit_plain(texts, instance)
    run(instance)
    ended = [name for name, result in results.items() if texts.ended(result)]
    for name in ended:
        assert is_valid(texts.text(results[name]), SCHEMAS[name]), (name, texts.text(results[name]))
    assert not [name for name, result in results.items() if result.failure]
    assert len(ended) >= 28, sorted(SCHEMAS.keys() - ended)  # the others are at white space, or deep in a recursion
    assert [result.tokens for result in free] == [result.tokens for result in expected]
    alone.close()
    instance.close()


def test_the_loops_agree(texts: ConstrainedTexts):
    seen = []
    for tuning in LOOPS.values():
        instance = texts.instance(**tuning)
        forms = {"schema": json_text(PERSON), "regex": regular("[a-f]{3,9}(-[0-9]+)?"), "free": None}
        results = [texts.submit(instance, rid, form, seed=7, max_tokens=40) for rid, form in forms.items()]
        results.append(texts.submit(instance, "again", forms["regex"], seed=8, temperature=0.0, max_tokens=40))
        run(instance)
        seen.append([result.tokens for result in results])
        instance.close()
    assert seen[0] == seen[1] == seen[2]


def test_forms_other_than_json(texts: ConstrainedTexts):
    instance = texts.instance(late=True)
    choice = texts.submit(instance, "choice", one_of([literal("yes\n"), literal('no "é"')]), temperature=2.0)
    pattern = texts.submit(instance, "pattern", regular("(ab|cd){2,4}x?[0-9]{2}"), temperature=2.0)
    grammar = texts.submit(instance, "ebnf", context_free('root ::= "(" root ")" | "." [ab]'), temperature=2.0)
    bare = calls([CallableTool("f", {}, strict=True)], most="any")
    called = texts.submit(instance, "called", bare, max_tokens=60)
    behind = texts.submit(instance, "behind", literal("done"), behind="z", temperature=2.0)
    run(instance)
    assert texts.text(choice) in ("yes\n", 'no "é"')
    assert re.fullmatch("(ab|cd){2,4}x?[0-9]{2}", texts.text(pattern))
    assert re.fullmatch(r"(\(*)\.[ab](\)*)", texts.text(grammar))
    assert texts.text(grammar).count("(") == texts.text(grammar).count(")")
    assert texts.text(called).startswith("<tool_call>\n<function=f>\n</function>\n</tool_call>")
    free, _, constrained = texts.text(behind).partition("z")
    assert constrained.lstrip("\n") == "done" and "z" not in free and texts.ended(behind)
    instance.close()


CALLED = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "hourly": {"type": ["boolean", "null"]},
        "unit": {"type": "string", "enum": ["C", "F or K"]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["code", "days", "places"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
        }
    },
}


def test_calls_are_read_as_they_were_constrained(texts: ConstrainedTexts):
    instance = texts.instance(late=True)
    tools = [CallableTool("forecast", CALLED, strict=True), CallableTool("now", {}, strict=False)]
    form = calls(tools, most="any")
    results = [texts.submit(instance, f"{i}", form, temperature=2.0, seed=i, max_tokens=300) for i in range(12)]
    run(instance)
    schemas = {"forecast": CALLED, "now": {"type": "object", "maxProperties": 0}}
    assert not any(result.failure for result in results)
    num_forecasts = 0
    for result in filter(texts.ended, results):
        reader = AnswerReader(AnswerFormat(None, schemas), opens_reasoning=False, new_id=lambda: "id")
        answer = WholeAnswer()
        for delta in (*reader.feed(texts.text(result)), *reader.finish(is_whole=True)):
            answer.add(delta)
        assert answer.calls and not answer.content
        for call in answer.calls:
            num_forecasts += call.name == "forecast"
            assert is_valid(call.arguments, schemas[call.name]), (call, texts.text(result))
    assert num_forecasts >= 2
    instance.close()


@pytest.mark.parametrize("behind", ["", "</think>"])
def test_every_shape_of_calls_is_a_grammar(texts: ConstrainedTexts, behind: str):
    odd = CallableTool("odd", {"properties": {"a": {"not": {}}, "b": {"type": ["null", "object"]}}}, strict=False)
    tools = [CallableTool("forecast", CALLED, strict=True), CallableTool("now", {}, strict=True), odd]
    for some in (tools, tools[1:2]):
        for most in ("one", "any"):
            forms = (calls(some, most=most), text_with_calls(some, most=most))
            for form in (*forms, one_of([json_text(PERSON), forms[0]])):
                assert texts.compiler.compile(json.dumps(form), behind).num_bytes


def test_what_else_a_request_may_ask_for(texts: ConstrainedTexts):
    instance = texts.instance(late=True)
    word, end = regular("[ab]{2,30}"), texts.end_ids[0]
    a, b = (texts.tokenizer.token_to_id(letter) for letter in "ab")
    cut = texts.submit(instance, "cut", json_text(PERSON), max_tokens=3)
    floor = texts.submit(instance, "floor", word, min_tokens=20, bias_ids=(end,), bias_values=(100.0,))
    short = texts.submit(instance, "short", literal("abc"), min_tokens=50)
    endless = texts.submit(instance, "endless", word, stop_token_ids=(), bias_ids=(end,), bias_values=(100.0,))
    extra = texts.submit(instance, "extra", word, stop_token_ids=(end, b), bias_ids=(b,), bias_values=(100.0,))
    biased = texts.submit(instance, "biased", word, bias_ids=(a,), bias_values=(100.0,), temperature=0.0)
    told = texts.submit(instance, "told", literal("abc"), num_logprobs=3, frequency_penalty=2.0)
    choices = [texts.submit(instance, f"choice {i}", word, seed=i, temperature=2.0) for i in range(4)]
    run(instance)
    assert not texts.ended(cut) and len(cut.tokens) == 3 and list(cut.reasons.values()) == ["length"]
    assert texts.ended(floor) and len(floor.tokens) == 21
    assert texts.text(short) == "abc" and texts.ended(short)
    assert len(texts.text(endless)) == 30 and list(endless.reasons.values()) == ["stop"]
    assert texts.text(extra) == "b" and list(extra.reasons.values()) == ["stop"]
    assert texts.text(biased) == "a" * 30
    assert len(told.logprobs) == len(told.tokens)
    assert all(entry is not None and entry.logprob > -1e4 and len(entry.top_ids) == 3 for entry in told.logprobs)
    assert len({texts.text(choice) for choice in choices}) > 1
    instance.close()


def test_a_text_goes_on_after_its_cache_was_taken(texts: ConstrainedTexts):
    roomy, tight = (texts.instance(late=True, page_size=8, num_pages={"kv": pages}) for pages in (80, 24))
    for instance in (roomy, tight):
        for index in range(4):
            texts.submit(instance, f"{index}", regular("[a-z ]{90,99}"), seed=index, max_tokens=120)
        run(instance)
    assert tight.gauges(0)['mstar_evictions_total{kind="recompute"}'] > 0
    for rid, result in roomy.results.items():
        assert texts.ended(result) and tight.results[rid].tokens == result.tokens
    roomy.close()
    tight.close()


def test_requests_leave_while_their_grammar_is_made_and_while_it_holds(texts: ConstrainedTexts):
    instance = texts.instance(late=True)
    texts.submit(instance, "waits", json_text({"type": "array", "items": {"enum": list(range(50))}}))
    instance.tick()
    instance.abort("waits")
    texts.submit(instance, "runs", regular("[a-z]{150}"))
    while not instance.results["runs"].tokens:
        instance.tick()
    instance.abort("runs")
    after = texts.submit(instance, "after", literal("ok"))
    run(instance)
    assert texts.text(after) == "ok" and not instance.held(0)
    instance.close()


def test_what_is_no_grammar_fails_its_request_alone(texts: ConstrainedTexts):
    instance = texts.instance(late=True)
    bad = texts.submit(instance, "bad", regular("[a-z"))
    worse = texts.submit(instance, "worse", context_free("root ::= missing"))
    endless = texts.submit(instance, "endless", context_free("root ::= root"))
    good = texts.submit(instance, "good", literal("fine"))
    run(instance)
    assert endless.failure is not None and "grammar" in endless.failure
    assert bad.failure is not None and "regex" in bad.failure.lower() and "/project" not in bad.failure
    assert worse.failure is not None and "missing" in worse.failure
    assert texts.text(good) == "fine" and not instance.held(0)
    instance.close()


def test_a_text_that_is_too_ambiguous_to_follow_fails_alone(texts: ConstrainedTexts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mstar.worker.grammars.constraints.TOKEN_LIMIT_NS", 5_000_000)
    instance = texts.instance(late=True)
    slow = texts.submit(instance, "slow", context_free('root ::= x x x x x x "q"\nx ::= [a-z]* | x x'), temperature=2.0)
    good = texts.submit(instance, "good", json_text(PERSON), seed=1)
    run(instance)
    assert slow.failure is not None and "ambiguous" in slow.failure
    assert not good.failure and not instance.held(0)
    instance.close()


def test_without_a_tokenizer_there_are_no_grammars(texts: ConstrainedTexts):
    instance = texts.instance(late=True, load_grammars=None)
    refused = texts.submit(instance, "refused", literal("x"))
    free = texts.submit(instance, "free", None, max_tokens=3, stop_token_ids=())
    run(instance)
    assert refused.failure is not None and "no tokenizer" in refused.failure
    assert len(free.tokens) == 3 and not instance.held(0)
    instance.close()


def test_control_characters_and_special_tokens_are_never_drawn(texts: ConstrainedTexts):
    instance = texts.instance(late=True)
    result = texts.submit(
        instance, "any", json_text({"type": "string", "minLength": 60}), temperature=2.0, max_tokens=70
    )
    run(instance)
    json.loads(texts.text(result) + ("" if texts.ended(result) else '"'))
    specials = {texts.tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_start|>")}
    assert not specials.intersection(result.tokens) and max(result.tokens) < texts.tokenizer.get_vocab_size()
    instance.close()
