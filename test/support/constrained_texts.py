"""A tiny Llama with a byte-level tokenizer, for texts that follow a grammar; and schemas, with who judges them."""

import json
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
from support.instance import Instance, Result, Tuning
from support.tiny_llama import Variant
from support.tiny_serving import TinyLlama
from support.tiny_text import write_tokenizer
from tokenizers import Tokenizer

from mstar.api_server.grammar.formats import Format, json_text
from mstar.communication.messages import Grammar
from mstar.worker.grammars.compiler import GrammarCompiler
from mstar.worker.grammars.vocabulary import read_vocabulary

PADDING = 7
"""Logits beyond the tokenizer's vocabulary, as many checkpoints have them."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}


class UntriedCompiler(GrammarCompiler):
    """Without a process of its own, for grammars that are known to be sound."""

    def prepare(self) -> None: ...
    def close(self) -> None: ...
    def release(self) -> None: ...


class ConstrainedTexts:
    """`compiler` is shared by all instances, as it takes a while to load."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Tokenizer = write_tokenizer(directory / "tokenizer")
        end = self.tokenizer.token_to_id("<|im_end|>")
        assert end is not None
        self.vocab_size = self.tokenizer.get_vocab_size() + PADDING
        self.end_ids = (end,)
        shape = {"vocab_size": self.vocab_size, "eos_token_id": end, "max_position_embeddings": 512}
        self.tiny = TinyLlama(directory / "checkpoint", Variant("texts", shape))
        self.compiler = UntriedCompiler(read_vocabulary(directory / "tokenizer", self.vocab_size, self.end_ids), 1)

    def instance(self, *, page_size: int | None = None, **tuning: Any) -> Instance:
        tuning = {"max_seq_len": 400, "load_grammars": lambda _: self.compiler, **tuning}
        return self.tiny.instance(Tuning(**tuning), page_size=page_size)

    def submit(self, instance: Instance, rid: str, form: Format | None, *, behind: str = "", **sampling: Any) -> Result:
        grammar = None if form is None else Grammar(format=json.dumps(form), behind=behind, field="response_format")
        sampling = {"stop_token_ids": self.end_ids, "max_tokens": 200, "temperature": 1.0, **sampling}
        prompt = self.tiny.prompt(5, seed=sum(rid.encode()))
        return self.tiny.submit(instance, rid, prompt, grammar=grammar, **sampling)

    def text(self, result: Result) -> str:
        return self.tokenizer.decode(result.tokens, skip_special_tokens=True)

    def ended(self, result: Result) -> bool:
        return bool(result.tokens) and result.tokens[-1] in self.end_ids


def run(instance: Instance, deadline_s: float = 60.0) -> None:
    """Until every request is done: ticks, and sleeps as a worker's loop does while grammars are compiled."""
    ends = time.monotonic() + deadline_s
    while not all(result.done for result in instance.results.values()) or instance.num_handles:
        assert time.monotonic() < ends, [result for result in instance.results.values() if not result.done]
        if not instance.tick():
            parts = instance.parts[0]
            parts.bus.wait(0.05, parts.constrained.wakeups)


def is_valid(text: str, schema: Any) -> bool:
    return jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(json.loads(text))


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


SHORT = {"type": "string", "maxLength": 4}
SCHEMAS: dict[str, Any] = {
    "an object": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "required and optional": {"type": "object", "properties": {"a": SHORT, "b": {"type": "null"}}, "required": ["a"]},
    "a required name without a property": {"type": "object", "required": ["k"], "additionalProperties": SHORT},
    "nested": _object(a=_object(b=_object(c={"type": "boolean"}))),
    "no properties": {"type": "object", "properties": {}},
    "length": _object(a={"type": "string", "minLength": 2, "maxLength": 5}),
    "pattern": _object(a={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"}),
    "an optional end of a pattern": _object(a={"type": "string", "pattern": "^v[0-9](\\.[0-9]{1,2})?$"}),
    "date": _object(a={"type": "string", "format": "date"}),
    "date-time": _object(a={"type": "string", "format": "date-time"}),
    "time": _object(a={"type": "string", "format": "time"}),
    "email": {"type": "string", "format": "email"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "integer range": _object(a={"type": "integer", "minimum": -5, "maximum": 1234}),
    "integer with fractional bounds": {"type": "integer", "exclusiveMinimum": 0.5, "maximum": 9.5},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "number range": _object(a={"type": "number", "minimum": 0.25, "exclusiveMaximum": 1.75}),
    "enum": {"enum": ["x", 1, None, True, {"k": [1, 'naïve "q"']}]},
    "enum of a type": {"type": "string", "enum": ["x", 1, "y"]},
    "const": _object(kind={"const": {"b": [1, 2]}}),
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [SHORT, {"type": "boolean"}], "items": False, "minItems": 2},
    "tuple of an older draft": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [SHORT, {"type": "null"}],
        "additionalItems": False,
        "minItems": 2,
    },
    "anyOf": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 99}, {"type": "null"}]},
    "anyOf beside properties": {
        "type": "object",
        "properties": {"a": SHORT, "b": SHORT},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "oneOf by a const": {
        "oneOf": [_object(kind={"const": "cat"}, lives={"type": "boolean"}), _object(kind={"const": "dog"}, name=SHORT)]
    },
    "allOf": {"allOf": [_object(a={"type": "boolean"}), _object(b={"type": "null"})]},
    "reference": {"$defs": {"n": _object(v={"type": "boolean"})}, **_object(x={"$ref": "#/$defs/n"})},
    "recursion": {
        "$defs": {"n": {"type": "object", "properties": {"v": {"type": "null"}, "n": {"$ref": "#/$defs/n"}}}},
        "$ref": "#/$defs/n",
    },
    "types": _object(a={"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 0, "maximum": 9}),
    "keys by a pattern": {
        "type": "object",
        "patternProperties": {"^x-[a-z]$": {"type": "boolean"}},
        "maxProperties": 2,
    },
    "keys of a form": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,3}$"},
        "additionalProperties": {"type": "null"},
        "minProperties": 1,
        "maxProperties": 2,
    },
}


def format_of(name: str) -> Format:
    return json_text(SCHEMAS[name])
