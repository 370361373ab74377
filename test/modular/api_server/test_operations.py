"""Health, readiness, metrics, models, tokens, aborting by id."""

import re
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.running_front import MAX_SEQ_LEN, MODEL, RunningFront

import mstar
from mstar.api_server.metrics import worker_families


def metrics(front: RunningFront) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, parsed by the client library's own parser."""
    text = front.http.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_probes(front: RunningFront):
    assert front.http.get("/live").json() == {"status": "alive"}
    assert front.http.get("/ready").json() == {"status": "ready"}
    assert front.http.get("/health").json() == {"status": "healthy"}
    assert front.http.get("/version").json() == {"version": mstar.__version__}


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/version", "/v1/models", "/metrics", "/openapi.json"])
def test_head_is_get_without_the_body(front: RunningFront, path: str):
    got, head = front.http.get(path), front.http.head(path)
    assert head.status_code == got.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":  # which counts on
        assert int(head.headers["content-length"]) == len(got.content)
    assert front.http.get("/live").status_code == 200, "nothing is left on the connection"
    assert front.http.head("/v1/chat/completions").status_code == 405
    assert front.http.head("/v1/models/no").status_code == 404


def test_models(front: RunningFront):
    listed = front.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == [MODEL, "org/tiny-alias"]
    one = front.http.get("/v1/models/org/tiny-alias").json()
    assert one == listed["data"][1]
    assert (one["object"], one["max_model_len"], one["root"]) == ("model", MAX_SEQ_LEN, MODEL)
    assert one["modalities"] == {"input": ["text"], "output": ["text"]}
    assert "/v1/chat/completions" in one["endpoints"]
    assert one["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}
    missing = front.http.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_tokens_there_and_back(front: RunningFront):
    text = " The capital 你好 <|im_end|>"
    answer = front.http.post("/tokenize", json={"prompt": text}).json()
    assert answer["tokens"] == front.tokenizer.encode(text).ids
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_SEQ_LEN)
    assert front.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = front.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert front.tokenizer.decode(chat, skip_special_tokens=False) == rendered
    assert front.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    too_long = front.http.post("/tokenize", json={"prompt": "x" * (MAX_SEQ_LEN * 256)})
    assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "context_length_exceeded"
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, {"prompt": 5}):
        assert front.http.post("/tokenize", json=body).status_code == 400
    for tokens in ([-1], [2**32], ["x"], 5):
        refused = front.http.post("/detokenize", json={"tokens": tokens})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"


def test_metrics_count_what_happened(front: RunningFront):
    before = metrics(front)
    front.reply(" The capital of")
    num_tokens = len(front.tokenizer.encode(" The capital of").ids) + 1
    prompt = front.chat(n=2).json()["usage"]["prompt_tokens"]
    front.chat(max_tokens=1)
    front.chat(max_tokens=0)
    assert front.http.get("/nope").status_code == 404
    after = metrics(front)

    def change(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    assert change("mstar_requests_total", outcome="stop") == 2
    assert change("mstar_requests_total", outcome="length") == 1
    assert [change("mstar_http_responses_total", status=str(status)) for status in (200, 400, 404)] == [3, 1, 1]
    assert change("mstar_refused_connections_total") == 0
    assert after["mstar_connections", ()] >= 1
    assert after["process_resident_memory_bytes", ()] > 1e6
    assert change("mstar_prompt_tokens_total") == 2 * prompt
    assert change("mstar_generated_tokens_total") == 2 * num_tokens + 1
    assert change("mstar_time_to_first_token_seconds_count") == 3
    assert change("mstar_inter_token_seconds_count") == 2 * (num_tokens - 1)
    assert change("mstar_request_seconds_count") == 2
    assert change("mstar_request_seconds_bucket", le="+Inf") == 2
    assert change("mstar_time_to_first_token_seconds_sum") > 0
    assert change("mstar_time_to_first_token_seconds_bucket", le="60.0") == 3


def test_gauges_of_workers_are_shown_as_they_are(front: RunningFront):
    front.call(front.worker.beat)
    text = front.http.get("/metrics").text
    assert re.search(r'^mstar_pages\{pool="kv",state="free"\} 100\.0$', text, re.MULTILINE)
    assert "# TYPE mstar_pages gauge" in text and "# TYPE mstar_steps_total counter" in text
    assert 'mstar_steps_total{kind="fresh"} 1.0' in text
    assert "mstar_worker_restarts_total 0.0" in text and "mstar_handles 0.0" in text
    assert re.search(r"^mstar_waiting_choices 0\.0$", text, re.MULTILINE)


def test_what_workers_report_keeps_its_kind():
    reported = {
        'rows_bucket{le="1"}': 2.0,
        'rows_bucket{le="+Inf"}': 3.0,
        "rows_sum": 9.0,
        "rows_count": 3.0,
        "head_count": 4.0,
        r'odd{name="a\"b\\c"}': 5.0,
        "steps_total": 6.0,
        "no metric at all": 7.0,
    }
    families = {family.name: family for family in worker_families(reported.items())}
    assert {name: family.type for name, family in families.items()} == {
        "rows": "histogram",
        "head_count": "gauge",
        "odd": "gauge",
        "steps": "counter",
    }
    assert families["odd"].samples[0].labels == {"name": 'a"b\\c'}
    assert [sample.value for sample in families["rows"].samples] == [2.0, 3.0, 9.0, 3.0]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_running_request_can_be_aborted_by_its_id(front: RunningFront, streamed: bool):
    """Two requests with one id do not collide; aborting it ends both, and nothing else."""
    front.reply(" The capital of France", ends=False)
    front.call(lambda: setattr(front.worker, "step_s", 0.02))
    front.worker.script = lambda _: iter(lambda: 300, None)
    results: list[tuple[int, str]] = []

    def run(name: str) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": streamed}
        with front.http.stream("POST", "/v1/chat/completions", json=body, headers={"x-request-id": name}) as answer:
            results.append((answer.status_code, answer.read().decode()))

    threads = [threading.Thread(target=run, args=(name,)) for name in ("twin", "twin", "other")]
    for thread in threads:
        thread.start()
    front.wait_until(lambda: len(front.worker.rows) == 3)
    if streamed:  # the headers are sent with the first token
        front.wait_until(lambda: all(row.num_sampled > 3 for row in front.worker.rows.values()))
    answer = front.http.delete("/v1/requests/twin")
    assert answer.json() == {"id": "twin", "object": "request", "aborted": 2}
    for thread in threads[:2]:
        thread.join(10)
    front.wait_until(lambda: front.worker.num_open == 1)
    for status, text in results:
        assert status == (200 if streamed else 499)
        assert '"code":"request_aborted"' in text and "[DONE]" not in text
    assert front.http.delete("/v1/requests/other").status_code == 200
    threads[2].join(10)
    missing = front.http.delete("/v1/requests/twin")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "request_not_found"


def test_a_request_can_be_aborted_by_its_responses_id(front: RunningFront):
    front.worker.script = lambda _: iter(lambda: 300, None)
    front.call(lambda: setattr(front.worker, "step_s", 0.02))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    with front.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        name = re.findall(r'"id":"(chatcmpl-\w+)"', next(lines))[0]
        assert front.http.delete(f"/v1/requests/{name}").json()["aborted"] == 1
        assert "request_aborted" in list(lines)[-2]
