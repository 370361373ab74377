"""`python -m benchmark.worker_phases`: host cost of a decode step by stage. README.md says how to read it."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from benchmark.worker_phases.measure import PhaseReport, PhaseRun, measure
from mstar.profile.phases import WAITS


def main(
    rows: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 64,
    steps: Annotated[int, typer.Option(min=4, help="Measured steps.")] = 300,
    device_us: Annotated[int, typer.Option(min=0, help="How long the null forward takes.")] = 1000,
    plain: Annotated[bool, typer.Option("--plain", help="The plain loop, without overlap.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every sampling option, a host pool, generated pages.")] = False,
    arrivals: Annotated[int, typer.Option(min=0, help="A prompt arrives with every so many steps; 0: none.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure the worker's loop around a model whose forward does nothing."""
    report = measure(PhaseRun(rows, steps, device_us, not plain, full, arrivals))
    typer.echo(msgspec.json.encode(report).decode() if as_json else report_text(report))


def report_text(report: PhaseReport) -> str:
    cost = f"{report.total_us} us of CPU a step (± {report.spread_us})"
    lines = [f"{report.mode}: {report.rows} rows, {report.steps} steps: {cost}"]
    for phase, micros in report.phases_us.items():
        wait = f"   waits {report.waits_us[phase]:.1f}" if phase in WAITS else ""
        lines.append(f"  {phase:<12}{micros:>9.1f}{wait}")
    lines.append("  " + ", ".join(f"{name} {count}" for name, count in report.ops.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
