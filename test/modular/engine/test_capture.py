"""Captured walks: which bucket a step takes, what its padding holds, when it runs eagerly, what cannot be captured."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_rig import GREEDY, EngineRig, prompts, take
from support.tiny_decoder import NODE, TinyDecoder

from mstar.communication.messages import SamplingParams
from mstar.engine.bucket_capture import capture_sizes
from mstar.engine.capture_failure import CaptureError
from mstar.engine.cuda_graph_config import (
    BatchedCudaGraphConfig,
    BucketKey,
    CudaGraphConfig,
    PackedCudaGraphConfig,
    StaticInput,
)
from mstar.engine.cuda_graph_runner import Bucket, GraphHandle, GraphRunner
from mstar.engine.engine_config import EngineConfig
from mstar.engine.staging import DeviceBlock, LayoutCache, StepShape
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeOutputs, NodeSubmodule, RowColumns
from mstar.kernels import ops

PROMPTS = prompts(5, seed=9)


def test_the_smallest_bucket_that_holds_the_rows():
    runner = GraphRunner()
    layout = LayoutCache(()).layout(StepShape(0, 0, 0))
    for walk, info, size in (("a", None, 8), ("a", None, 2), ("a", "x", 4), ("b", None, 1)):
        runner.add(Bucket(BucketKey(walk, size, size, 1, info), layout, DeviceBlock(torch.device("cpu")), {}))

    def size(walk: str, info: str | None, rows: int) -> int | None:
        bucket = runner.lookup(walk, info, rows)
        return None if bucket is None else bucket.key.bs

    assert [size("a", None, rows) for rows in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, None]
    assert size("a", "x", 3) == 4 and size("b", None, 2) is None and size("c", None, 1) is None
    assert runner.num_buckets == 4


def test_a_graph_is_captured_before_it_is_replayed():
    with pytest.raises(RuntimeError, match="captured before"):
        GraphHandle().replay()


def test_what_cannot_be_recorded_is_replayed_as_python():
    static, seen = torch.zeros(2), []

    def forward() -> None:
        seen.append(static.sum().item())  # a tape cannot hand values to Python

    for choice in ("torch", "auto"):
        ops.select_kernels(choice)
        graph = GraphHandle()
        graph.capture(forward)
        static += 1
        graph.replay()
        assert not graph.is_recorded
        assert seen[-1] == static.sum().item()


class Flow(NodeSubmodule):
    """A node without tokens: `latent` in, `latent` out, `mean` to the host. `leaky` lets padding reach real rows."""

    host_signals = frozenset({"mean"})
    leaky = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        return NodeBatch(np.zeros(len(rows.handles), np.int32))

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        latent = inputs.tensors["latent"]
        self.seen.append(latent.clone())
        made = latent * 2 + inputs.iterations[:, None].float()
        if self.leaky:
            made = made + 0 * latent.sum()
        return {"latent": made, "mean": made.mean(-1)}

    def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
        return (BatchedCudaGraphConfig("flow", static_inputs=(StaticInput("latent", (3,), "float32"),)),)


def flow_rig(**config: Any) -> tuple[EngineRig, Flow]:
    node = Flow()
    return EngineRig({"flow": node}, (), **config), node


def run_flow(rig: EngineRig, values: torch.Tensor | list[torch.Tensor]) -> tuple[np.ndarray, list[torch.Tensor]]:
    ids = rig.store.put_batch(values).tolist() if isinstance(values, torch.Tensor) else list(map(rig.store.put, values))
    step = rig.arm(take("flow", range(len(ids)), "flow", latent=ids))
    rig.engine.submit(step)
    rig.engine.finish(step)
    assert step.error is None, step.error
    return step.host("mean").copy(), rig.store.gather_list(step.outputs.ids_of(step.parts[0])["latent"])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_static_inputs_are_padded_with_nan_that_reaches_nobody(num_rows: int):
    rig, node = flow_rig(capture_sizes=(2, 4))
    node.seen.clear()
    values = torch.randn(num_rows, 3)
    for _ in range(2):
        mean, latents = run_flow(rig, values)
        np.testing.assert_allclose(mean, (values * 2).mean(-1), rtol=1e-6)
        assert torch.equal(torch.stack(latents), values * 2)
    size = {1: 2, 2: 2, 3: 4, 4: 4, 5: 5}[num_rows]
    assert [tuple(latent.shape) for latent in node.seen] == [(size, 3)] * 2
    assert node.seen[0][num_rows:].isnan().all()
    node.leaky = True
    assert np.isnan(run_flow(rig, values)[0]).all() == (size > num_rows)  # such a bug shows


def test_inputs_that_are_not_as_declared_run_eagerly():
    rig, node = flow_rig(capture_sizes=(4,))
    node.seen.clear()
    run_flow(rig, torch.randn(2, 3))
    run_flow(rig, torch.randn(2, 5))
    run_flow(rig, torch.randn(2, 3, dtype=torch.float64))
    assert [tuple(latent.shape) for latent in node.seen] == [(4, 3), (2, 5), (2, 3)]


SAMPLED = SamplingParams(
    temperature=1.0,
    seed=3,
    max_tokens=20,
    frequency_penalty=0.5,
    bias_ids=(3,),
    bias_values=(1.0,),
    min_tokens=9,
    stop_token_ids=(2,),
    num_logprobs=3,
)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_rows_that_sample_draw_behind_the_replay(kernels: str):
    """Beside greedy rows and alone, in a bucket with padding: tokens and logprobs are those of eager steps."""
    ops.select_kernels(kernels)
    found = []
    for sizes in ((4,), ()):
        rig = EngineRig(capture_sizes=sizes)
        rig.open(0, PROMPTS[0])
        for handle in (1, 2):
            rig.open(handle, PROMPTS[handle], SAMPLED)
        rig.prefill(0, 1, 2)
        rig.decoder.batch_sizes.clear()
        logprobs: list[float] = []
        for rows in ((0,), (0, 1), (2, 0, 1), (1,), (2, 0), (1, 2)):
            step = rig.decode(*rows)
            if step.outputs.logprobs is not None:
                asked = [step.outputs.logprobs[place] for place in range(len(rows))]
                logprobs += [value for each in asked if each for value in (each.logprob, *each.top_logprobs)]
        if kernels == "torch":
            assert rig.decoder.batch_sizes == ([4] * 6 if sizes else [1, 2, 3, 1, 2, 2])
        assert rig.out[0] == rig.decoder.reference_greedy(PROMPTS[0], 5)
        found.append((rig.out, logprobs))
        rig.close_all()
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) == 7 * 4
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)


def test_the_reference_backend_is_not_captured_and_equals_the_other():
    outputs = []
    for backend, size in (("torch_ref", 3), ("cpu", 4)):
        rig = EngineRig(capture_sizes=(4,), backends={"attn": backend})
        for handle in range(3):
            rig.open(handle, PROMPTS[handle])
        rig.generate(range(3), 9)
        assert rig.decoder.batch_sizes[-1] == size
        outputs.append(rig.out)
    assert outputs[0] == outputs[1]


def test_sizes_of_the_declaration_and_of_the_deployment():
    class Declared(TinyDecoder):
        def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
            return (BatchedCudaGraphConfig("decode", capture_batch_sizes=(3, 1, 99)),)

    progress: list[tuple[str, int, int]] = []
    node = Declared()
    rig = EngineRig({NODE: node}, capture_sizes=(2,))
    assert node.batch_sizes == [8, 3, 1]  # largest first; of max_rows what would be above
    rig.engine.capture(lambda *state: progress.append(state))
    assert progress[0] == ("capture LLM decode", 0, 3) and progress[-1] == ("capture", 3, 3)


def test_the_platform_captures_what_it_can_record(kernels: str):
    rig = EngineRig(capture_sizes=None, max_rows=12)
    assert rig.engine._nodes[NODE].graphs.num_buckets == (10 if kernels == "native" else 0)  # 1 to 8, 10, 12
    for handle in range(3):
        rig.open(handle, PROMPTS[handle])
    rig.generate(range(3), 9)
    for handle in range(3):
        assert rig.out[handle] == rig.decoder.reference_greedy(PROMPTS[handle], 9)


def test_warm_up_runs_every_declared_walk_and_keeps_nothing():
    rig = EngineRig()
    rig.engine.warmup()
    assert rig.decoder.batch_sizes == [1]
    assert rig.engine._nodes[NODE].graphs.num_buckets == 0
    rig.check()
    rig.open(0, PROMPTS[0], GREEDY)
    rig.generate([0], 6)
    assert rig.out[0] == rig.decoder.reference_greedy(PROMPTS[0], 6)


def test_a_capture_that_fails_ends_start_up_by_name():
    class Unready(TinyDecoder):
        def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
            raise RuntimeError("no kernel for this shape")

    with pytest.raises(CaptureError, match="LLM 'decode' at 2 rows failed: no kernel"):
        EngineRig({NODE: Unready()}, capture_sizes=(2,))

    class Other(TinyDecoder):
        def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
            return (CudaGraphConfig("decode", capture_batch_sizes=(1,)),)

    with pytest.raises(CaptureError, match="CudaGraphConfig of walk 'decode'"):
        EngineRig({NODE: Other()}, capture_sizes=(1,))


class _Recording(GraphHandle):
    """Where graphs are an accelerator's: while one is recorded, reading a value raises."""

    def capture(self, run: Callable[[], None], memory: object = None) -> None:
        run()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", self._refuse)
            run()
        self._run, self.is_recorded = run, True

    @staticmethod
    def _refuse(_: torch.Tensor) -> None:
        raise RuntimeError("not permitted when the stream is capturing")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar.engine.cuda_graph_runner.GraphHandle.capture", _Recording.capture)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("config", [{}, {"capture_sizes": (4,)}, {"capture_sizes": (4,), "capture_tokens": (16,)}])
def test_a_backend_that_cannot_be_captured_serves_eagerly(config: dict[str, Any], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="mstar.engine.bucket_capture"):
        rig = EngineRig(backends={"attn": "torch_ref"}, **config)
    rig.engine.warmup()
    assert rig.engine._nodes[NODE].graphs.num_buckets == 0
    assert any("'decode' runs eagerly" in line for line in caplog.messages) == bool(config)
    rig.open(0, PROMPTS[0])
    rig.generate([0], 6)
    assert rig.out[0] == rig.decoder.reference_greedy(PROMPTS[0], 6)


def test_nothing_is_captured_where_the_deployment_says_so():
    class Declared(TinyDecoder):
        def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
            return (BatchedCudaGraphConfig("decode", capture_batch_sizes=(3,)), PackedCudaGraphConfig("prefill"))

    node = Declared()
    rig = EngineRig({NODE: node}, capture_sizes=(), capture_tokens=())
    assert node.batch_sizes == [] and rig.engine._nodes[NODE].graphs.num_buckets == 0


class _Failing(TinyDecoder):
    """Fails with `error`, and the recording that it ends with another."""

    error: Exception = RuntimeError("no kernel for this shape")

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        try:
            raise self.error
        finally:
            raise RuntimeError("the recording was ended by an error")


@pytest.mark.parametrize(
    "error", [RuntimeError("no kernel for this shape"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_failure_says_why_and_what_helps(error: Exception):
    node = _Failing()
    node.error = error
    with pytest.raises(CaptureError) as caught:
        EngineRig({NODE: node}, capture_sizes=(2,))
    said = str(caught.value)
    assert said.startswith("capture of LLM 'decode' at 2 rows failed: the recording was ended by an error (after ")
    assert str(error) in said
    if isinstance(error, torch.OutOfMemoryError):
        assert all(key in said for key in ("memory_fraction", "num_pages", "capture.batch_sizes"))
    else:
        assert "capture.enabled: false" in said
    with pytest.raises(CaptureError, match=r"^warm-up of LLM 'decode' at 1 rows failed: ") as caught:
        EngineRig({NODE: node}).engine.warmup()
    assert "capture." not in str(caught.value)  # would not help


def test_steps_that_a_chunk_makes_longer_than_they_should_be_are_captured():
    """Eight rows that decode beside a chunk of 64, where steps should have 64 tokens: 72."""
    declared = PackedCudaGraphConfig("prefill")

    def tokens(align: int, **config: Any) -> list[int]:
        settings = {"max_rows": 9, "max_seq_len": 64, "capacity": 9, **config}
        return sorted({size.tokens or 0 for size in capture_sizes(declared, EngineConfig(**settings), align)})

    assert tokens(64, capture_tokens=(32, 64)) == [32, 64, 72]
    assert tokens(1, capture_tokens=(16,)) == [16, 24]
    assert tokens(64, capture_tokens=(64, 72)) == [64, 72]
    assert tokens(64, capture_tokens=(64, 200)) == [64, 200]  # the chunk is cut shorter
    assert tokens(64, capture_tokens=(64,), max_rows=256) == [64, 128, 256, 319]
    assert tokens(64) == []
