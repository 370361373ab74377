"""Recorded forwards: replays equal eager runs over new inputs, and what cannot be repeated is refused."""

import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mstar.kernels import ops
from mstar.kernels.tape import RecordError, Tape

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def inference() -> object:
    with torch.inference_mode():
        yield


class Decoder:
    """Two small layers over paged caches, reading all it needs from buffers that stay in place."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.layers = [
            [ops.pack_linear(torch.randn(shape).to(dtype)) for shape in ((96, 64), (64, 64), (128, 64), (64, 64))]
            for _ in range(2)
        ]
        self.norm = torch.rand(64).to(dtype)
        self.head = ops.pack_linear(torch.randn(50, 64).to(dtype))
        self.k, self.v = torch.zeros(2, 2, rows + 1, 16, 1, 16).to(dtype)
        self.table = torch.arange(1, rows + 1, dtype=torch.int32).view(rows, 1)
        self.starts = torch.arange(rows + 1, dtype=torch.int32)
        self.positions = torch.zeros(rows, dtype=torch.int32)
        self.slots = torch.zeros(rows, dtype=torch.int32)
        self.kv_lens = torch.zeros(rows, dtype=torch.int32)
        self.tokens = torch.zeros(rows, dtype=torch.int32)
        angles = torch.arange(16)[:, None] * 0.3 ** torch.arange(8)
        self.cos, self.sin = angles.cos(), angles.sin()

    def at(self, position: int) -> None:
        self.positions.fill_(position)
        self.slots.copy_(self.table[:, 0] * 16 + position)
        self.kv_lens.fill_(position + 1)

    def forward(self) -> tuple[Tensor, Tensor]:
        rows = len(self.tokens)
        x = ops.embedding(self.tokens, self.head)
        y = ops.rms_norm(x, self.norm, 1e-5)
        for k, v, (qkv_proj, o_proj, gate_up, down) in zip(self.k, self.v, self.layers, strict=True):
            qkv = ops.linear(y, qkv_proj)
            ops.rope_write_kv(qkv, self.positions, self.cos, self.sin, self.slots, k, v, 4)
            q = qkv[:, :64].view(rows, 4, 16)
            mixed = ops.paged_attend(q, k, v, self.table, self.kv_lens, self.starts, 0.25).view(rows, 64)
            y = ops.fused_add_rms_norm(ops.linear(mixed, o_proj), x, self.norm, 1e-5)
            y = ops.linear(ops.silu_and_mul(ops.linear(y, gate_up)), down)
            y = ops.fused_add_rms_norm(y, x, self.norm, 1e-5)
        logits = ops.linear(y, self.head, out_dtype=torch.float32)
        return logits, ops.greedy(logits, out=self.tokens)


def test_replays_equal_eager_steps(compiled: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    eager = Decoder(5, dtype)
    torch.manual_seed(3)
    taped = Decoder(5, dtype)
    eager.tokens.copy_(torch.arange(5))
    taped.tokens.copy_(torch.arange(5))
    taped.at(0)
    tape, (logits, _) = ops.record(taped.forward)
    seen = set()
    for position in range(16):
        eager.at(position)
        expected, _ = eager.forward()
        if position:
            taped.at(position)
            tape.replay()
        assert torch.equal(logits, expected) and torch.equal(taped.tokens, eager.tokens)
        seen.add(tuple(eager.tokens.tolist()))
    assert len(seen) > 8  # the steps differ, or equality would say little
    assert torch.equal(taped.k, eager.k) and torch.equal(taped.v, eager.v)
    assert tape.num_torch_operations == 0 and tape.num_kernels == 2 + 2 * 9 + 2


def test_torch_operations_replay_between_kernels(compiled: str) -> None:
    packed = ops.pack_linear(torch.randn(8, 8))
    x, index = torch.randn(4, 8), torch.tensor([2, 0, 0])
    counter = torch.zeros(3)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        y = ops.linear(x, packed) * 2 + 1
        counter.add_(1)
        values, indices = y[index].topk(2, -1)
        return ops.linear(y, packed), values, indices

    tape, (y, values, indices) = ops.record(forward)
    x.normal_()
    index.copy_(torch.tensor([3, 1, 1]))
    tape.replay()
    assert counter.tolist() == [2, 2, 2]
    for kept, fresh in zip((y, values, indices), forward(), strict=True):
        assert torch.equal(kept, fresh)


def test_an_operation_that_may_be_a_view_replays_where_it_copied(compiled: str) -> None:
    whole, square = torch.arange(6, dtype=torch.int32), torch.arange(6.0).view(2, 3)

    def forward() -> tuple[Tensor, ...]:
        return whole.long(), whole.int()[1:], square.t().reshape(-1), square.flatten(), square.t().contiguous()

    tape, results = ops.record(forward)
    whole.add_(10)
    square.mul_(3)
    tape.replay()
    for kept, fresh in zip(results, forward(), strict=True):
        assert torch.equal(kept, fresh)


def test_temporaries_share_memory_and_results_keep_theirs(compiled: str) -> None:
    packed = ops.pack_linear(torch.randn(256, 256))
    x = torch.randn(4, 256)
    kept: list[Tensor] = []

    def forward() -> Tensor:
        y = x
        for i in range(20):
            y = ops.linear(y, packed)
            if i % 5 == 0:
                kept.append(y)
        return y

    tape, _ = ops.record(forward)
    assert tape.pool.num_bytes < 8 * x.nbytes  # 4 kept, 2 in turns, the last result
    x.mul_(0.5)
    tape.replay()
    again = x
    for i in range(20):
        again = ops.linear(again, packed)
        if i % 5 == 0:
            assert torch.equal(kept[i // 5], again)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), max_size=40))
def test_the_pool_never_lends_memory_that_a_tensor_uses(script: list[tuple[int, int]]) -> None:
    tape = Tape(lambda program: None)
    live: dict[int, tuple[Tensor, int]] = {}
    for mark, (slot, size) in enumerate(script):
        view = tape.pool.empty((size,), torch.uint8)[: max(1, size // 2)]  # a view holds the memory as well
        assert view.data_ptr() % 64 == 0
        view.fill_(mark)
        live[slot] = (view, mark)
        assert all((tensor == value).all() for tensor, value in live.values())
    assert tape.pool.num_bytes <= sum(size for _, size in script)


def test_what_depends_on_values_is_refused(compiled: str) -> None:
    x = torch.randn(4, 8)
    for forward in (
        lambda: x.sum().item(),
        lambda: bool((x > 0).any()),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: ops.paged_attend(
            x.view(4, 1, 8).half(), torch.zeros(1, 4, 1, 8).half(), torch.zeros(1, 4, 1, 8).half(),
            torch.zeros(4, 1).int(), torch.ones(4).int(), torch.arange(5).int(), 1.0,
        ),
    ):  # fmt: skip
        with pytest.raises(RecordError):
            ops.record(forward)
    tape, _ = ops.record(lambda: x[:, 1:3].t())  # views need no step, and a failed recording leaves nothing behind
    assert tape.num_kernels == tape.num_torch_operations == 0


def test_torch_kernels_are_not_recorded() -> None:
    ops.use_kernels(None)
    with pytest.raises(RecordError, match="torch kernels"):
        ops.record(lambda: None)


def test_faults_surface_in_replays(compiled: str) -> None:
    ids, table = torch.tensor([1, 2]), torch.randn(4, 8)
    tape, out = ops.record(lambda: ops.embedding(ids, table))
    ids[1] = 4
    with pytest.raises(IndexError, match="vocabulary"):
        tape.replay()
    ids[1] = 3
    tape.replay()
    assert torch.equal(out, table[ids])


def test_other_threads_stay_off_the_tape(compiled: str) -> None:
    packed, x = ops.pack_linear(torch.randn(8, 8)), torch.randn(2, 8)

    def forward() -> Tensor:
        other = threading.Thread(target=lambda: ops.linear(x, packed))
        other.start()
        other.join()
        return ops.linear(x, packed)

    tape, _ = ops.record(forward)
    assert tape.num_kernels == 1


ALONE = """
import sys, torch
import mstar.model.llama.submodules, mstar.model.qwen3_5.submodules
from mstar.kernels.tape import Recording, Tape
tape = Tape(lambda program: None)
with Recording(tape), torch.inference_mode():
    torch.ones(3).index_select(0, torch.tensor([1])) + 1
print(sorted({"torch._dynamo", "sympy", "triton"} & sys.modules.keys()))
"""


def test_models_and_recording_load_no_compiler():
    """It takes seconds, in every worker that starts."""
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr
