"""Where measurements are kept: one JSON file per harness under `benchmark/results/`, with what they were taken on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mstar
from mstar.platforms import current_platform

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What a number depends on besides the code."""
    return {
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": current_platform.num_cores(),
        "arch": current_platform.arch(),
        "bf16": current_platform.has_bf16("cpu"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "mstar": mstar.__version__,
    }


def _commit() -> str:
    """Of the working tree; "+" behind it where files differ from it."""
    git = ("git", "-C", str(RESULTS.parent.parent))
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def write_result(name: str, content: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Write `NAME.json` into `benchmark/results`, or into another folder."""
    folder = RESULTS if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(content, indent=2) + "\n")
    return file


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return {"median": round(median, 4), "min": round(ordered[0], 4), "max": round(ordered[-1], 4)}


def load_average() -> float:
    """Runnable threads of this machine over the last minute: what else a measurement had to share it with."""
    return round(os.getloadavg()[0], 2)
