"""Which device executor decodes fastest on a CPU: `python -m benchmark.cpu_executor`.

The same engine and forward three ways, alternating:

- inline: the plain loop, forward and host work one after the other on the main thread;
- threaded: the async loop on the main thread, forwards on a second one (`ThreadedExecutor`);
- swapped: forwards on the main thread, the async loop on a second one.

The last line is JSON: decode rates and their ratios to inline, run by run.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmark.local_decode import LocalDecoder, Rates, open_smollm2, random_prompts
from benchmark.results import machine, spread, write_result
from mstar.platforms.executor import DeviceEvent, InlineExecutor, ThreadedExecutor, Work

MODES = ("inline", "threaded", "swapped")


class MainThreadExecutor:
    """Work is submitted by another thread and runs on the one that calls `serve`."""

    overlaps = True

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[DeviceEvent, Work] | None] = queue.SimpleQueue()

    def submit(self, work: Work) -> DeviceEvent:
        event = DeviceEvent()
        self._queue.put((event, work))
        return event

    def close(self) -> None:
        """Nothing to end: `serve` returns when told to."""

    def serve(self, loop: Callable[[], Rates]) -> Rates:
        """Run `loop` on a thread of its own, and here the work that it submits, until it returns."""
        results: list[Rates] = []

        def run() -> None:
            try:
                results.append(loop())
            finally:
                self._queue.put(None)

        thread = threading.Thread(target=run, name="loop")
        thread.start()
        while (item := self._queue.get()) is not None:
            event, work = item
            event.run(work)
        thread.join()
        if not results:
            raise RuntimeError("the loop ended with an error")
        return results[0]


class Contenders:
    """An engine per mode, on one set of settings."""

    def __init__(self, threads: int, max_rows: int, max_seq_len: int) -> None:
        deployment = open_smollm2(threads, max_rows, max_seq_len)
        self.weights = deployment.config.checkpoint or deployment.card.default_checkpoint or "random"
        self._swapped = MainThreadExecutor()
        self._decoders = {
            "inline": LocalDecoder(deployment, InlineExecutor()),
            "threaded": LocalDecoder(deployment, ThreadedExecutor(prepare=lambda: torch.set_num_threads(threads))),
            "swapped": LocalDecoder(deployment, self._swapped),
        }
        self.vocab_size = self._decoders["inline"].instance.model.vocab_size()

    def run(self, mode: str, prompts: np.ndarray, output_tokens: int) -> Rates:
        decoder = self._decoders[mode]
        if mode == "swapped":
            return self._swapped.serve(lambda: decoder.run(prompts, output_tokens))
        return decoder.run(prompts, output_tokens)

    def close(self) -> None:
        for decoder in self._decoders.values():
            decoder.close()


def main(
    rows: Annotated[str, typer.Option(help="Row counts.")] = "1,8,32",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a forward.")] = 2,
    input_tokens: Annotated[int, typer.Option(min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(min=2)] = 48,
) -> None:
    """Compare the executors on this machine."""
    torch.set_num_threads(threads)
    widths = [int(width) for width in rows.split(",")]
    contenders = Contenders(threads, max(widths), input_tokens + output_tokens)
    report: dict[str, Any] = {"machine": machine(), "weights": contenders.weights, "rows": {}}
    for width in widths:
        prompts = random_prompts(width, input_tokens, contenders.vocab_size, seed=width)
        for mode in MODES:
            contenders.run(mode, prompts, 4)
        rates: dict[str, list[float]] = defaultdict(list)
        for repeat in range(repeats):
            for offset in range(len(MODES)):
                mode = MODES[(repeat + offset) % len(MODES)]
                rates[mode].append(contenders.run(mode, prompts, output_tokens).decode_tok_s)
        report["rows"][width] = {
            mode: {
                "decode_tok_s": spread(rates[mode]),
                "to_inline": spread([a / b for a, b in zip(rates[mode], rates["inline"], strict=True)]),
            }
            for mode in MODES
        }
        line = "  ".join(
            f"{mode} {report['rows'][width][mode]['decode_tok_s']['median']:8.1f} tok/s"
            f" ({report['rows'][width][mode]['to_inline']['median']:.2f})"
            for mode in MODES
        )
        print(f"{width:>4} rows: {line}", flush=True)
    contenders.close()
    write_result("cpu_executor", report)
    print(json.dumps(report))


if __name__ == "__main__":
    typer.run(main)
