"""`python -m soak --seconds N --seed S`: the command behind `make soak`. Exit code 0 when everything held."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from soak.campaign import Verdict, soak_target
from soak.deployments import TARGETS

SHARES = {"llama": 0.5, "composite": 0.2, "composite_two_workers": 0.3}
KILL_SEED = 3
"""Workers are killed in seeds that are a multiple of this."""
SHOWN = ("mstar_prefix_hit_tokens_total", "mstar_evictions_total", "mstar_recomputed_tokens_total", "mstar_steps_total")


MAX_SHOWN, MAX_SHOWN_CHARS = 12, 600
"""Of findings on the terminal; `findings.txt` beside the logs has them whole."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="traffic in all, shared among the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kills", choices=("auto", "yes", "no"), default="auto", help="auto: in every third seed")
    parser.add_argument("--knob", nargs="*", default=[], metavar="NAME=VALUE", help="instead of what the seed chooses")
    parser.add_argument("--directory", type=Path, help="where logs and checkpoints go and stay")
    arguments = parser.parse_args()
    kills = arguments.kills == "yes" or (arguments.kills == "auto" and arguments.seed % KILL_SEED == 0)
    fixed = dict(knob_of(text) for text in arguments.knob)
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="soak-"))
    whole = sum(SHARES[name] for name in arguments.targets)
    verdicts = []
    for name in arguments.targets:
        began = time.monotonic()
        seconds = arguments.seconds * SHARES[name] / whole
        verdict = soak_target(name, seconds, arguments.seed, directory / name, kills=kills, fixed=fixed)
        show(verdict, time.monotonic() - began)
        (directory / name / "findings.txt").write_text("\n".join(verdict.findings))
        verdicts.append(verdict)
    num_findings = sum(len(verdict.findings) for verdict in verdicts)
    outcome = "everything held" if not num_findings else f"{num_findings} findings"
    print(f"soak of {arguments.seconds:.0f} s, seed {arguments.seed}: {outcome}; logs in {directory}", flush=True)
    return 1 if num_findings else 0


def knob_of(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, value if value == "auto" else json.loads(value.lower())


def show(verdict: Verdict, took_s: float) -> None:
    print(f"== {verdict.target}, {took_s:.0f} s with starts: {verdict.knobs}")
    print(
        f"   {verdict.num_requests} requests, {verdict.num_kills} kills, {verdict.num_compared} texts compared with "
        f"{verdict.num_alone} answers given alone, {len(verdict.accepted)} differences accepted"
    )
    for name, count in sorted(verdict.counts.items()):
        print(f"   {count:6} {name}")
    for name, value in sorted(verdict.gauges.items()):
        if name.startswith(SHOWN):
            print(f"   {value:8.0f} {name}")
    for role, samples in sorted(verdict.memory_mib.items()):
        print(f"   {role}: MiB by requests {', '.join(f'{mib} ({count})' for count, mib in _few(samples))}")
    for line in verdict.accepted:
        print(f"   accepted: {line}")
    for finding in verdict.findings[:MAX_SHOWN]:
        print(f"   FOUND {finding[:MAX_SHOWN_CHARS]}")
    if len(verdict.findings) > MAX_SHOWN:
        print(f"   and {len(verdict.findings) - MAX_SHOWN} more")
    sys.stdout.flush()


def _few(samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most eight of them, the first and the last among them."""
    step = max(1, len(samples) // 7)
    return [*samples[:-1:step], *samples[-1:]]


if __name__ == "__main__":
    sys.exit(main())
