"""CPU time of the front process per streamed token: `python -m benchmark.front_bench`, one JSON object on stdout.

Four processes: this one is supervisor and HTTP client, a front as in production, its preprocess process, and a worker
without a model that emits one token for every stream per step. What is counted is the front process alone, all its
threads, while every stream runs; the client's and the worker's costs are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mstar import __version__
from mstar.api_server.server import run_front
from mstar.communication.address import FRONT_RANK, peer_name
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import (
    EmitFrame,
    Heartbeat,
    Hello,
    PeerUp,
    Ready,
    Remove,
    Shutdown,
    StartWalk,
    ToSupervisor,
    ToWorker,
    WalkDone,
)
from mstar.communication.wire import decode_to_supervisor, decode_to_worker, schema_hash
from mstar.conductor.front_spec import FrontSpec
from mstar.config.schema import ServerConfig
from mstar.model.base import ModelSetup
from mstar.model.loader.tokenizer_files import TOKENIZER_FILE, TokenizerFiles
from mstar.model.registry import find_card
from mstar.process_log import configure_log

TEXT = "The front process turns token ids into text and writes server-sent events, one write per stream and pass. "
MAX_SEQ_LEN = 1 << 20
START_TIMEOUT_S = 60
HEARTBEAT_S = 0.25


def address(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"


def write_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=1, show_progress=False, special_tokens=["<end>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([TEXT] * 8, trainer)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    TokenizerFiles(folder, tokenizer.get_vocab_size(), chat_template=template, eos_token_ids=(0,)).write_facts()
    return tokenizer


def front(folder: Path, listen_fd: int) -> int:
    """The front process."""
    vocab_size = Tokenizer.from_file(str(folder / TOKENIZER_FILE)).get_vocab_size()
    config = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 0,
    }
    spec = FrontSpec(
        address=address(folder, "front"),
        supervisor_address=address(folder, "supervisor"),
        card=find_card("llama"),
        setup=ModelSetup(config=config, tokenizer_dir=folder, max_seq_len=MAX_SEQ_LEN),
        served_names=("bench",),
        placement={"LLM": 0},
        server=ServerConfig(),
    )
    configure_log("front", "warning")
    return run_front(spec, socket.socket(fileno=listen_fd))


def worker(folder: Path, step_ms: float) -> int:
    """Emits a token for every open request each `step_ms`, until told to shut down."""
    bus: ZmqBus[ToWorker] = ZmqBus(address(folder, "worker"), decode_to_worker)
    front_name = peer_name(FRONT_RANK)
    bus.connect(front_name, address(folder, "front"))
    hello = Hello(rank=0, incarnation=0, version=__version__, schema_hash=schema_hash(), pid=os.getpid())
    bus.send(front_name, (hello, Ready(rank=0, incarnation=0, max_total_tokens=0)))
    ids = Tokenizer.from_file(str(folder / TOKENIZER_FILE)).encode(TEXT).ids
    rows: dict[str, tuple[itertools.cycle[int], int]] = {}
    counts: dict[str, int] = {}
    step_at, beat_at = time.monotonic(), 0.0
    while True:
        now = time.monotonic()
        if now >= beat_at:
            bus.send(front_name, (Heartbeat(rank=0, incarnation=0, step_age_s=0.0, gauges={}),))
            beat_at = now + HEARTBEAT_S
        bus.wait(max(0.0, min(step_at, beat_at) - now) if rows else max(0.0, beat_at - now))
        for message in bus.receive():
            match message:
                case StartWalk(rid=rid, open=opening) if opening is not None:
                    rows[rid] = itertools.cycle(ids), opening.sampling.max_tokens
                    counts[rid] = 0
                case Remove(rid=rid):
                    rows.pop(rid, None)
                case Shutdown():
                    bus.close()
                    return 0
        if not rows or time.monotonic() < step_at:
            continue
        step_at = max(step_at + step_ms / 1e3, time.monotonic())
        tokens = [next(cycle) for cycle, _ in rows.values()]
        messages: list[Any] = [EmitFrame(src=0, rids=list(rows), signals=["token"], tokens=tokens)]
        for rid, (_, most) in list(rows.items()):
            counts[rid] += 1
            if counts[rid] >= most:
                del rows[rid]
                emits = {"token": counts[rid]}
                messages.append(WalkDone(rid=rid, partition="text", rank=0, reason="length", emits=emits))
        bus.send(front_name, messages)


class Client:
    """Streams that only count what comes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_tokens = 0
        self.num_started = 0

    async def stream(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        message = {"role": "user", "content": "hello"}
        body = json.dumps({"model": "bench", "messages": [message], "stream": True, "max_tokens": 500_000}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        has_started = False
        try:
            while data := await reader.read(65536):
                num_tokens = data.count(b'"delta":{"content":')
                self.num_tokens += num_tokens
                if num_tokens and not has_started:
                    has_started = True
                    self.num_started += 1
        finally:
            writer.close()


def cpu_s(pid: int) -> float:
    """CPU time of a process, all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, pid: int, num_streams: int, seconds: float, repeats: int) -> list[tuple[int, float]]:
    """(tokens, CPU seconds) of each repeat."""
    client = Client(port)
    tasks = [asyncio.create_task(client.stream()) for _ in range(num_streams)]
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while client.num_started < num_streams:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        samples = []
        for _ in range(repeats):
            tokens, cpu = client.num_tokens, cpu_s(pid)
            await asyncio.sleep(seconds)
            samples.append((client.num_tokens - tokens, cpu_s(pid) - cpu))
        return samples
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run(num_streams: int, step_ms: float, seconds: float, repeats: int) -> dict[str, Any]:
    """Starts the processes, measures, stops them."""
    with tempfile.TemporaryDirectory(prefix="mstar-bench-") as name:
        folder = Path(name)
        write_tokenizer(folder)
        bus: ZmqBus[ToSupervisor] = ZmqBus(address(folder, "supervisor"), decode_to_supervisor)
        bus.connect("front", address(folder, "front"))
        bus.connect("worker", address(folder, "worker"))
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "benchmark.front_bench", "--folder", name, "--step-ms", str(step_ms)]
        fd = listener.fileno()
        children = [
            subprocess.Popen([*command, "--role", "front", "--listen-fd", str(fd)], pass_fds=(fd,)),
            subprocess.Popen([*command, "--role", "worker"]),
        ]
        listener.close()
        try:
            bus.send("front", (PeerUp(0, 0, address(folder, "worker")),))
            deadline = time.monotonic() + START_TIMEOUT_S
            while not any(isinstance(message, Ready) for message in bus.receive()):
                if time.monotonic() > deadline or any(child.poll() is not None for child in children):
                    raise SystemExit("the front did not become ready")
                bus.wait(1.0)
            samples = asyncio.run(measure(port, children[0].pid, num_streams, seconds, repeats))
            bus.send("front", (Shutdown(),))
            bus.send("worker", (Shutdown(),))
            for child in children:
                child.wait(20)
        finally:
            for child in children:
                child.kill()
                child.wait()
            bus.close()
    costs = [cpu / tokens * 1e6 for tokens, cpu in samples]
    return {
        "streams": num_streams,
        "tokens_per_s": round(sum(tokens for tokens, _ in samples) / (seconds * repeats)),
        "cpu_us_per_token": round(statistics.median(costs), 2),
        "spread_us": round(max(costs) - min(costs), 2),
        "repeats": repeats,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time of the front process per streamed token")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=15.0, help="time between two tokens of a stream")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--role", choices=("front", "worker"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "front":
        return front(arguments.folder, arguments.listen_fd)
    if arguments.role == "worker":
        return worker(arguments.folder, arguments.step_ms)
    print(json.dumps(run(arguments.streams, arguments.step_ms, arguments.seconds, arguments.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
