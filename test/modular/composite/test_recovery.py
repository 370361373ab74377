"""The composite model over three worker processes, one of which is killed: by SIGKILL, in the middle of requests."""

import pytest
from support.composite.deployment import CARD, Composite, make_requests, node_groups
from support.instance import shared_memory_of
from support.worker_processes import WorkerProcesses

from mstar.communication.arena import SHM_DIR
from mstar.config.schema import CaptureConfig, DeploymentConfig, SchedulerConfig
from mstar.launch.deployment import resolve_deployment

REQUESTS = make_requests(6, seed=6, max_tokens=12)
LASTING = make_requests(4, seed=9, max_tokens=100)
IDLE = ("mstar_handles", "mstar_running_rows", "mstar_tensors", 'mstar_pages{pool="kv",state="owned"}')


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


def sizes(workers: WorkerProcesses) -> list[int]:
    """Bytes of the instance's files in shared memory."""
    return sorted((SHM_DIR / name).stat().st_blocks * 512 for name in shared_memory_of(workers.name))


@pytest.mark.timeout(300)
def test_what_a_killed_worker_leaves_and_what_its_successor_does(
    composite: Composite, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", "test")  # the workers import the model by its import string
    config = DeploymentConfig(
        model=CARD,
        checkpoint=str(composite.directory),
        dtype="float32",
        num_threads=1,
        max_seq_len=128,
        scheduler=SchedulerConfig(max_rows=8),
        capture=CaptureConfig(batch_sizes=(1, 4)),
        node_groups=node_groups("three_workers"),
    )
    with WorkerProcesses(resolve_deployment(config, cache_dir=tmp_path), tmp_path) as workers:
        baseline = sizes(workers)
        for victim in (1, 2):
            for index, request in enumerate(LASTING):
                composite.submit(workers, f"lost{victim}.{index}", request)
            while not all(len(workers.results[f"lost{victim}.{index}"].tokens) > 5 for index in range(len(LASTING))):
                workers.read()
            workers.lose(victim)
            for name in IDLE:
                workers.await_gauge(name, 0)
            lost = [workers.results[f"lost{victim}.{index}"] for index in range(len(LASTING))]
            assert all(result.failure for result in lost), "they were to last"
            workers.restart(victim)
            for index, request in enumerate(REQUESTS):
                composite.submit(workers, f"r{victim}.{index}", request)
            workers.run()
            for index, request in enumerate(REQUESTS):
                composite.check(workers, f"r{victim}.{index}", request)
            for name in IDLE:
                workers.await_gauge(name, 0)
            assert sizes(workers) == baseline
    assert [child.exit_code() for child in workers.children] == [0, 0, 0]
    assert workers.left_behind == []
