"""What kernel libraries of an accelerator are told about a step, from host integers and from staged columns."""

import numpy as np
import pytest
import torch
from support.engine_rig import EngineRig

from mstar.engine.engine_config import AUTO_CAPTURE_SIZES, EngineConfig, auto_capture_sizes
from mstar.engine.resources import attention_choice, linear_attention_choice
from mstar.engine.resources.attention import AttentionFacts
from mstar.engine.resources.attention_backends import AttentionMeta, AttentionNeed, HostRows
from mstar.engine.resources.fla_linear_attention import FlaLinearAttention, _Prompts
from mstar.engine.resources.flashinfer_attention import FlashInferAttention, _Bound, plan_columns
from mstar.engine.resources.linear_attention_backends import LinearAttentionMeta, LinearAttentionNeed


def test_pages_of_rows_one_after_the_other():
    table = np.array([[7, 3, 0], [5, 0, 0], [9, 2, 4]], np.int32)
    rows = HostRows(table, np.array([5, 4, 12], np.int32), np.array([0, 5, 6, 8], np.int32), single=False)
    starts, page_starts, pages, last = (column.tolist() for column in plan_columns(rows, 4))
    assert starts == [0, 5, 6, 8]
    assert page_starts == [0, 2, 3, 6]
    assert pages == [7, 3, 5, 9, 2, 4]
    assert last == [1, 4, 4]


def test_chunks_of_rows():
    spans = [130, 1, 64, 2]
    starts = torch.tensor([0, *spans]).cumsum(0).int()
    columns = (torch.tensor([4, 2, -1, 1], dtype=torch.int32), torch.tensor([0, 1, 0, 1], dtype=torch.int32))
    meta = LinearAttentionMeta(*columns, starts, single=False)
    prompts = FlaLinearAttention().begin(meta, sum(spans)).derived
    assert isinstance(prompts, _Prompts)
    of_rows, of_nobody = prompts.chunks.tolist()[:6], prompts.chunks[6:]
    assert of_rows == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [3, 0]]
    assert of_nobody.shape == (1, 2) and of_nobody[:, 0].tolist() == [4]  # 197 tokens of 4 rows: 7 chunks at most
    assert prompts.starts.tolist() == [*starts.tolist(), 197] and prompts.starts.dtype is torch.int64
    assert prompts.slots.tolist() == [4, 2, 0, 1, 0]  # a row without a slot has the sink, as has nobody's
    assert prompts.begins.flatten().tolist() == [True, False, True, False, True]
    assert prompts.has_state.tolist() == [0, 1, 0, 1, 0]
    assert prompts.chunk_starts.tolist() == [0, 3, 4, 5, 6, 6]
    single = meta._replace(single=True)
    assert FlaLinearAttention().begin(single, 4) is single


def test_what_the_libraries_cannot_serve_is_said():
    need = AttentionNeed("cuda", torch.bfloat16, 8, 2, 256, 64)
    reasons = [
        FlashInferAttention().why_unavailable(each)
        for each in (need, need.__class__("cpu", *_rest(need)), need.__class__("cuda", torch.float32, *_rest(need)[1:]))
    ]
    assert reasons[1] == "runs on an accelerator, not on cpu"
    assert reasons[2] == "computes in 16 bits, not in torch.float32"
    odd = AttentionNeed("cuda", torch.bfloat16, 8, 2, 96, 64)
    assert FlashInferAttention().why_unavailable(odd) == "heads of 64, 128, 256, not of 96"
    linear = LinearAttentionNeed("cuda", torch.bfloat16, 2, 4, 16, 24, 4)
    assert FlaLinearAttention().why_unavailable(linear) == "keys and values of 16, 32, 64, 128, not of 16 and 24"
    longer = LinearAttentionNeed("cuda", torch.bfloat16, 2, 4, 16, 16, 5)
    assert FlaLinearAttention().why_unavailable(longer) == "convolutions of 4 taps, not of 5"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries are there."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


@pytest.mark.parametrize(("dim", "value_dim"), [(256, 256), (96, 96), (64, 128), (64, 64)])
@pytest.mark.parametrize("name", ["fla", "triton"])
def test_what_the_kernels_cannot_serve_is_not_chosen(name: str, dim: int, value_dim: int, library: None):
    """Decode steps of either are the project's kernel's."""
    kernels = pytest.importorskip("mstar.kernels.triton.gated_delta")
    need = LinearAttentionNeed("cuda", torch.bfloat16, 2, 2, dim, value_dim, 4)
    channels = 4 * dim + 2 * value_dim
    states = torch.zeros(2, 3, channels), torch.zeros(2, 2, dim, value_dim)
    columns = [torch.zeros(count, dtype=torch.int32) for count in (0, 0, 1)]
    made = kernels.gated_delta(
        torch.zeros(0, channels), torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(channels, 4), torch.zeros(2),
        torch.zeros(2), *states, *columns, 2, torch.zeros(0, 2 * value_dim), 1, None,
    )  # fmt: skip
    assert (made is NotImplemented) == (dim != 64 or value_dim != 64)
    assert (linear_attention_choice.BACKENDS[name].why_unavailable(need) is not None) == (made is NotImplemented)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 512), (71, 1, 64), (128, 1, 128), (64, 1, 256)])
def test_heads_that_the_kernels_cannot_serve_are_refused(heads: int, kv_heads: int, dim: int, library: None):
    kernels = pytest.importorskip("mstar.kernels.triton.attention_decode")
    need = AttentionNeed("cuda", torch.bfloat16, heads, kv_heads, dim, 64)
    q, pages = torch.zeros(1, heads, dim), torch.zeros(2, 64, kv_heads, dim)
    serves = kernels.serves(q, pages, pages, torch.zeros(1, 1, dtype=torch.int32), q.clone())
    assert serves == (heads == 64)
    for name in ("triton", "flashinfer"):
        assert (attention_choice.BACKENDS[name].why_unavailable(need) is None) == serves


def test_pieces_of_a_step_are_served_without_a_plan():
    rows = HostRows(np.zeros((3, 1), np.int32), np.ones(3, np.int32), np.array([0, 2, 3, 5], np.int32), single=False)
    attention = EngineRig().resource("attn")
    own = attention.narrow(AttentionFacts(True, rows, planned=True), 1, 3)
    assert own.rows.q_starts.tolist() == [0, 1, 3] and not own.planned
    bound = object.__new__(_Bound)  # with nothing to plan with
    column = torch.zeros(1)
    bound.plan(AttentionMeta(column, column, column, column, 1.0, True, True, own.rows, own.planned))


def _rest(need: AttentionNeed) -> tuple[torch.dtype, int, int, int, int]:
    return need.dtype, need.num_heads, need.num_kv_heads, need.head_dim, need.page_size


def test_an_accelerator_captures_up_to_the_widest_step():
    def sizes(max_rows: int, device: str) -> tuple[int, ...]:
        return auto_capture_sizes(EngineConfig(max_rows, 64, max_rows, device=torch.device(device)))

    assert sizes(65, "cpu") == AUTO_CAPTURE_SIZES
    assert sizes(20, "cuda") == (1, 2, 4, 8, 16, 20)
    assert sizes(256, "cuda")[-2:] == (248, 256)
    assert sizes(300, "cuda")[-1] == 256
