"""A fuzzer that knows only the OpenAPI document, against a running server with a real engine: whatever it sends, it is
answered as documented, the server lives, and nothing stays held. 2,000 cases under `MSTAR_TEST_FULL`."""

import os
from pathlib import Path

import pytest
from support.api_fuzz import fuzz
from support.server import running

from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint

FULL = bool(os.environ.get("MSTAR_TEST_FULL"))
NUM_CASES = 2000 if FULL else 250
MAX_SEQ_LEN = 160


@pytest.mark.timeout(1800 if FULL else 300)
def test_the_fuzzer_finds_no_contradiction(tmp_path: Path):
    write_random_checkpoint("tiny", tmp_path / "checkpoint", seed=3)
    settings = {"checkpoint": tmp_path / "checkpoint", "max_seq_len": MAX_SEQ_LEN, "server.served_names": "[tiny]"}
    arguments = ["qwen3_5", *(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))]
    with running(arguments, tmp_path / "log") as server:
        before = owned(server.gauges())
        fuzzed = fuzz(server.url, NUM_CASES)
        print(fuzzed)
        assert fuzzed.num_cases >= NUM_CASES
        for operation in ("POST /v1/chat/completions", "POST /v1/embeddings", "POST /v1/responses", "POST /generate"):
            assert {200, 400} <= fuzzed.statuses[operation].keys(), "some of it is answered, some of it refused"
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        server.wait_for(server.is_idle, 5, "everything given back")
        assert owned(server.gauges()) == before
        assert "Traceback" not in server.log.read_text()
        assert server.stop() == 0


def owned(gauges: dict[str, float]) -> dict[str, float]:
    """Of each pool, what is not a request's: free, or kept for prompts to come."""
    pools: dict[str, float] = {}
    for name, value in gauges.items():
        if name.startswith(("mstar_pages", "mstar_slots")) and "owned" not in name and "live" not in name:
            pool = name.split(",")[0]
            pools[pool] = pools.get(pool, 0) + value
    return pools
