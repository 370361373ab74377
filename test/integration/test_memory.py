"""What requests have held comes back: pages, states, pages on the host, and the accelerator's memory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.device_parity import DEVICE, MODELS, generate, open_instance, prompts, start, write_checkpoint

from mstar.engine.cuda_executor import CudaExecutor
from mstar.engine.engine_config import EngineConfig
from mstar.engine.resources.host_pool import HostPool
from mstar.launch import rank

COUNT, TOKENS = 40, 24
HOST = 8 << 20
ROOMS: dict[str, dict[str, Any]] = {
    "room for all": {},
    "room on the host": {"kv": {"num_pages": 40, "host_bytes": HOST}, "state": {"num_slots": 50, "host_bytes": HOST}},
    "room for some": {"kv": {"num_pages": 40}, "state": {"num_slots": 50}},
}
"""Resources of deployments."""
GIVES_WAY = {"room on the host": "offload", "room for some": "recompute"}
"""What becomes of requests without room."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rank.engine_config

    def poisoning(*args: Any, **kwargs: Any) -> EngineConfig:
        return replace(plain(*args, **kwargs), debug_poison=True)

    monkeypatch.setattr(rank, "engine_config", poisoning)


def held(instance: Any) -> Mapping[str, float]:
    """After what was removed last has left."""
    for _ in range(4):
        instance.tick()
    gauges = instance.workers[0][1].engine.gauges()
    return {name: value for name, value in gauges.items() if "_total" not in name}


def evicted(instance: Any, kind: str) -> float:
    return instance.workers[0][1].engine.gauges()[f'mstar_evictions_total{{kind="{kind}"}}']


def resources_of(model: str, room: str) -> dict[str, Any]:
    return {key: value for key, value in ROOMS[room].items() if key == "kv" or model != "llama"}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("model", MODELS)
def test_all_comes_back_from_a_load_with_departures(model: str, room: str, tmp_path: Path):
    directory, texts = write_checkpoint(model, tmp_path / model), prompts(COUNT)
    reference = open_instance(model, directory, "cpu", prefix_cache={"enabled": False}, capture={"enabled": False})
    expected = generate(reference, texts, TOKENS)
    reference.close()
    resources = resources_of(model, room)
    instance = open_instance(model, directory, DEVICE, prefix_cache={"enabled": False}, resources=resources)
    assert generate(instance, texts, TOKENS) == expected
    before, at_first = torch.cuda.memory_allocated(), held(instance)
    rng = np.random.default_rng(3)
    for _ in range(3):
        requests = start(instance, texts, TOKENS)
        going = list(range(COUNT))
        while len(going) > COUNT // 2:
            for _ in range(int(rng.integers(1, 4))):
                instance.tick()
            gone = going.pop(int(rng.integers(len(going))))
            instance.remove(requests[gone])
        instance.finish([requests[index] for index in going])
        for index in going:
            assert list(requests[index].tokens["token"]) == expected[index], index
    assert held(instance) == at_first
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    if room in GIVES_WAY:
        assert evicted(instance, GIVES_WAY[room]) > 0
    instance.close()


@pytest.mark.parametrize("model", MODELS)
def test_requests_go_to_the_host_and_come_back_without_a_launch_that_waits(model: str, tmp_path: Path, strict: None):
    directory, texts = write_checkpoint(model, tmp_path / model), prompts(COUNT)
    roomy = open_instance(model, directory, DEVICE, prefix_cache={"enabled": False})
    expected = generate(roomy, texts, TOKENS)
    roomy.close()
    resources = resources_of(model, "room on the host")
    instance = open_instance(model, directory, DEVICE, prefix_cache={"enabled": False}, resources=resources)
    assert generate(instance, texts, TOKENS) == expected
    assert evicted(instance, "offload") > 0
    instance.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_to_the_host_and_back_are_launched_while_the_device_is_busy(dtype: torch.dtype, strict: None):
    """In several pieces, over host pages in runs and apart; the second round finds the code of the first loaded."""
    pool = torch.randn(4, 40, 16, 2, 64, device=DEVICE).to(dtype)
    other, begun = torch.zeros_like(pool), pool.clone()
    host = HostPool(16, pool, staging_bytes=5 * pool[:, 0].nbytes)
    sources = np.array([7, 8, 9, 39, 0, 3, 1, 12, 20, 21, 22], np.int32)
    places = np.array([4, 5, 6, 16, 1, 3, 2, 9, 10, 11, 12], np.int32)
    targets = np.arange(30, 19, -1, dtype=np.int32)
    executor = CudaExecutor()
    for cycles in (1, 400_000_000):
        other.zero_()
        host.rows.zero_()

        def launch(cycles: int = cycles) -> None:
            torch.cuda._sleep(cycles)
            host.store(pool, sources, places)
            pool.zero_()  # what follows on the stream does not reach what was stored
            host.load(other, places, targets)

        event = executor.submit(launch)
        if cycles > 1:
            assert not event.done(), event.error
        assert event.wait() and event.error is None, event.error
        assert torch.equal(other[:, 20:31], begun[:, sources[::-1].tolist()])
        assert not other[:, :20].any() and not other[:, 31:].any()
        pool.copy_(begun)
        torch.cuda.synchronize()
    assert host.rows.is_pinned()
