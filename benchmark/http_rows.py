"""The rows of `benchmark.engine_bench` that go over HTTP: a real `mstar serve` in processes of its own, and a client in
another. This process waits, and reads what CPU time the others took."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from benchmark.engine_runs import Shape, Times, report
from benchmark.front_bench import cpu_s
from benchmark.local_server import ROOT, LocalServer, serving
from benchmark.results import spread
from mstar.model.loader.tokenizer_files import TOKENIZER_FILE

START_TIMEOUT_S = 400


@contextmanager
def model_server(target: str, overrides: Sequence[str], vocab_size: int) -> Iterator[LocalServer]:
    """A server of `target`, a model that draws its weights itself."""
    with tempfile.TemporaryDirectory(prefix="mstar-bench-") as directory:
        write_text_side(Path(directory), vocab_size)
        settings = [*overrides, f"checkpoint={directory}"]
        with serving(target, settings, start_timeout_s=START_TIMEOUT_S) as server:
            yield server


def measure(server: LocalServer, shape: Shape, vocab_size: int, repeats: int) -> dict[str, Any]:
    """An entry of `rows`. The CPU times per token are those of whole processes, over all waves and the one before."""
    command = [sys.executable, "-m", "benchmark.http_waves", "--url", server.url, "--vocab", str(vocab_size)]
    command += ["--rows", str(shape.conc), "--inlen", str(shape.inlen), "--outlen", str(shape.outlen)]
    command += ["--waves", str(repeats), "--sampling", json.dumps(shape.sampling._asdict())]
    before = _cpu_us(server)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    after = _cpu_us(server)
    found = json.loads(done.stdout)
    times = [Times(wave["first_s"], wave["all_first_s"], wave["end_s"]) for wave in found["waves"]]
    costs = {name: round((after[name] - before[name]) / found["tokens"], 2) for name in after}
    costs["client"] = round(spread([wave["client_cpu_us"] for wave in found["waves"]])["median"], 2)
    return {**report(shape, times, via="http"), "cpu_us_per_token": costs}


def _cpu_us(server: LocalServer) -> dict[str, float]:
    """The supervisor starts the front first, then the worker."""
    task = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    front, worker, *_ = sorted(int(pid) for pid in task.read_text().split())
    return {"front": cpu_s(front) * 1e6, "worker": cpu_s(worker) * 1e6}


def write_text_side(directory: Path, vocab_size: int) -> None:
    """A checkpoint that has a tokenizer and no weights, for a model that draws them itself. Every token is a word with
    a space before it, so that each that is generated makes a piece of text; the way back is not needed."""
    words = {f"\u0120w{index}": index for index in range(vocab_size)}  # U+0120 stands for a space
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / TOKENIZER_FILE))
    save_file({"none": torch.zeros(1)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
