"""A fuzzer that knows only the OpenAPI document of a server, and judges its answers by it."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance


@dataclass
class Fuzzed:
    """What was sent. `statuses`: how often each was answered, by operation."""

    num_cases: int = 0
    statuses: dict[str, Counter[int]] = field(default_factory=dict)


def fuzz(base_url: str, num_cases: int) -> Fuzzed:
    """At least so many cases, positive and negative, spread over all operations; always the same ones for the same
    document. The library's own checks judge the answers: no 5xx, no status, type or schema that the document lacks, no
    wrong data taken. One is left out: a document cannot say that a message's role decides about its content, or that
    two fields bound each other. And a request that asks for an impossible deadline is answered 504, as it should be.
    """
    document = schemathesis.openapi.from_url(base_url + "/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    varied = [one for one in operations if list(one.body) or list(one.iter_parameters())]
    modes = [(one, mode) for one in varied for mode in schemathesis.GenerationMode if not mode.is_negative or one.body]
    fuzzed = Fuzzed()
    for operation in operations:
        if operation not in varied:
            _fuzz_operation(operation, schemathesis.GenerationMode.POSITIVE, 1, fuzzed)
    for operation, mode in modes:
        _fuzz_operation(operation, mode, math.ceil(num_cases / len(modes)), fuzzed)
    return fuzzed


def _fuzz_operation(operation: Any, mode: schemathesis.GenerationMode, num_cases: int, fuzzed: Fuzzed) -> None:
    statuses = fuzzed.statuses.setdefault(f"{operation.method.upper()} {operation.path}", Counter())

    @settings(
        max_examples=num_cases,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode), num_fields=st.integers(0, 4))
    def check(case: schemathesis.Case, num_fields: int) -> None:
        fuzzed.num_cases += 1
        if mode.is_positive and isinstance(case.body, dict) and num_fields < 4:
            schema = _body_schema(operation)
            thinner = Thinner(operation.schema.raw_schema, num_fields)
            case.body = thinner.thin(case.body, schema)
            if num_fields % 2:
                case.body |= _words(operation.path, case.body)
        answer = case.call(timeout=30)
        statuses[answer.status_code] += 1
        excluded = [positive_data_acceptance]
        if answer.status_code == 504 and isinstance(case.body, dict) and case.body.get("timeout") is not None:
            excluded.append(not_a_server_error)
        case.validate_response(answer, excluded_checks=excluded)

    check()


def _words(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Words that there is nothing wrong with, so that the fields beside them are looked at."""
    fields = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
    given = {name: fields[name] for name in fields if name in body}
    return {"prompt": "hi"} if path in ("/generate", "/tokenize") and not given else given


def _body_schema(operation: Any) -> dict[str, Any]:
    (content,) = operation.definition.raw["requestBody"]["content"].values()
    return content["schema"]


class Thinner:
    """Leaves out optional fields, up to `num_fields` at each level: of many at once one is nearly always refused, and
    then the others are not looked at."""

    def __init__(self, document: dict[str, Any], num_fields: int) -> None:
        self._schemas = document["components"]["schemas"]
        self._num_fields = num_fields

    def thin(self, value: Any, schema: dict[str, Any]) -> Any:
        schema = self._resolved(value, schema)
        if isinstance(value, list):
            return [self.thin(item, schema.get("items", {})) for item in value]
        if not isinstance(value, dict) or "properties" not in schema:
            return value
        required = set(schema.get("required", ()))
        optional = sorted(value.keys() - required)
        kept = random.Random(repr(optional)).sample(optional, min(self._num_fields, len(optional)))
        fields = schema["properties"]
        return {
            name: self.thin(value[name], fields.get(name, {})) for name in value if name in required or name in kept
        }

    def _resolved(self, value: Any, schema: dict[str, Any]) -> dict[str, Any]:
        """The branch of a schema that is for values like this one."""
        while True:
            if "$ref" in schema:
                schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            elif branches := schema.get("anyOf") or schema.get("oneOf"):
                schema = next((one for one in branches if self._fits(value, one)), {})
            else:
                return schema

    def _fits(self, value: Any, schema: dict[str, Any]) -> bool:
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        if isinstance(value, dict) and (kind := schema.get("properties", {}).get("type")) is not None:
            return value.get("type") in (kind.get("const"), *kind.get("enum", ()))
        kinds = {dict: "object", list: "array", str: "string"}
        return schema.get("type") == kinds.get(type(value)) or "oneOf" in schema or "anyOf" in schema
