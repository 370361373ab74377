"""Time of each CUDA kernel at the sizes of a decode step, in microseconds per call.

    python -m benchmark.kernel_bench [--rows 1,8,32,64,128] [--parts draws,..] [--context 384] [--json FILE]
    python -m benchmark.kernel_bench --products

Shapes of Qwen3.5-0.8B. Calls are captured in a CUDA graph, those that read weights, pages or states each over memory of
its own as the layers of a model have it, and timed with events: the median of 5 rounds of 20 replays. Runs on one
device and checks nothing; the tests do.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mstar.kernels import ops
from mstar.kernels.fused_norms import AddNorm, GatedNorm, HeadNorms
from mstar.kernels.triton import products, tile_products
from mstar.kernels.triton.kernels import TritonKernels

HIDDEN, WIDTH, VOCAB, PAGE = 1024, 3584, 248_320, 64
HEADS, KV_HEADS, HEAD_DIM, HALF = 8, 2, 256, 32
DELTA_HEADS, DELTA_DIM, CONV_KERNEL = 16, 128, 4
CHANNELS = 3 * DELTA_HEADS * DELTA_DIM
PRODUCTS = {
    "delta_in": (CHANNELS + DELTA_HEADS * DELTA_DIM + 2 * DELTA_HEADS, HIDDEN),
    "qkv_gate": ((2 * HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "out": (HIDDEN, 2048),
    "gate_up": (2 * WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
LAYERS = 18


def time_us(calls: list[Callable[[], object]]) -> float:
    """Microseconds per call of a graph of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    rounds: list[float] = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(end) * 1e3 / 20 / len(calls))
    return statistics.median(rounds[1:])


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def row_kernels(rows: int) -> dict[str, float]:
    x, residual, weight = normal(rows, HIDDEN), normal(rows, HIDDEN), normal(HIDDEN)
    gate_up, wide = normal(rows, 2 * WIDTH), normal(rows, (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM)
    mixed, gate = normal(rows, HEADS * HEAD_DIM), wide[:, -HEADS * HEAD_DIM :]
    head_weight, table = normal(DELTA_DIM), normal(VOCAB, HIDDEN)
    ids = torch.randint(0, VOCAB, (rows,), device="cuda")
    logits = [normal(rows, VOCAB, dtype=torch.float32) for _ in range(4)]
    return {
        "add_norm": time_us([lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-6, True)] * 40),
        "silu_and_mul": time_us([lambda: ops.silu_and_mul(gate_up)] * 40),
        "sigmoid_mul": time_us([lambda: ops.sigmoid_mul(mixed, gate)] * 40),
        "gated_norm": time_us([lambda: ops.gated_rms_norm(mixed, gate, head_weight, 1e-6, out=mixed)] * 40),
        "embedding": time_us([lambda: ops.embedding(ids, table)] * 40),
        "greedy": time_us([lambda each=each: ops.greedy(each) for each in logits]),
    }


def product_kernels(rows: int) -> dict[str, float]:
    times: dict[str, float] = {}
    for name, (num_out, num_in) in PRODUCTS.items():
        x = normal(rows, num_in)
        layers = [ops.pack_linear(normal(num_out, num_in)) for _ in range(LAYERS)]
        times[name] = time_us([lambda each=each, x=x: ops.linear(x, each) for each in layers])
        if num_out == HIDDEN:
            then = AddNorm(normal(rows, HIDDEN), normal(HIDDEN), 1e-6, True)
            times[name + "_norm"] = time_us([
                lambda each=each, x=x, then=then: ops.linear_add_norm(x, each, then) for each in layers
            ])  # fmt: skip
    x, layers = normal(rows, HIDDEN), [ops.pack_linear(normal(2 * WIDTH, HIDDEN)) for _ in range(LAYERS)]
    times["gate_up_silu"] = time_us([lambda each=each: ops.gated_linear(x, each) for each in layers])
    head, x = ops.pack_linear(normal(VOCAB, HIDDEN)), normal(rows, HIDDEN)
    times["logits"] = time_us([lambda: ops.linear(x, head, out_dtype=torch.float32)] * 2)
    return times


def compare_products() -> None:
    """Products by Triton and by the library: where one overtakes the other. Those of 1,024 outputs come in parts."""
    for name, (num_out, num_in) in {**PRODUCTS, "logits": (VOCAB, HIDDEN)}.items():
        weights = [normal(num_out, num_in) for _ in range(2 if num_out == VOCAB else LAYERS)]
        times: dict[int, tuple[float, float]] = {}
        for rows in (1, 2, 8, 32, 64, 128):
            x, out = normal(rows, num_in), normal(rows, num_out)
            ours = time_us([lambda w=w, x=x, out=out: _product(x, w, out) for w in weights])
            library = time_us([lambda w=w, x=x, out=out: torch.mm(x, w.t(), out=out) for w in weights])
            times[rows] = (round(ours, 2), round(library, 2))
        print(f"{name} {num_out} x {num_in}, (ours, library) by rows: {times}", flush=True)


def _product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    if x.shape[0] == 1:
        return products.row_product(x, weight, None, out)
    if weight.shape[0] == HIDDEN:
        return tile_products.product_parts(x, weight)
    return tile_products.tile_product(x, weight, out)


def attention_kernels(rows: int, context: int) -> dict[str, float]:
    num_pages = -(-context // PAGE)
    layers = [normal(2, rows * num_pages, PAGE, KV_HEADS, HEAD_DIM) for _ in range(6)]
    table = torch.randperm(rows * num_pages, device="cuda").int().view(rows, num_pages)
    lens = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    wide = normal(rows, (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM)
    qkv = wide[:, : (HEADS + 2 * KV_HEADS) * HEAD_DIM]
    q = qkv.view(rows, -1, HEAD_DIM)[:, :HEADS]
    norms = HeadNorms(normal(HEAD_DIM), normal(HEAD_DIM), 1e-6, True)
    positions, slots = lens - 1, table[:, -1] * PAGE + (context - 1) % PAGE
    cos, sin = normal(context, HALF, dtype=torch.float32), normal(context, HALF, dtype=torch.float32)
    return {
        "rope_write_kv": time_us([
            lambda k=k, v=v: ops.rope_write_kv(qkv, positions, cos, sin, slots, k, v, HEADS) for k, v in layers
        ]),
        "norms_rope_write_kv": time_us([
            lambda k=k, v=v: ops.rope_write_kv(qkv, positions, cos, sin, slots, k, v, HEADS, norms=norms)
            for k, v in layers
        ]),
        f"attend_{context}": time_us([
            lambda k=k, v=v: ops.paged_attend(q, k, v, table, lens, starts, HEAD_DIM**-0.5) for k, v in layers
        ]),
    }  # fmt: skip


def prompt_kernels(rows: int, context: int) -> dict[str, float]:
    """Prompts of `context` tokens."""
    num_pages = -(-context // PAGE)
    k, v = normal(2, rows * num_pages, PAGE, KV_HEADS, HEAD_DIM)
    table = torch.randperm(rows * num_pages, device="cuda").int().view(rows, num_pages)
    lens = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, rows * context + 1, context, dtype=torch.int32, device="cuda")
    q = normal(rows * context, HEADS, HEAD_DIM)
    return {
        f"attend_prompts_{context}": time_us([
            lambda: ops.paged_attend(q, k, v, table, lens, starts, HEAD_DIM**-0.5)
        ] * 4)
    }  # fmt: skip


def delta_kernels(rows: int) -> dict[str, float]:
    wide = normal(rows, CHANNELS + DELTA_HEADS * DELTA_DIM + 2 * DELTA_HEADS)
    qkv, b, a = wide[:, :CHANNELS], wide[:, -2 * DELTA_HEADS : -DELTA_HEADS], wide[:, -DELTA_HEADS:]
    weight = normal(CHANNELS, CONV_KERNEL)
    a_log, dt_bias = normal(DELTA_HEADS, dtype=torch.float32), normal(DELTA_HEADS, dtype=torch.float32)
    conv = [normal(rows + 1, CONV_KERNEL - 1, CHANNELS) for _ in range(LAYERS)]
    slots = torch.randperm(rows, device="cuda").int() + 1
    known, starts = torch.ones_like(slots), torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    norm = GatedNorm(wide[:, CHANNELS : CHANNELS + DELTA_HEADS * DELTA_DIM], normal(DELTA_DIM), 1e-6)
    times: dict[str, float] = {}
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        states = [normal(rows + 1, DELTA_HEADS, DELTA_DIM, DELTA_DIM, dtype=dtype) for _ in range(LAYERS)]
        times[f"gated_delta_{name}"] = time_us([
            lambda c=c, s=s: ops.gated_delta(
                qkv, b, a, weight, a_log, dt_bias, c, s, slots, known, starts, DELTA_HEADS, max_tokens=1
            )
            for c, s in zip(conv, states, strict=True)
        ])  # fmt: skip
        times[f"gated_delta_and_norm_{name}"] = time_us([
            lambda c=c, s=s: ops.gated_delta(
                qkv, b, a, weight, a_log, dt_bias, c, s, slots, known, starts, DELTA_HEADS, max_tokens=1, norm=norm
            )
            for c, s in zip(conv, states, strict=True)
        ])  # fmt: skip
    return times


def draw_kernels(rows: int) -> dict[str, float]:
    """From largest tokens to random ones: logits of random weights, where all tokens are alike, and others with most
    tokens far below the largest, as a trained model has them."""
    kernels = TritonKernels().sampling
    flat = normal(rows, VOCAB, dtype=torch.float32)
    peaked = 4 * flat
    peaked[:, ::1000] += 20 * torch.rand(rows, -(-VOCAB // 1000), device="cuda")
    every, uniforms = torch.arange(rows, device="cuda"), torch.rand(rows, device="cuda")
    times: dict[str, float] = {}
    for how, logits in (("flat", flat), ("peaked", peaked)):
        largest = logits.argmax(1).int()
        for name, top_k, top_p in (("", 0, 1.0), ("_top_p", 0, 0.95), ("_top_k", 20, 1.0), ("_both", 20, 0.95)):
            table = torch.tensor([[0.8, top_k, top_p, 0, 1, 0, 0]] * rows, dtype=torch.float32, device="cuda")
            tokens = largest.clone()

            def draw(
                logits: Tensor = logits, table: Tensor = table, tokens: Tensor = tokens, largest: Tensor = largest
            ) -> None:
                tokens.copy_(largest)
                kernels.draw_tokens(logits, tokens, every, every, uniforms, table, cuts=True)

            times[f"draw_{how}{name}"] = time_us([draw] * 4)
    return times


PARTS: Mapping[str, Callable[[int, int], dict[str, float]]] = {
    "rows": lambda rows, _: row_kernels(rows),
    "products": lambda rows, _: product_kernels(rows),
    "attention": attention_kernels,
    "prompts": prompt_kernels,
    "delta": lambda rows, _: delta_kernels(rows),
    "draws": lambda rows, _: draw_kernels(rows),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64,128")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--products", action="store_true", help="only compare products with the library's")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.products:
        compare_products()
        return
    results: dict[int, dict[str, float]] = {}
    for rows in map(int, args.rows.split(",")):
        times = [PARTS[part](rows, args.context) for part in args.parts.split(",")]
        results[rows] = {name: round(us, 2) for part in times for name, us in part.items()}
        print(f"{rows} rows: {results[rows]}", flush=True)
    if args.json is not None:
        versions = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "context": args.context}
        args.json.write_text(json.dumps(versions | {"us_per_call_by_rows": results}, indent=1))


if __name__ == "__main__":
    main()
