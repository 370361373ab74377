"""The in-process harnesses over a tiny checkpoint: they decode what they say, on whichever thread."""

import json
import threading

import pytest
import torch
from support.checkpoints import write_directory
from typer.testing import CliRunner

import benchmark.offline as offline
import benchmark.results as results
from benchmark.cpu_executor import MainThreadExecutor
from benchmark.local_decode import LocalDecoder, random_prompts
from benchmark.reference_generate import ReferenceGenerate
from benchmark.results import spread
from mstar import envs
from mstar.cli.targets import config_for
from mstar.launch.deployment import resolve_deployment
from mstar.platforms.executor import InlineExecutor, ThreadedExecutor

ROWS, PROMPT, OUTPUT = 3, 20, 6
SMALL = ["dtype=float32", "max_seq_len=64", "scheduler.max_rows=4", "resources.kv.num_pages=16", "num_threads=1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_directory(path)
    return path


@pytest.fixture
def deployment(checkpoint, tmp_path):
    return resolve_deployment(config_for(str(checkpoint), SMALL), cache_dir=tmp_path)


@pytest.fixture(autouse=True)
def _grad_stays_as_it_was():
    before = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(before)


def test_each_executor_decodes_the_same_as_transformers(deployment):
    prompts = random_prompts(ROWS, PROMPT, 320, seed=1)
    checkpoint = deployment.checkpoint()
    assert checkpoint is not None
    expected = ReferenceGenerate(checkpoint, torch.float32).run(prompts, OUTPUT)
    swapped = MainThreadExecutor()
    found = {}
    for name, executor in (("inline", InlineExecutor()), ("threaded", ThreadedExecutor()), ("swapped", swapped)):
        decoder = LocalDecoder(deployment, executor)
        if name == "swapped":
            found[name] = swapped.serve(lambda decoder=decoder: decoder.run(prompts, OUTPUT))
        else:
            found[name] = decoder.run(prompts, OUTPUT)
        decoder.close()
    assert {rates.first_tokens for rates in (*found.values(), expected)} == {expected.first_tokens}
    for rates in (*found.values(), expected):
        assert rates.prefill_tok_s == pytest.approx(ROWS * PROMPT / rates.prefill_s)
        assert rates.decode_tok_s == pytest.approx(ROWS * (OUTPUT - 1) / rates.decode_s)


def test_swapped_work_runs_on_the_serving_thread_in_order():
    executor = MainThreadExecutor()
    seen = []

    def loop():
        assert threading.current_thread() is not serving
        events = [executor.submit(lambda i=i: seen.append((i, threading.current_thread()))) for i in range(5)]
        return [event.wait(10) for event in events]

    serving = threading.current_thread()
    assert executor.serve(loop) == [True] * 5
    assert seen == [(index, serving) for index in range(5)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_loop_ends_the_serving():
    def loop():
        raise ValueError("broken")

    with pytest.raises(RuntimeError, match="ended with an error"):
        MainThreadExecutor().serve(loop)


def test_offline_reports_what_it_generated(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setenv("MSTAR_CACHE_DIR", str(tmp_path))
    assert envs.CACHE_DIR.get() == tmp_path
    app = offline.typer.Typer()
    app.command()(offline.main)
    arguments = [str(checkpoint), "--requests", "6", "--input-tokens", "12", "--output-tokens", "5", "--json"]
    done = CliRunner().invoke(app, [*arguments, *(part for change in SMALL for part in ("--set", change))])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["output_tok_s"] * report["seconds"] == pytest.approx(6 * 5, rel=0.05)
    assert report["total_tok_s"] * report["seconds"] == pytest.approx(6 * (5 + 12), rel=0.05)
    assert json.loads((tmp_path / "offline.json").read_text()) == report


def test_spread_by_hand():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert spread([4.0, 1.0, 2.0, 3.0])["median"] == 2.5
