"""The OpenAPI document describes the server: a fuzzer that knows only the document finds no contradiction."""

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance
from support.running_front import MODEL, RunningFront

MAX_EXAMPLES = settings().max_examples // 6
"""Each costs an HTTP request; the profile decides how many."""


def test_the_document_names_routes_schemas_and_models(front: RunningFront):
    document = front.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"} <= document["paths"].keys()
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == [MODEL, "org/tiny-alias"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    text = front.http.get("/openapi.json").text
    assert '"422"' not in text


def test_the_fuzzer_finds_no_contradiction(front: RunningFront):
    """Positive and negative data for every operation; the library's own checks judge the answers. One is left out: a
    document cannot say that a message's role decides about its content, or that two fields bound each other. And a
    request that asks for an impossible deadline is answered 504, as it should be."""
    front.reply(" The capital")
    document = schemathesis.openapi.from_url(front.base_url + "/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) > 10
    num_cases = 0
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            if mode.is_negative and not list(operation.body):
                continue

            @settings(
                max_examples=MAX_EXAMPLES,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                derandomize=True,
                database=None,
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                nonlocal num_cases
                num_cases += 1
                answer = case.call(timeout=20)
                excluded = [positive_data_acceptance]
                if answer.status_code == 504 and isinstance(case.body, dict) and case.body.get("timeout") is not None:
                    excluded.append(not_a_server_error)
                case.validate_response(answer, excluded_checks=excluded)

            check()
    assert num_cases > 100
