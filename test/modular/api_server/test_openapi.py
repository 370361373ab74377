"""The OpenAPI document describes the server; a fuzzer that knows only the document is let loose in `server`."""

import re

from support.running_front import MODEL, RunningFront


def test_the_document_names_routes_schemas_and_models(front: RunningFront):
    document = front.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"} <= document["paths"].keys()
    schemas = document["components"]["schemas"]
    assert not any("__" in name for name in schemas), "two classes of one name"
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == [MODEL, "org/tiny-alias"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    headings = [operation["tags"] for path in document["paths"].values() for operation in path.values()]
    assert all(len(tags) == 1 for tags in headings) and ["operating"] in headings
    text = front.http.get("/openapi.json").text
    assert '"422"' not in text


def test_whole_answers_are_described(front: RunningFront):
    document = front.http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            assert "$ref" in schema or path.startswith(("/debug", "/page")) or path in ("/", "/metrics"), path
            for answer in operation["responses"].values():
                name = answer["content"]["application/json"]["schema"].get("$ref", "#/components/schemas/Error")
                assert name.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_the_page_of_the_document_needs_nothing_from_elsewhere(front: RunningFront):
    page = front.http.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    kinds = {path: front.http.get(path).headers["content-type"].partition(";")[0] for path in loaded}
    assert sorted(kinds.values()) == ["image/svg+xml", "text/css", "text/javascript"]
    assert all(path.startswith("/") for path in loaded) and "https://" not in page.text
    assert "url: '/openapi.json'" in page.text
    assert front.http.get("/docs/files/nope.js").json()["error"]["code"] == "not_found"


def test_the_schema_has_the_defaults_of_sampling(front: RunningFront):
    properties = front.http.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
    shown = {
        name: part["anyOf"][0]["default"]
        for name, part in properties.items()
        if "default" in part.get("anyOf", [{}])[0]
    }
    assert shown == {
        "temperature": 1.0, "top_p": 1.0, "min_p": 0, "min_tokens": 0,
        "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1.0,
    }  # fmt: skip
