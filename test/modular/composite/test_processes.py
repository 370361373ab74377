"""The composite model over one, two and three worker processes equals its reference."""

import pytest
from support.composite.deployment import CARD, Composite, make_requests, node_groups
from support.worker_processes import WorkerProcesses

from mstar.config.schema import CaptureConfig, DeploymentConfig, SchedulerConfig
from mstar.launch.deployment import resolve_deployment

REQUESTS = make_requests(12, seed=6)


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


@pytest.mark.parametrize(
    ("placement", "async_scheduling"),
    [("one_worker", True), ("language_apart", True), ("three_workers", True), ("three_workers", False)],
)
def test_outputs_equal_the_reference(
    composite: Composite, tmp_path, monkeypatch: pytest.MonkeyPatch, placement: str, async_scheduling: bool
):
    monkeypatch.setenv("PYTHONPATH", "test")  # the workers import the model by its import string
    config = DeploymentConfig(
        model=CARD,
        checkpoint=str(composite.directory),
        dtype="float32",
        num_threads=1,
        max_seq_len=128,
        scheduler=SchedulerConfig(async_scheduling=async_scheduling, max_rows=8),
        capture=CaptureConfig(batch_sizes=(1, 2, 4, 8)),
        node_groups=node_groups(placement),
    )
    deployment = resolve_deployment(config, cache_dir=tmp_path)
    with WorkerProcesses(deployment, tmp_path) as workers:
        for index, request in enumerate(REQUESTS):
            composite.submit(workers, f"r{index}", request)
        workers.run()
        for index, request in enumerate(REQUESTS):
            composite.check(workers, f"r{index}", request)
        workers.await_gauge("mstar_handles", 0)
        workers.await_gauge("mstar_tensors", 0)
    assert [child.exit_code() for child in workers.children] == [0] * deployment.config.num_workers
    assert workers.left_behind == []
