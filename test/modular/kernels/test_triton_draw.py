"""Triton's way from logits to tokens against the sampler's tensor functions."""

import numpy as np
import pytest
import torch
from support.triton_device import DEVICE, KERNELS, ON_DEVICE
from torch import Tensor

from mstar.engine.execution import AllowedTokens
from mstar.engine.resources.logit_adjust import TokenBiases, TokenCounts
from mstar.engine.resources.row_draws import DrawTables, KernelDraws, TorchDraws
from mstar.engine.resources.sampling_plan import RowGroup, SamplingPlan
from mstar.engine.resources.token_choice import ChoiceParams, choose_tokens

CPU = torch.device("cpu")
VOCABS = [61, 5000, 151_936] if ON_DEVICE else [61, 5000]


def random(*shape: int, seed: int, spread: float = 3.0, levels: int = 0) -> Tensor:
    """fp32; with `levels`, only so many distinct values per `spread`, so that ties are everywhere."""
    values = spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (values * levels / spread).round() * spread / levels if levels else values


def draws(vocab: int, handles: int = 8) -> tuple[TorchDraws, KernelDraws]:
    """Over tables of the same contents, the first on the CPU."""
    generator = torch.Generator().manual_seed(1)
    params = 0.5 + torch.rand(handles, 7, generator=generator)
    made = []
    for device in (CPU, DEVICE):
        counts, biases = TokenCounts(vocab, device), TokenBiases(device)
        for row in range(1, 5):
            counts.reset(row, np.arange(row, vocab, 7))
            biases.reset(
                row, np.arange(row * 3), np.linspace(-9, 9, row * 3).astype(np.float32), np.array([9, 2 + row])
            )
        counts.output[1:5] = (torch.arange(4 * vocab).view(4, vocab) % 5 - 2).clamp(min=0).int()
        made.append(DrawTables(params.to(device), counts, biases))
    return TorchDraws(made[0]), KernelDraws(made[1], KERNELS.sampling)


def test_the_largest_logit_or_failure() -> None:
    for vocab in VOCABS:
        torch_draws, kernel_draws = draws(vocab)
        logits = random(8, vocab, seed=vocab, levels=2)
        logits[1, 7], logits[2, 3], logits[3], logits[4, :60] = torch.nan, torch.inf, -torch.inf, -torch.inf
        logits[5], logits[6, 2], logits[6, 40] = 0.0, 99.0, 99.0
        logits[5, 3:] = -0.0
        expected, got = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32, device=DEVICE)
        torch_draws.largest(logits, expected)
        kernel_draws.largest(logits.to(DEVICE), got)
        assert torch.equal(got.cpu(), expected)
        assert expected[1:4].tolist() == [-1] * 3 and expected[5:7].tolist() == [0, 2]


@pytest.mark.parametrize("masked", [False, True])
def test_adjusted_logits_have_the_same_bits(masked: bool) -> None:
    for vocab in VOCABS:
        torch_draws, kernel_draws = draws(vocab)
        logits = random(6, vocab, seed=vocab)
        group = RowGroup(np.array([1, 2, 4, 5]), {
            "handles": np.array([5, 2, 7, 0]), "counts": np.array([2, 0, 4, 0]), "biases": np.array([0, 3, 4, 1]),
            "floor": np.array([0, -np.inf, 0, -np.inf], np.float32), "masks": np.array([1, -1, -1, 0]),
        })  # fmt: skip
        plan = SamplingPlan(np.arange(6), np.ones(6, bool), adjusted=group, has_counts=True, has_biases=True)
        words = np.random.default_rng(0).integers(-(2**31), 2**31, (2, -(-vocab // 32)), np.int64).astype(np.int32)
        allowed = AllowedTokens(np.array([5, 1]), words) if masked else None
        found = []
        for each, device in ((torch_draws, CPU), (kernel_draws, DEVICE)):
            own, tokens = logits.to(device, copy=True), torch.zeros(6, dtype=torch.int32, device=device)
            each.largest(own, tokens)
            tokens[2] = -1
            fields = {"rows": group.rows, **group.columns}
            each.adjust(own, tokens, plan, {k: torch.from_numpy(v).to(device) for k, v in fields.items()}, allowed)
            found.append((own.cpu(), tokens.cpu()))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
        assert torch.equal(found[0][0][[0, 3]], logits[[0, 3]]) and not torch.equal(found[0][0], logits)
        assert found[0][1][2] == -1


def test_long_lists_of_biases_have_the_same_bits() -> None:
    """Longer than what the kernel takes at once, and of lengths that no block divides."""
    vocab, generator = 5000, np.random.default_rng(2)
    tables = []
    for device in (CPU, DEVICE):
        biases = TokenBiases(device)
        tables.append((biases, DrawTables(torch.ones(4, 7, device=device), TokenCounts(vocab, device), biases)))
    for row, (num_ids, num_floor) in enumerate([(3001, 1), (0, 777), (256, 256), (1, 0)], 1):
        ids, values = generator.permutation(vocab)[:num_ids], generator.uniform(-100, 100, num_ids).astype(np.float32)
        floor_ids = generator.permutation(vocab)[:num_floor]
        for biases, _ in tables:
            biases.reset(row, ids, values, floor_ids)
    logits = random(4, vocab, seed=2)
    group = RowGroup(np.arange(4), {
        "handles": np.arange(4), "counts": np.zeros(4, np.int64), "biases": np.array([2, 1, 4, 3]),
        "floor": np.array([-np.inf, 0, 0, -np.inf], np.float32),
    })  # fmt: skip
    plan = SamplingPlan(np.arange(4), np.ones(4, bool), adjusted=group, has_biases=True)
    found = []
    for each in (TorchDraws(tables[0][1]), KernelDraws(tables[1][1], KERNELS.sampling)):
        device = CPU if isinstance(each, TorchDraws) else DEVICE
        own, tokens = logits.to(device, copy=True), torch.zeros(4, dtype=torch.int32, device=device)
        fields = {name: torch.from_numpy(v).to(device) for name, v in {"rows": group.rows, **group.columns}.items()}
        each.adjust(own, tokens, plan, fields, None)
        found.append((own.cpu(), tokens.cpu()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert (found[1][0] != logits).sum(1)[:3].tolist() == [777, 3001, 1]
    assert found[1][0].isinf().sum(1).tolist() == [777, 0, 0, 256]


class Row:
    """Parameters of random draws: every kind of cut and none, alone and together."""

    def __init__(self, num_rows: int, seed: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def column(*values: float) -> Tensor:
            return torch.tensor(values)[torch.randint(len(values), (num_rows, 1), generator=generator)]

        self.temperature = column(0.3, 0.8, 1.0, 5.0)
        self.top_k = column(0, 0, 0, 1, 7, 50, vocab - 1)
        self.top_p = column(1e-4, 0.5, 0.95, 1.0, 1.0)
        self.min_p = column(0, 0, 0, 0.05, 1.0)
        self.uniform = (torch.randint(0, 2**23, (num_rows, 1), generator=generator) + 0.5) * 2.0**-23


def chosen(logits: Tensor, row: Row, rows: Tensor) -> Tensor:
    """The kernels' tokens of `rows`, the others' largest."""
    table = torch.zeros(len(rows) + 3, 7)
    for index, column in enumerate((row.temperature, row.top_k, row.top_p, row.min_p)):
        table[3:, index] = column[rows, 0]
    device_logits, tokens = logits.to(DEVICE), torch.zeros(len(logits), dtype=torch.int32, device=DEVICE)
    KERNELS.sampling.largest_tokens(device_logits, tokens)
    handles = torch.arange(len(rows)) + 3
    given = (rows.to(DEVICE), handles.to(DEVICE), row.uniform[rows, 0].contiguous().to(DEVICE), table.to(DEVICE))
    KERNELS.sampling.draw_tokens(device_logits, tokens, *given, cuts=True)
    return tokens.cpu()


CASES = [(700, 12, 0, 3.0), (700, 8, 3, 3.0), (9000, 5, 0, 0.6), (9000, 3, 2, 0.5)]
if ON_DEVICE:
    CASES += [(248_320, 128, 0, 0.7), (248_320, 64, 0, 4.0), (248_320, 16, 30, 0.7), (151_936, 128, 0, 2.0)]


@pytest.mark.parametrize(("vocab", "num_rows", "levels", "spread"), CASES)
def test_a_draw_is_that_of_the_sorted_row(vocab: int, num_rows: int, levels: int, spread: float) -> None:
    """Flat and sharp, with and without ties: many thousands of equal logits are searched for in the whole row."""
    logits = random(num_rows, vocab, seed=vocab + levels, spread=spread, levels=levels)
    logits[1, ::2] = -torch.inf
    logits[2] = 1.0
    row = Row(num_rows, num_rows + vocab, vocab)
    params = ChoiceParams(row.temperature, row.top_k, row.top_p, row.min_p, row.uniform)
    expected = choose_tokens(logits.clone(), params, vocab, needs_mass=True)
    got = chosen(logits, row, torch.arange(num_rows))
    assert torch.equal(got, expected.int()), [(i, *(float(c[i]) for c in params)) for i in (got != expected).nonzero()]


@pytest.mark.parametrize("above", [20.0, 40.0])
def test_most_tokens_are_far_below_the_largest(above: float) -> None:
    """As a trained model has them."""
    vocab, num_rows = (248_320 if ON_DEVICE else 9000), 24
    peaks = above * torch.rand(num_rows, -(-vocab // 997), generator=torch.Generator().manual_seed(1))
    logits = random(num_rows, vocab, seed=5, spread=4.0)
    logits[:, ::997] += peaks
    row = Row(num_rows, 8, vocab)
    row.temperature = torch.full_like(row.temperature, 0.8)
    row.top_k[::2], row.top_p[1::4] = 0, 1 - 2.0**-10
    row.uniform[8::4], row.uniform[9::4] = 1 - 2.0**-10, 2.0**-10
    for column, value in ((row.top_k, 0), (row.top_p, 1), (row.min_p, 0), (row.uniform, 1 - 2.0**-24)):
        column[:4] = value
    params = ChoiceParams(row.temperature, row.top_k, row.top_p, row.min_p, row.uniform)
    expected = choose_tokens(logits.clone(), params, vocab, needs_mass=True)
    got = chosen(logits, row, torch.arange(num_rows))
    assert torch.equal(got[4:], expected[4:].int())
    # The last ones that can be drawn at all: which it is, is a matter of an exponential's last bit.
    shares = (logits[:4].double() / 0.8).softmax(1)
    drawn = shares.gather(1, got[:4].long()[:, None])
    below = torch.where(shares < drawn, shares, 0).sum(1)
    assert (below < 2.0**-22).all() and (below + drawn[:, 0] > 2.0**-26).all()
    assert float((logits.amax(1, keepdim=True) - logits > 0.8 * 16).float().mean()) > 0.5


def test_a_row_draws_the_same_beside_any_others() -> None:
    logits = random(9, 5000, seed=3, spread=0.5)
    row = Row(9, 5, 5000)
    logits[4, 17] = torch.nan
    together = chosen(logits, row, torch.arange(9))
    some = chosen(logits, row, torch.tensor([1, 4, 8]))
    assert together[4] == some[4] == -1
    assert torch.equal(some[[1, 8]], together[[1, 8]]) and torch.equal(some[[0, 2]], logits.argmax(-1)[[0, 2]].int())
    for index in (0, 3):
        assert chosen(logits[index : index + 1], one(row, index), torch.tensor([0])) == together[index]


def one(row: Row, index: int) -> Row:
    alone = Row(1, 0, 5000)
    for name in ("temperature", "top_k", "top_p", "min_p", "uniform"):
        setattr(alone, name, getattr(row, name)[index : index + 1])
    return alone


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_log_probabilities(num_top: int) -> None:
    for vocab in VOCABS:
        torch_draws, kernel_draws = draws(vocab)
        raw = random(4, vocab, seed=vocab, levels=4 if num_top % 2 else 0)
        raw[2, 5:] = -torch.inf
        rows, places = torch.tensor([0, 2, 3]), torch.tensor([1, 2, 6])
        tokens = torch.tensor([9, 3, 8, 9, 9, 9, -1], dtype=torch.int32)
        expected = torch_draws.log_probabilities(raw, rows, places, tokens, num_top)
        given = raw.to(DEVICE), rows.to(DEVICE), places.to(DEVICE), tokens.to(DEVICE)
        got = kernel_draws.log_probabilities(*given, num_top).cpu()
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        assert torch.equal(got[:, 1 : 1 + num_top], expected[:, 1 : 1 + num_top])


def test_live_tokens() -> None:
    tokens, places = torch.tensor([5, -1, 7], dtype=torch.int32), torch.tensor([3, 0, 4])
    live = torch.full((6,), 9, device=DEVICE)
    KERNELS.sampling.write_live(tokens.to(DEVICE), places.to(DEVICE), live)
    assert live.tolist() == [0, 9, 9, 5, 7, 9]
