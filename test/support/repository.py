"""The repository as text: where it is, which files it has and what they contain. For tests of the project's rules."""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mstar"


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def relative(path: Path) -> str:
    """Path below the repository root, with slashes."""
    return path.relative_to(ROOT).as_posix()


@cache
def package_files() -> tuple[Path, ...]:
    """Every Python file of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def module_name(path: Path) -> str:
    """Dotted name of a file of the package: mstar/graph/base.py → mstar.graph.base, an `__init__.py` → its package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(module: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import anywhere below `module`, typing-only ones included.
    `from a import b` yields `a.b`: whether b is a module or an attribute is the same to a rule about prefixes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`torch.cuda.Stream` for such an attribute chain; what is not a plain name is written as an empty first part, so
    that `f(x).item` gives `.item`."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))


def chains(module: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute chain, outermost only."""
    inner = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield node.lineno, dotted(node)
