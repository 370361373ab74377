"""Logits of the Qwen3.5 node inside the real engine against transformers: batches, cut prompts, 64 cached steps."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.engine_rig import EngineRig, portion, take
from support.tiny_qwen3_5 import VARIANTS, Variant, build_reference, save_checkpoint, variant
from torch import Tensor, nn

from mstar.communication.messages import SamplingParams
from mstar.kernels import ops
from mstar.model.base import ModelSetup
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.qwen3_5.model import LANGUAGE, Qwen35Model
from mstar.model.registry import build_model, build_submodule, find_card
from mstar.model.submodule_context import SubmoduleContext

CARD = find_card("qwen3_5")
TOLERANCE = 1e-4
STEPS = 64
LENGTHS = (70, 1, 64, 130, 200)
PARAMS = SamplingParams(temperature=0.0, max_tokens=STEPS + 1)


class Recorder(nn.Module):
    """Between the network and the sampler: keeps the logits that pass."""

    def __init__(self, sampler: nn.Module) -> None:
        super().__init__()
        self.sampler = sampler
        self.seen: list[Tensor] = []

    def forward(self, logits: Tensor) -> Tensor:
        self.seen.append(logits.clone())
        return self.sampler(logits)

    def stopped(self, handles, tokens):
        return self.sampler.stopped(handles, tokens)


class Run:
    """One engine with the node, whose logits are kept by request."""

    def __init__(self, v: Variant, directory, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        self.reference = build_reference(v)
        checkpoint = resolve_checkpoint(str(save_checkpoint(self.reference, directory)), cache_dir=directory)
        setup = ModelSetup(checkpoint.config(), None, 320)
        model = build_model(CARD, setup)
        assert isinstance(model, Qwen35Model)
        node = build_submodule(CARD, LANGUAGE, SubmoduleContext(setup, checkpoint, dtype, torch.device("cpu")))
        self.recorder = node.sampler = Recorder(node.sampler)
        specs = [spec for spec in model.get_node_resources() if spec.node == LANGUAGE]
        inputs = {LANGUAGE: {"prefill": frozenset[str](), "decode": frozenset({"token"})}}
        self.rig = EngineRig({LANGUAGE: node}, specs, max_seq_len=320, walk_inputs=inputs, dtype=dtype, **config)
        generator = torch.Generator().manual_seed(3)
        self.prompts = [torch.randint(3, 139, (n,), generator=generator).tolist() for n in LENGTHS]
        self.logits: dict[int, list[Tensor]] = {}

    def open(self, *rows: int) -> None:
        for row in rows:
            self.rig.open(row, self.prompts[row], PARAMS)
            self.logits[row] = []

    def step(self, *parts) -> list[int]:
        """One step; returns the rows that are not at the end of their prompt."""
        self.recorder.seen.clear()
        step = self.rig.run(*parts)
        assert not step.failed and step.error is None, (step.failed, step.error)
        (logits,) = self.recorder.seen
        going = [False] * step.num_rows if step.unfinished is None else step.unfinished.tolist()
        for row, own, goes_on in zip(step.handles.tolist(), logits, going, strict=False):
            if not goes_on:
                self.logits[row].append(own)
        return [row for row, goes_on in zip(step.handles.tolist(), going, strict=True) if goes_on]

    def prefill(self, rows: Sequence[int], beside: Sequence[int] = (), chunk: int = 1000) -> int:
        """Until all `rows` have drawn; rows `beside` decode in the same steps. Returns the number of steps."""
        num_steps = 0
        while rows:
            decode = [take("decode", beside)] if beside else []
            rows = self.step(*decode, portion("prefill", dict.fromkeys(rows, chunk)))
            num_steps += 1
        return num_steps

    def compare(self) -> tuple[float, float]:
        """``(largest relative error of a row's logits, share of its tokens that the reference would choose)``, each
        over what the row has drawn itself."""
        errors, agreed = [], []
        for row, logits in self.logits.items():
            ids = torch.tensor([self.prompts[row] + self.rig.out[row][:-1]])
            expected = self.reference(ids).logits[0, len(self.prompts[row]) - 1 :]
            errors.append(float((torch.stack(logits) - expected).norm() / expected.norm()))
            agreed += (expected.argmax(-1) == torch.tensor(self.rig.out[row])).tolist()
        return max(errors), sum(agreed) / len(agreed)

    def check(self) -> None:
        for row, logits in self.logits.items():
            tokens = self.rig.out[row]
            assert len(tokens) == len(logits)
            ids = torch.tensor([self.prompts[row] + tokens[:-1]])
            expected = self.reference(ids).logits[0, len(self.prompts[row]) - 1 :]
            ours = torch.stack(logits)
            assert (ours - expected).norm() <= TOLERANCE * expected.norm(), row
            largest = float(expected.abs().max())
            torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=TOLERANCE * largest, msg=str(row))
            assert tokens == expected.argmax(-1).tolist()
        outputs = [tuple(self.rig.out[row][:4]) for row in self.logits]
        assert len(set(outputs)) == len(outputs), "rows that look alike would hide rows that are mixed up"


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
@torch.no_grad()
def test_batched_prefill_and_64_cached_steps(v: Variant, tmp_path):
    run = Run(v, tmp_path)
    rows = range(4)
    run.open(*rows)
    run.prefill(rows)
    for _ in range(STEPS):
        run.step(take("decode", rows))
    run.check()
    run.rig.close_all()


@torch.no_grad()
def test_states_in_bf16_cost_little(tmp_path):
    run = Run(variant("dense"), tmp_path, state_dtypes={"state": torch.bfloat16})
    rows = range(4)
    run.open(*rows)
    run.prefill(rows)
    for _ in range(STEPS):
        run.step(take("decode", rows))
    error, agreed = run.compare()
    assert TOLERANCE < error < 0.1 and agreed > 0.9
    run.rig.close_all()


@pytest.mark.parametrize("name", ["dense", "experts_with_tower"])
@torch.no_grad()
def test_prompts_in_pieces_beside_rows_that_decode(name: str, tmp_path):
    run = Run(variant(name), tmp_path)
    run.open(0, 4, 2)
    run.prefill([0], chunk=64)
    assert run.prefill([4], beside=[0], chunk=64) == 4
    run.prefill([2], beside=[4, 0], chunk=64)
    for _ in range(STEPS // 4):
        run.step(take("decode", [4, 0, 2]))
    run.check()
    run.rig.close_all()


@torch.no_grad()
def test_a_reused_prefix_changes_nothing(tmp_path):
    run = Run(variant("dense"), tmp_path)
    first, other = run.prompts[4], run.prompts[3]
    run.prompts = [
        first,
        [*first[:150], *other[:40]],  # parts from the first in its third page, where no snapshot is yet
        [*first[:-1], first[-1] ^ 1],
        [*first[:140], *other[50:70]],  # parts where the second has left one
        [*first[:63], *other[:40]],
    ]
    run.open(0)
    run.prefill([0])
    reused = []
    for row in range(1, 5):
        run.open(row)
        reused.append(int(run.rig.kv.lengths[row]))
        run.prefill([row], beside=[0])
        for _ in range(8):
            run.step(take("decode", [row]))
    run.check()
    assert reused == [0, 192, 128, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["dense", "experts"])
@torch.no_grad()
def test_no_bit_depends_on_cuts_company_or_reuse(name: str, dtype: torch.dtype, tmp_path):
    if ops.select_kernels() != "native":
        pytest.skip("the compiled kernels are not available on this machine")
    run = Run(variant(name), tmp_path, dtype)
    run.prompts[5:] = [list(run.prompts[4])]
    run.open(4)
    run.prefill([4])  # alone, as long chunks as may be
    for _ in range(6):
        run.step(take("decode", [4]))
    run.open(5, 0, 3)
    assert run.rig.kv.lengths[5] == 192
    run.prefill([0, 5, 3])
    for _ in range(6):
        run.step(take("decode", [0, 5, 3]))
    assert torch.equal(torch.stack(run.logits[4]), torch.stack(run.logits[5]))
    cold = Run(variant(name), tmp_path / "again", dtype)
    cold.open(2, 4)
    cold.prefill([2])
    cold.prefill([4], beside=[2], chunk=64)
    for _ in range(6):
        cold.step(take("decode", [2, 4]))
    assert torch.equal(torch.stack(run.logits[4]), torch.stack(cold.logits[4]))
    assert len({tuple(run.rig.out[row][:3]) for row in (0, 3, 4)}) == 3
