"""What kernel libraries of an accelerator are told about a step, from host integers and from staged columns."""

import numpy as np
import torch

from mstar.engine.engine_config import AUTO_CAPTURE_SIZES, EngineConfig, auto_capture_sizes
from mstar.engine.resources.attention_backends import AttentionNeed, HostRows
from mstar.engine.resources.fla_linear_attention import FlaLinearAttention, _Prompts
from mstar.engine.resources.flashinfer_attention import FlashInferAttention, plan_columns
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
    assert FlaLinearAttention().why_unavailable(linear) == "keys and values of 16, 32, 64, 128, 256, not of 16 and 24"
    longer = LinearAttentionNeed("cuda", torch.bfloat16, 2, 4, 16, 16, 5)
    assert FlaLinearAttention().why_unavailable(longer) == "convolutions of 4 taps, not of 5"


def _rest(need: AttentionNeed) -> tuple[torch.dtype, int, int, int, int]:
    return need.dtype, need.num_heads, need.num_kv_heads, need.head_dim, need.page_size


def test_an_accelerator_captures_up_to_the_widest_step():
    def sizes(max_rows: int, device: str) -> tuple[int, ...]:
        return auto_capture_sizes(EngineConfig(max_rows, 64, max_rows, device=torch.device(device)))

    assert sizes(65, "cpu") == AUTO_CAPTURE_SIZES
    assert sizes(20, "cuda") == (1, 2, 4, 8, 16, 20)
    assert sizes(256, "cuda")[-2:] == (248, 256)
    assert sizes(300, "cuda")[-1] == 256
