"""`AGENTS.md`: fourteen numbered invariants, each held by something that exists; the layer map equals the contract."""

import ast
import re

import pytest
from support.repository import ROOT, pyproject

TEXT = (ROOT / "AGENTS.md").read_text()
SECTIONS = re.findall(r"^### (\d+)\. (.+?)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)


def _mechanisms(body: str) -> list[str]:
    held = re.search(r"^Held by:\s(.+?)(?=\n\n|\Z)", body, re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", held[1]) if held else []


def _contracts() -> dict[str, dict]:
    return {contract["id"]: contract for contract in pyproject()["tool"]["importlinter"]["contracts"]}


def _roadmap_titles() -> set[str]:
    return set(re.findall(r"^(.+)\n-+$", (ROOT / "docs" / "roadmap.rst").read_text(), re.MULTILINE))


def holds(mechanism: str) -> bool:
    """Whether a mechanism exists: review, an import contract, a section of the roadmap, or a test."""
    if mechanism == "review" or mechanism in _contracts() or mechanism in _roadmap_titles():
        return True
    path, _, test = mechanism.partition("::")
    file = ROOT / path
    if not file.is_file() or path not in (ROOT / "test" / "cpu-core.txt").read_text().split("\n"):
        return False
    functions = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
    return not test or test in functions


def test_invariants_are_numbered_without_a_gap():
    assert [int(number) for number, _, _ in SECTIONS] == list(range(1, 15))


@pytest.mark.parametrize(("number", "body"), [(number, body) for number, _, body in SECTIONS])
def test_every_invariant_names_mechanisms_that_exist(number: str, body: str):
    mechanisms = _mechanisms(body)
    assert mechanisms, f"invariant {number} has no 'Held by' line"
    assert [mechanism for mechanism in mechanisms if not holds(mechanism)] == []


def test_a_mechanism_that_is_gone_is_noticed():
    assert not holds("test/modular/repo/test_no_such_file.py")
    assert not holds("test/modular/repo/test_agents.py::test_no_such_test")
    assert not holds("no_such_contract")
    assert holds("test/modular/repo/test_agents.py::test_invariants_are_numbered_without_a_gap")


def test_layer_map_lists_the_packages_of_the_contract():
    layers = _contracts()["layers"]["layers"]
    contract = [name.strip().strip("()") for layer in layers for name in layer.split("|")]
    present = [name for name in contract if (ROOT / "mstar" / name).is_dir() or (ROOT / f"mstar/{name}.py").is_file()]
    table = TEXT.split("## Layer map")[1].split("## ")[0]
    mapped = re.findall(r"`mstar/(\w+)(?:\.py)?`", "\n".join(re.findall(r"^\| (.+?) \|", table, re.MULTILINE)))
    assert mapped == present


def test_review_checklist_cites_existing_invariants():
    checklist = (ROOT / ".github" / "review" / "checklist.md").read_text()
    cited = {int(number) for group in re.findall(r"\(([\d, ]+)\)", checklist) for number in group.split(",")}
    assert cited == set(range(1, 15)), "every invariant is asked about, and none that does not exist"
