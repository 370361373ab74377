"""The front benchmark runs and counts: a few streams, half a second."""

from benchmark.front_bench import run


def test_the_benchmark_counts_every_token_of_every_stream():
    result = run(num_streams=4, step_ms=5.0, seconds=1.0, repeats=1)
    assert result["streams"] == 4
    assert 200 < result["tokens_per_s"] <= 4 * 1000 / 5 * 1.1, "a token per stream and step, fewer on a busy machine"
    assert 0 < result["cpu_us_per_token"] < 1000
