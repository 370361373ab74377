"""Tables of `docs/serving.rst`: request fields equal the schemas, routes the routers, metrics what is exported."""

import ast
import re

from pydantic.fields import FieldInfo
from support.repository import PACKAGE, ROOT, dotted, package_files, tree

from mstar.api_server.generate.schema import GenerateBody
from mstar.api_server.openai.chat_schema import ChatRequest
from mstar.api_server.openai.completion_schema import CompletionRequest
from mstar.api_server.openai.embedding_schema import EmbeddingRequest
from mstar.api_server.openai.fields import GenerationFields
from mstar.api_server.openai.responses.schema import ResponseRequest
from mstar.api_server.openapi import ERROR_STATUSES

PAGE = (ROOT / "docs" / "serving.rst").read_text()
SECTION = PAGE.split("Request fields\n---")[1].split("Answers\n---")[0]
TABLE, NEUTRAL = SECTION.split("*Accepted,")


def _accepts_something(field: FieldInfo) -> bool:
    return field.annotation is not type(None)


def _supported(schema: type) -> set[str]:
    return {name for name, field in schema.model_fields.items() if _accepts_something(field)}


def _table(*where: str) -> set[str]:
    return {name for name, place in re.findall(r"\* - ``(\w+)``\n {5}- (\w+)\n", TABLE) if place in where}


def _neutral() -> set[str]:
    known = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    return set(re.findall(r"``(\w+)[`:]", NEUTRAL)) & known


def test_every_accepted_field_is_documented():
    assert _table("both", "chat", "text") | _neutral() == _supported(ChatRequest) | _supported(CompletionRequest)
    assert _table("both", "chat", "text") & _neutral() == set()


def test_fields_are_documented_for_the_routes_that_take_them():
    assert _table("both") <= _supported(ChatRequest) & _supported(CompletionRequest)
    assert _table("chat") <= _supported(ChatRequest) - _supported(CompletionRequest)
    assert _table("text") <= _supported(CompletionRequest) - _supported(ChatRequest)


def test_documented_names_are_no_refused_ones():
    assert "suffix" in CompletionRequest.model_fields
    assert "suffix" not in _supported(CompletionRequest)


def _fields_in(heading: str) -> set[str]:
    """Names in the first cells of the table under `heading`; a cell may have several."""
    section = PAGE.split(f"\n{heading}\n---")[1].split("\n---")[0]
    cells = re.findall(r"^   \* - (``.+``)$", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"``(\w+)``", cell)}


def test_fields_of_other_routes_are_documented():
    assert _fields_in("Embeddings") == _supported(EmbeddingRequest)
    of_chats = _supported(GenerationFields)
    assert _fields_in("Generate") | of_chats == _supported(GenerateBody) | {"stream_options"}
    assert _fields_in("Responses") | of_chats == _supported(ResponseRequest) | {"max_tokens", "n"}
    assert _fields_in("Responses") - of_chats == _supported(ResponseRequest) - of_chats


def _routes() -> set[str]:
    """METHOD /path of every decorator `router.method("/path", ...)` under the API server."""
    found = set()
    for path in sorted((PACKAGE / "api_server").rglob("*.py")):
        for node in ast.walk(tree(path)):
            for decorator in getattr(node, "decorator_list", []):
                if isinstance(decorator, ast.Call) and dotted(decorator.func).startswith("router."):
                    method = dotted(decorator.func).removeprefix("router.").upper()
                    found.add(f"{method} {ast.literal_eval(decorator.args[0])}")
    return found


def _first_cells(heading: str, cell: str = "``(.+)``") -> set[str]:
    """Raises `AssertionError` where a table says something twice."""
    section = PAGE.split(f"{heading}\n---")[1].split("\n---")[0]
    found = re.findall(rf"^   \* - {cell}$", section, re.MULTILINE)
    assert len(found) == len(set(found)), sorted(found)
    return set(found)


def test_routes_equal_the_routers():
    assert "POST /v1/chat/completions" in _routes()
    assert _first_cells("Routes") == {re.sub(r":\w+}", "}", route) for route in _routes()}


def test_statuses_of_the_schema_are_documented():
    assert set(map(str, ERROR_STATUSES)) <= _first_cells("Errors", r"(\d{3})")


def test_metrics_equal_what_is_exported():
    exporting = ("api_server", "profile", "worker", "engine", "conductor", "communication")
    sources = [path.read_text() for path in package_files() if path.relative_to(PACKAGE).parts[0] in exporting]
    exported = {name for source in sources for name in re.findall(r"[\"'](mstar_[a-z_]+)", source)}
    documented = {name.split("{")[0] for name in _first_cells("Metrics")}
    assert {_family(name) for name in documented} == {_family(name) for name in exported}


def _family(name: str) -> str:
    """A metric's name without what Prometheus' text form appends to it."""
    return re.sub(r"_(total|bucket|sum|count)$", "", name)
