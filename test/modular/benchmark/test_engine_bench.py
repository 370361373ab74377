"""The harness of a whole engine over tiny shapes: its rows are those that were asked for, its numbers those of its
times, and it counts kernels as they are on the device."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

import benchmark.random_qwen3 as random_qwen3
from benchmark import engine_bench
from benchmark.device_profile import Span, busy_us, summarize
from benchmark.engine_runs import GREEDY, SAMPLED, STREAMS, Shape, Times, report, submit
from benchmark.http_waves import TokenPrompts
from benchmark.http_waves import summarize as summarize_wave
from benchmark.random_llama import draw_weights
from mstar.bench.records import RequestRecord
from mstar.config.load import config_from_mapping
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance


@pytest.fixture(autouse=True)
def _torch_stays_as_it_was():
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    yield
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


def bench(folder, *arguments):
    """One run of the command, which is told to go on once it is ready."""
    app = typer.Typer()
    app.command()(engine_bench.main)
    small = ["--model", "tiny", "--lengths", "9,5,70,3", "--repeats", "2", "--set", "num_threads=1"]
    done = CliRunner().invoke(app, [*small, "--out", str(folder), "--hold", *arguments], input="go\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("ready: ") == 1


def test_every_way_in_one_file(tmp_path):
    bench(tmp_path, "--decode", "1,2", "--sampled", "2", "--prefill", "2", "--name", "tiny")
    bench(tmp_path, "--decode", "", "--prefill", "", "--http", "3", "--name", "tiny", "--append")
    found = json.loads((tmp_path / "tiny.json").read_text())
    assert found["model"] == "tiny" and found["torch"] == torch.__version__ and found["commit"]
    rows = [
        (row["kind"], row["via"], row["sampling"], row["conc"], row["inlen"], row["outlen"]) for row in found["rows"]
    ]
    sampled = "temperature 0.8, top-p 0.95"
    assert rows == [
        ("decode", "engine", "greedy", 1, 9, 5),
        ("decode", "engine", "greedy", 2, 9, 5),
        ("decode", "engine", sampled, 2, 9, 5),
        ("prefill", "engine", "greedy", 2, 70, 3),
        ("decode", "http", "greedy", 3, 9, 5),
    ]
    for row in found["rows"]:
        for name, spread in row["spread"].items():
            assert 0 <= spread["min"] <= spread["median"] == row[name] <= spread["max"]
            # Where the client was late, its streams have all tokens at once.
            assert spread["max"] > 0 or (row["via"] == "http" and name == "itl_ms")
        assert row["ttft_ms"] <= row["last_ttft_ms"]
    assert all(row["host_total_us"] > 0 for row in found["rows"] if row["via"] == "engine")
    assert min(found["rows"][-1]["cpu_us_per_token"].values()) >= 0


def test_numbers_are_those_of_the_times():
    shape = Shape("decode", 4, 10, 11)
    times = [Times(0.5, 1.0, 2.0), Times(0.25, 0.5, 1.0), Times(1.0, 2.0, 4.0)]
    row = report(shape, times, via="http")
    assert (row["out_tok_s"], row["itl_ms"], row["ttft_ms"], row["last_ttft_ms"]) == (22.0, 100.0, 500.0, 1000.0)
    assert row["prefill_tok_s"] == 40.0
    assert row["spread"]["out_tok_s"] == {"median": 22.0, "min": 11.0, "max": 44.0}
    assert row["via"] == "http" and "host_us" not in row


def test_rows_of_other_code_are_not_added():
    one = {
        "model": "m",
        "hardware": "h",
        "torch": "t",
        "commit": "c",
        "dtype": "d",
        "repeats": 5,
        "rows": [{"conc": 1}],
    }
    assert engine_bench.joined(one, {**one, "rows": [{"conc": 2}]})["rows"] == [{"conc": 1}, {"conc": 2}]
    with pytest.raises(ValueError, match="commit of the file is c, and of these rows other"):
        engine_bench.joined(one, {**one, "commit": "other"})


def test_the_caches_hold_what_is_measured():
    wanted = engine_bench.shapes([1, 128], [32], [64])
    assert [(shape.kind, shape.conc, shape.sampling) for shape in wanted] == [
        ("decode", 1, GREEDY),
        ("decode", 128, GREEDY),
        ("decode", 64, SAMPLED),
        ("prefill", 32, GREEDY),
    ]
    found = dict(item.split("=") for item in engine_bench.sizes(wanted, with_streams=True))
    assert found["scheduler.max_rows"] == "128"
    assert int(found["resources.kv.num_pages"]) == 1 + 32 * (2064 // 64 + 1)
    few = dict(item.split("=") for item in engine_bench.sizes(wanted[:1], with_streams=True))
    assert few["scheduler.max_rows"] == str(STREAMS.streams + 1)
    assert int(few["resources.kv.num_pages"]) >= 8 * (128 + 1024) // 64 + 2048 // 64 + 1


def test_a_wave_is_read_from_its_requests():
    prompts = TokenPrompts("m", 8, 3, 1000, {})
    records = [RequestRecord("tokens", 10.0, sent_s=10.0, end_s=end, output_tokens=3) for end in (11.0, 12.0)]
    records[0].chunk_s, records[1].chunk_s = [10.25, 10.5], [10.5, 11.5]
    assert summarize_wave(records, prompts, 6e-6) == {
        "first_s": 0.25,
        "all_first_s": 0.5,
        "end_s": 2.0,
        "client_cpu_us": pytest.approx(1.0),
    }
    records[1].output_tokens = 2
    with pytest.raises(RuntimeError, match="rows have"):
        summarize_wave(records, prompts, 0.0)


def test_prompts_over_http_are_token_ids_that_differ():
    prompts = TokenPrompts("m", 8, 3, 1000, {"temperature": 0.8})
    bodies = [json.loads(prompts.request(index).body) for index in (0, 1, 0)]
    assert bodies[0] == bodies[2] and bodies[0]["prompt"] != bodies[1]["prompt"]
    assert len(bodies[0]["prompt"]) == 8 and bodies[0]["temperature"] == 0.8 and bodies[0]["ignore_eos"]


def test_time_of_kernels_that_overlap_counts_once():
    spans = [Span("a", 0.0, 10.0), Span("b", 5.0, 12.0), Span("a", 20.0, 24.0)]
    assert busy_us(spans) == 16.0
    found = summarize(spans, 2)
    assert (found["busy_us"], found["launches"]) == (8.0, 1.5)
    assert found["kernels"] == [{"us": 7.0, "calls": 1.0, "name": "a"}, {"us": 3.5, "calls": 0.5, "name": "b"}]


def test_the_normed_shape_norms_heads(monkeypatch):
    """Doubling a query norm's weight changes what is said: the norms are in the forward."""
    small = {**random_qwen3.SHAPE, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setattr(
        random_qwen3, "SHAPE", {**small, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    )
    scales = iter((1.0, 50.0))

    def draw(network, device):
        draw_weights(network, device)
        network.layers[0].self_attn.q_norm.weight.mul_(next(scales))

    monkeypatch.setattr(random_qwen3, "draw_weights", draw)
    torch.set_grad_enabled(False)
    settings = ["dtype=float32", "max_seq_len=64", "scheduler.max_rows=2", "resources.kv.num_pages=8", "num_threads=1"]
    said = []
    for _ in range(2):
        config = config_from_mapping({"model": engine_bench.MODELS["qwen3-0.6b"]}, "qwen3", settings)
        instance = LocalInstance(resolve_deployment(config, cache_dir=engine_bench.RESULTS), calibrate=False)
        said.append(_tokens(instance))
        instance.close()
    assert said[0] != said[1]


def _tokens(instance):
    requests = submit(instance, Shape("decode", 2, 20, 12), seed=1)
    instance.finish(requests)
    return [request.tokens["token"] for request in requests]
