"""The null model's counts are those of a hand calculation, and the report names the loop's stages."""

import json
import subprocess
import sys

import pytest
from support.repository import ROOT

from benchmark.worker_phases.measure import ARRIVING_TOKENS, SHARED_TOKENS, PhaseRun, measure, summarize
from benchmark.worker_phases.null_model import NullSubmodule
from mstar.model.llama.submodules import LlamaSubmodule
from mstar.profile.phases import PHASES, WAITS, Tick

ROWS, STEPS = 4, 64
# Rows hold 72 or 73 tokens before the measured steps (2 pages) and 136 after them (3 pages).
PAGES = ROWS * (3 - 2)
# MessagePack, by its specification: a short text takes its length and a byte, a small number, nil or header one byte.
# Codec, map, type, src, rids, signals, tokens, logprobs, three empty arrays of tensors.
EMIT_BYTES = 1 + 1 + 15 + 5 + (6 + ROWS * 10) + (9 + 6) + (8 + ROWS) + 10 + 13 + 16 + 9
# Codec, map, type, rid, partition, rank, reason, emits (97 tokens), prompt tokens.
DONE_BYTES = 1 + 1 + 14 + 14 + 15 + 6 + 12 + (7 + 6 + 1) + 28


@pytest.mark.parametrize("overlap", [True, False])
def test_counts_are_those_of_a_hand_calculation(overlap):
    report = measure(PhaseRun(ROWS, STEPS, device_us=300, overlap=overlap))
    speculated = report.ops.pop("speculated_steps")
    assert report.ops == {
        "rows": ROWS * STEPS,
        "pages": PAGES,
        "messages": STEPS,
        "frames": STEPS + ROWS,
        "bytes": STEPS * EMIT_BYTES + ROWS * DONE_BYTES,
        "stops": ROWS,
    }
    assert report.steps == STEPS
    assert 0 <= speculated <= STEPS * overlap


def test_every_option_changes_no_count():
    """The made logits win over every transform, so the same steps are taken and the same frames sent."""
    counts = [measure(PhaseRun(ROWS, STEPS, device_us=300, full=full)).ops for full in (False, True)]
    for ops in counts:
        ops.pop("speculated_steps")
    assert counts[0] == counts[1]


def test_prompts_arrive_while_the_others_are_measured():
    run = PhaseRun(ROWS, STEPS, device_us=300, full=True, arrivals_every=8)
    report = measure(run)
    assert report.mode == "full, a prompt every 8 steps"
    assert report.steps == STEPS
    assert report.ops["arrived"] == (run.first_steps + STEPS) // 8
    # Eight prompts arrive with 64 steps; the one at either end may fall out of them. Shared pages need not be computed.
    own = ARRIVING_TOKENS - SHARED_TOKENS
    assert 6 * own <= report.ops["prefill_tokens"] <= 9 * ARRIVING_TOKENS


def test_command_prints_one_object_with_the_nine_stages():
    command = [sys.executable, "-m", "benchmark.worker_phases", "--rows", "2", "--steps", "8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    report = json.loads(done.stdout)
    assert list(report) == ["mode", "rows", "steps", "phases_us", "waits_us", "total_us", "spread_us", "ops"]
    assert tuple(report["phases_us"]) == PHASES
    assert set(report["waits_us"]) == set(WAITS)
    assert report["waits_us"]["await_gpu"] > report["phases_us"]["await_gpu"]
    assert report["ops"]["rows"] == 16


def test_waits_are_never_added():
    cpu = {phase: 1000 * (index + 1) for index, phase in enumerate(PHASES)}
    slow = {**cpu, "route": 19_000}
    ticks = [Tick(cpu, {"await_gpu": 5_000_000, "event_sync": 0})] * 3 + [Tick(slow, dict.fromkeys(WAITS, 0))]
    report = summarize(PhaseRun(1, 4), ticks, {})
    assert report.total_us == 45.0
    assert report.phases_us["route"] == 9.0
    assert report.waits_us == {"await_gpu": 5000.0, "event_sync": 0.0}


def test_only_the_forward_is_replaced():
    """A hook of the null model's own would take work out of the measurement."""
    own = {name for name in vars(NullSubmodule) if callable(vars(NullSubmodule)[name])} - {"__init__"}
    assert own == {"forward_batched"}
    assert NullSubmodule.__mro__[1] is LlamaSubmodule
