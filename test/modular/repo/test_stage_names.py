"""The nine stages of the worker's loop have the same names, in the same order, everywhere they are written down."""

import ast
import re
from pathlib import Path

import pytest
from support.repository import PACKAGE, ROOT, tree

from mstar.profile.phases import PHASES, WAITS

WORKER = tree(PACKAGE / "worker" / "worker.py")


def _function(name: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(WORKER) if isinstance(node, ast.FunctionDef) and node.name == name)


def _marks(name: str) -> list[str]:
    """Stages that a function charges time to, in source order."""
    calls = [
        node for node in ast.walk(_function(name)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    marks = sorted((call.lineno, call.args[0]) for call in calls if call.func.id == "mark")  # pyright: ignore
    return [argument.value for _, argument in marks if isinstance(argument, ast.Constant)]


def _table_names(path: Path) -> list[str]:
    """First cells of tables, rst or markdown, that are literals naming a stage."""
    return [
        name for name in re.findall(r"^(?:   \* - ``|\| `)(\w+)`", path.read_text(), re.MULTILINE) if name in PHASES
    ]


def test_there_are_nine():
    assert len(PHASES) == len(set(PHASES)) == 9
    assert set(PHASES) >= WAITS


def test_the_worker_has_a_method_for_each_stage():
    methods = {node.name for node in ast.walk(WORKER) if isinstance(node, ast.FunctionDef)}
    assert [phase for phase in PHASES if phase not in methods] == []


def test_the_loops_charge_every_stage():
    assert set(_marks("tick")) == set(PHASES)
    assert set(_marks("tick_plain")) == set(PHASES)


@pytest.mark.parametrize("page", ["docs/architecture.rst", ".claude/skills/async-worker/SKILL.md"])
def test_a_page_has_the_stages_in_order(page: str):
    assert tuple(_table_names(ROOT / page)) == PHASES


def test_the_benchmark_says_which_stages_are_waits():
    text = (ROOT / "benchmark" / "worker_phases" / "README.md").read_text()
    assert [phase for phase in PHASES if f"`{phase}`" not in text] == []
    lines = [line for line in text.splitlines() if "wait" in line.lower()]
    assert [wait for wait in WAITS if not any(f"`{wait}`" in line for line in lines)] == []
