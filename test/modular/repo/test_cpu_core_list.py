"""`test/cpu-core.txt` is what CI runs: nothing in it twice or missing, no modular test file outside it by accident."""

import re

from support.repository import ROOT, relative

LIST = ROOT / "test" / "cpu-core.txt"
GPU_FILE = re.compile(r"^pytestmark\s*=.*\bpytest\.mark\.gpu\b", re.MULTILINE)


def _entries() -> list[str]:
    return LIST.read_text().split("\n")[:-1]


def test_the_file_ends_with_a_newline_and_holds_one_path_a_line():
    text = LIST.read_text()
    assert text.endswith("\n")
    assert [line for line in _entries() if line != line.strip() or not line] == []


def test_entries_are_sorted_and_unique():
    entries = _entries()
    assert entries == sorted(set(entries))


def test_entries_exist():
    assert [entry for entry in _entries() if not (ROOT / entry).is_file()] == []


def test_every_modular_file_is_listed_or_marked_gpu():
    listed = set(_entries())
    gpu = {
        relative(path) for path in (ROOT / "test" / "modular").rglob("test_*.py") if GPU_FILE.search(path.read_text())
    }
    present = {relative(path) for path in (ROOT / "test" / "modular").rglob("test_*.py")}
    assert sorted(present - gpu - listed) == [], "list these in test/cpu-core.txt or mark the file gpu"
    assert sorted(gpu & listed) == [], "needs an accelerator: CI cannot run it"


def test_test_files_are_named_so_that_pytest_finds_them():
    strays = [
        relative(path)
        for path in (ROOT / "test" / "modular").rglob("*.py")
        if not path.name.startswith("test_") and path.name not in ("conftest.py", "__init__.py")
    ]
    assert strays == [], "builders and references belong in test/support"
