"""The load generator against a server whose delays are known. Expected latencies come from the server's own log."""

import json
import subprocess
import sys

import pytest
from support.openai_stub import TEMPLATE_TOKENS, Answer, openai_stub
from typer.testing import CliRunner

from mstar.bench.command import app

NEAR_MS = 40.0  # the way through one machine's sockets, and a pause of its scheduler


def bench(stub, *arguments, code=0):
    result = CliRunner().invoke(app, ["--url", stub.url, "--json", "--warmup", "0", *arguments])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code != 2 else result.stderr


def test_latencies_are_those_of_the_server():
    delays = (0.08, 0.03, 0.03, 0.05)
    with openai_stub(lambda index, body: Answer(delays)) as stub:
        report = bench(stub, "--concurrency", "2", "--requests", "6", "--output-tokens", "4", "--input-tokens", "30")
        served = stub.full()
    assert report["succeeded"] == report["requests"] == len(served) == 6
    ttft = sorted(one.sent_s[0] - one.received_s for one in served)
    gaps = sorted(b - a for one in served for a, b in zip(one.sent_s, one.sent_s[1:], strict=False))
    e2e = sorted(one.ended_s - one.received_s for one in served)
    for name, values in (("ttft_ms", ttft), ("itl_ms", gaps), ("e2e_ms", e2e)):
        median = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2 * 1e3
        assert report[name]["count"] == len(values)
        assert report[name]["p50"] == pytest.approx(median, abs=NEAR_MS), name
    assert report["ttft_ms"]["p50"] >= 79
    assert report["e2e_ms"]["p50"] >= 189
    assert report["tpot_ms"]["p50"] == pytest.approx(110 / 3, abs=NEAR_MS / 2)
    assert report["kinds"]["text_to_text"]["itl_ms"] == report["itl_ms"]
    assert report["token_source"] == "usage"
    assert report["output_tokens"] == {"min": 4, "mean": 4.0, "max": 4, "total": 24}
    assert report["output_tok_s"] == pytest.approx(24 / report["duration_s"], rel=0.01)
    assert report["finish_reasons"] == {"length": 6}


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_made_prompts_have_the_asked_number_of_tokens(api):
    with openai_stub() as stub:
        report = bench(stub, "--api", api, "--requests", "3", "--output-tokens", "2", "--input-tokens", "50")
        bodies = [one.body for one in stub.full()]
    assert report["prompt_tokens"] == {"min": 50, "mean": 50.0, "max": 50, "total": 150}
    texts = [body["prompt"] if api == "completions" else body["messages"][0]["content"] for body in bodies]
    assert [len(text.split()) for text in texts] == [50 - (TEMPLATE_TOKENS if api == "chat" else 0)] * 3
    assert len(set(texts)) == 3
    assert all(body["ignore_eos"] and body["stream"] and body["model"] == "stub-model" for body in bodies)


def test_a_server_without_usage_is_said_to_be_one():
    with openai_stub(lambda index, body: Answer(coalesce=2, counts_usage=False), refuse_usage=True) as stub:
        report = bench(stub, "--requests", "2", "--output-tokens", "6")
        assert all("stream_options" not in one.body for one in stub.full())
    assert report["token_source"] == "chunks"
    assert report["output_tokens"]["total"] == 2 * 3
    assert report["prompt_tokens"] is None


def test_failures_are_counted_by_reason():
    answers = [Answer(), Answer(status=429), Answer(cut_after=1), Answer(error_after=2), Answer(status=429)]
    with openai_stub(lambda index, body: answers[index]) as stub:
        report = bench(stub, "--requests", "5", "--concurrency", "1", "--output-tokens", "4")
    assert (report["succeeded"], report["failed"]) == (1, 4)
    assert report["failures"] == {
        "HTTP 429: queue full": 2,
        "the connection was closed before the response was complete": 1,
        "error event: worker lost": 1,
    }
    assert report["ttft_ms"]["count"] == 1
    assert report["output_tokens"]["total"] == 4


def test_a_request_over_its_time_fails_and_the_rest_goes_on():
    with openai_stub(lambda index, body: Answer((5.0 if index == 0 else 0.0,))) as stub:
        report = bench(stub, "--requests", "3", "--concurrency", "1", "--output-tokens", "2", "--timeout", "0.3")
    assert report["failures"] == {"no complete answer within 0.3 s": 1}
    assert report["succeeded"] == 2


def test_no_success_is_exit_code_1():
    with openai_stub(lambda index, body: Answer(status=503)) as stub:
        report = bench(stub, "--requests", "2", "--output-tokens", "2", code=1)
    assert report["failed"] == 2


def test_waves_wait_for_the_last_of_the_wave_before():
    with openai_stub(lambda index, body: Answer((0.02 + 0.06 * (index % 3 == 0),))) as stub:
        report = bench(stub, "--load", "wave", "--concurrency", "3", "--requests", "7", "--output-tokens", "2")
        served = stub.full()
    assert report["client"]["peak_in_flight"] == 3
    for begin in (3, 6):
        assert min(one.received_s for one in served[begin : begin + 3]) >= max(one.ended_s for one in served[:begin])


def test_closed_loop_refills_at_once():
    with openai_stub(lambda index, body: Answer((0.3 if index == 0 else 0.01,))) as stub:
        bench(stub, "--load", "closed", "--concurrency", "2", "--requests", "6", "--output-tokens", "2")
        served = stub.full()
    slow = max(served, key=lambda one: one.ended_s - one.received_s)
    assert sum(one.received_s < slow.ended_s for one in served) == 6


def test_poisson_does_not_wait_for_answers_and_counts_from_the_schedule():
    with openai_stub(lambda index, body: Answer((0.5, 0.0))) as stub:
        report = bench(
            stub, "--load", "poisson", "--rate", "60", "--requests", "12", "--output-tokens", "2", "--seed", "5"
        )
        served = stub.full()
    assert report["client"]["peak_in_flight"] == 12
    assert max(one.received_s for one in served) < min(one.sent_s[0] for one in served)
    assert report["ttft_ms"]["p50"] >= 499


def test_warmup_is_not_measured_and_has_other_prompts():
    with openai_stub() as stub:
        result = CliRunner().invoke(
            app, ["--url", stub.url, "--json", "--warmup", "3", "--requests", "2", "--output-tokens", "2"]
        )
        texts = {one.body["messages"][0]["content"] for one in stub.full()}
    assert json.loads(result.stdout)["requests"] == 2
    assert len(texts) == 5


def test_connections_are_reused_and_a_closed_one_is_replaced():
    with openai_stub(lambda index, body: Answer(keeps_alive=index != 1)) as stub:
        report = bench(stub, "--requests", "4", "--concurrency", "1", "--output-tokens", "2")
        connections = [one.connection for one in stub.full()]
    assert report["succeeded"] == 4
    assert connections[0] == connections[1] != connections[2] == connections[3]


def test_prompt_file_with_its_own_lengths(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a b c", "max_tokens": 3}\n{"prompt": "d e"}\n')
    with openai_stub() as stub:
        report = bench(
            stub, "--prompts", str(file), "--requests", "2", "--output-tokens", "5", "--extra", '{"top_p":1}'
        )
        bodies = sorted((one.body["max_tokens"], one.body["messages"][0]["content"]) for one in stub.full())
        assert all("ignore_eos" not in one.body and one.body["top_p"] == 1 for one in stub.full())
    assert bodies == [(3, "a b c"), (5, "d e")]
    assert report["output_tokens"]["total"] == 8


def test_a_server_that_is_not_there_is_exit_code_2():
    with openai_stub() as stub:
        pass
    assert "does not answer" in bench(stub, code=2)


@pytest.mark.parametrize("arguments", [("--rate", "0"), ("--extra", "[]"), ("--url", "ftp://x")])
def test_options_of_no_use_are_exit_code_2(arguments):
    with openai_stub() as stub:
        bench(stub, *arguments, code=2)


def test_the_load_generator_is_light():
    heavy = ("torch", "transformers", "numpy", "fastapi", "zmq")
    code = f"import sys, mstar.bench.command; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_probe_may_show_nothing_and_a_request_may_not():
    with openai_stub(lambda index, body: Answer(silent=index == 0), silent_probes=True) as stub:
        report = bench(stub, "--requests", "2", "--concurrency", "1", "--output-tokens", "2", "--input-tokens", "40")
    assert report["failures"] == {"the stream carried no output": 1}
    assert report["prompt_tokens"]["total"] == 40
