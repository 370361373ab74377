"""The built-in page as files and headers, and the routes that feed it: what holds without a browser."""

import re
from collections.abc import Iterator

import pytest
from support.repository import PACKAGE
from support.running_front import RunningFront, build_spec
from support.tiny_text import build_tokenizer

from mstar.api_server.live_view import LiveView, view_of
from mstar.config.schema import ServerConfig
from mstar.graph.base import (
    EMIT_TO_CLIENT,
    EMPTY_DESTINATION,
    GraphEdge,
    GraphNode,
    Loop,
    LoopLimit,
    Parallel,
    Sequential,
)
from mstar.graph.picture import picture
from mstar.streaming.chunk_policy import ChunkPolicy
from mstar.streaming.topology import Connection, Partition, PartitionTopology

KEY = "sesame"
FOLDER = PACKAGE / "api_server" / "page"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))
SOURCES = {name: (FOLDER / name).read_text() for name in FILES}
INTO_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|createContextualFragment|srcdoc"
)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    spec = build_spec(tmp_path_factory.mktemp("tokenizer"), server=ServerConfig(api_keys=(KEY,)))
    with RunningFront(spec, build_tokenizer(), lambda _: ()) as front:
        yield front


def keyed(front: RunningFront, path: str):
    return front.http.get(path, headers={"authorization": f"Bearer {KEY}"})


def test_the_page_is_open_and_what_it_shows_is_not(front: RunningFront):
    page = front.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == SOURCES["index.html"]
    assert front.http.head("/").status_code == 200
    for path in ("/debug/live", "/debug/graph", "/v1/models", "/openapi.json"):
        assert front.http.get(path).status_code == 401
        assert keyed(front, path).status_code == 200


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_under_the_policy(front: RunningFront, name: str):
    answer = front.http.get(f"/page/{name}")
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.status_code == 200 and answer.text == SOURCES[name]
    assert answer.headers["content-type"].split(";")[0] == kind[name.split(".")[-1]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["frame-ancestors"] == "'none'"


@pytest.mark.parametrize("name", ["routes.py", "none.js", "..%2froutes.py", "%2e%2e%2f%2e%2e%2fapp.py"])
def test_nothing_else_is_served(front: RunningFront, name: str):
    answer = front.http.get(f"/page/{name}")
    assert answer.status_code in (401, 404) and "error" in answer.json()


@pytest.mark.parametrize("name", FILES)
def test_files_need_nothing_from_elsewhere_and_make_no_markup(name: str):
    source = SOURCES[name].replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", source) == []
    assert INTO_MARKUP.findall(source) == []


def test_the_page_has_no_script_or_style_of_its_own_and_names_files_that_exist():
    html = SOURCES["index.html"]
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html) == []
    named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', html))
    for name, source in SOURCES.items():
        named |= set(re.findall(r'from "\./([^"]+)"', source)) if name.endswith(".js") else set()
    assert named == set(FILES) - {"index.html"}


def test_a_live_view(front: RunningFront):
    front.worker.more_gauges = {
        'mstar_slots{pool="state",state="live"}': 2.0,
        'mstar_node_steps_total{node="LLM",walk="decode"}': 40.0,
        'mstar_node_rows_total{node="LLM",walk="decode"}': 120.0,
        'mstar_node_steps_total{node="LLM",walk="prefill"}': 3.0,
        "mstar_prefix_hit_tokens_total": 64.0,
    }
    front.reply(" one two three")
    body = {"model": "tiny", "prompt": "count", "max_tokens": 40}
    answer = front.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}).json()
    front.call(front.worker.beat)
    view = keyed(front, "/debug/live").json()
    assert view.keys() == set(LiveView.__struct_fields__)
    assert view["nodes"] == [
        {"node": "LLM", "walk": "decode", "steps": 40, "rows": 120},
        {"node": "LLM", "walk": "prefill", "steps": 3, "rows": 0},
    ]
    assert view["pools"] == [
        {"name": "kv", "kind": "pages", "states": {"owned": 0, "free": 100}},
        {"name": "state", "kind": "slots", "states": {"live": 2}},
    ]
    assert view["workers"] == [{"rank": 0, "problem": None, "step_age_s": 0.0}]
    assert view["generated_tokens"] == answer["usage"]["completion_tokens"] > 0
    assert view["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert (view["live_requests"], view["prefix_hit_tokens"], view["is_draining"]) == (0, 64, False)
    later = front.call(lambda: view_of(front.parts.handle))
    assert later.time_s > view["time_s"]


def test_the_graph_of_the_served_model(front: RunningFront):
    graph = keyed(front, "/debug/graph").json()
    (partition,) = graph["partitions"]
    walks = {walk["name"]: walk["section"] for walk in partition["walks"]}
    assert (walks["prefill"]["kind"], walks["prefill"]["name"], walks["prefill"]["rank"]) == ("node", "LLM", 0)
    assert walks["decode"]["kind"] == "loop" and walks["decode"]["section"]["name"] == "LLM"
    assert graph["streams"] == []


def test_a_picture_has_every_section_and_edge():
    first = GraphNode("A", ("x",), (GraphEdge("B", "y", persist=True), GraphEdge("D", "z", target_partition="talker")))
    again = GraphNode("B", ("y",), (GraphEdge("B", "y"), GraphEdge(EMIT_TO_CLIENT, "t", output_modality="text")))
    loop = Loop(again, LoopLimit("steps"), (GraphEdge("C", "all"),), "turns", frozenset({"all"}))
    walk = Sequential((first, Parallel((loop, GraphNode("C", ("all",), (GraphEdge(EMPTY_DESTINATION, "u"),))))))
    talk = Loop(GraphNode("D", ("z",), ()), 7)
    stream = Connection("thinker", "talker", "D", "z", ChunkPolicy(stride=1), "talk")
    topology = PartitionTopology(
        (Partition("thinker", ("think",)), Partition("talker", ("talk",), stream_fed=True)), (stream,)
    )
    made = picture({"think": walk, "talk": talk}, topology, {"A": 0, "B": 1, "C": 1, "D": 2})
    thinker, talker = made.partitions
    section = thinker.walks[0].section
    a, side_by_side = section.parts
    assert (section.kind, side_by_side.kind) == ("sequential", "parallel")
    assert [(edge.signal, edge.kind, edge.to, edge.is_kept) for edge in a.outputs] == [
        ("y", "node", "B", True),
        ("z", "stream", "D", False),
    ]
    drawn, c = side_by_side.parts
    assert (drawn.kind, drawn.name, drawn.limit, drawn.section.rank) == ("loop", "turns", "steps", 1)
    assert [(edge.signal, edge.is_list) for edge in drawn.outputs] == [("all", True)]
    assert [(edge.kind, edge.to) for edge in drawn.section.outputs] == [("node", "B"), ("client", "text")]
    assert c.outputs[0].kind == "nowhere"
    assert talker.is_stream_fed and talker.walks[0].section.limit == "7"
    assert [(s.signal, s.producer, s.consumer, s.node) for s in made.streams] == [("z", "thinker", "talker", "D")]
