"""Names that documentation mentions in literals, and whether they exist: modules, classes, commands, make targets,
paths, environment variables, metrics, routes, configuration keys and identifiers."""

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from support.repository import ROOT, package_files, tree

RST_LITERAL = re.compile(r"``([^`]+)``")
MD_LITERAL = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
MD_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND_LINE = re.compile(r"^\s*(?:\$ )?((?:mstar|make) [^#\n]*)", re.MULTILINE)
TOP_FOLDERS = ("mstar", "docs", "test", "configs", "benchmark", "perf_testing", ".github", ".claude", ".ci")
# Words of other projects that look like names of this one.
FOREIGN = {"SmolLM2", "NaN"}


def documents() -> list[Path]:
    """Everything that promises names: pages, README, contributor pages, skills, review checklist."""
    return sorted(
        [
            *(ROOT / "docs").glob("*.rst"),
            *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
            *(ROOT / ".claude" / "skills").rglob("*.md"),
            *(ROOT / ".github").rglob("*.md"),
        ]
    )


def literals(path: Path) -> set[str]:
    """Literals of a page, and the command lines of its examples."""
    text = path.read_text()
    found = {command.strip() for command in COMMAND_LINE.findall(text)}
    if path.suffix == ".rst":
        return found | {" ".join(name.split()) for name in RST_LITERAL.findall(text)}
    return found | set(MD_LITERAL.findall(MD_FENCE.sub("", text)))


@cache
def _source() -> str:
    return "\n".join(path.read_text() for path in package_files())


@cache
def _identifiers() -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", _source()))


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Every class of the package by name. A type alias counts as a class without members."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in package_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
        for node in tree(path).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, [])
    return found


def _members(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    members: set[str] = set()
    for definition in classes().get(name, []):
        for node in ast.walk(definition):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                members.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                members.add(node.target.id)
            elif isinstance(node, ast.Assign):
                members.update(target.id for target in node.targets if isinstance(target, ast.Name))
        for base in definition.bases:
            if isinstance(base, ast.Name) and base.id not in seen:
                members |= _members(base.id, seen | {name})
    return members


def _exists_dotted(name: str) -> bool:
    """`mstar.a.b.C.d`: the longest importable prefix, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:cut])
        if not (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()):
            continue
        value: object = importlib.import_module(".".join(parts[:cut]))
        for part in parts[cut:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@cache
def commands() -> dict[str, set[str]]:
    """Command → its options, as the command line itself knows them."""
    import typer.main

    from mstar.bench.command import app as bench_app
    from mstar.cli import app

    group = typer.main.get_command(app)
    found = dict(group.commands)  # pyright: ignore[reportAttributeAccessIssue]
    found["bench"] = typer.main.get_command(bench_app)  # to which `mstar bench` hands its words on
    return {
        name: {option for parameter in command.params for option in parameter.opts} for name, command in found.items()
    }


def _exists_command(line: str) -> bool:
    words = line.split()
    if words[1].startswith("-"):
        return words[1] == "--help"
    options = {word.split("=")[0] for word in words[2:] if word.startswith("--")} - {"--help"}
    return words[1] in commands() and options <= commands()[words[1]]


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _exists_path(name: str) -> bool:
    return bool(list(ROOT.glob(name.split("::")[0].rstrip("/"))))


def _exists_class(name: str) -> bool:
    head, *rest = re.sub(r"\(.*\)$", "", name).split(".")
    if head in FOREIGN:
        return True
    if head not in classes():
        return False
    return all(part in _members(head) for part in rest)


def _exists_variable(name: str) -> bool:
    from mstar.envs import KNOBS

    return name in {knob.name for knob in KNOBS}


def _exists_metric(name: str) -> bool:
    stem = name.split("{")[0].removesuffix("_total")
    return bool(re.search(rf"\b{re.escape(stem)}(_total|_bucket|_sum|_count)?\b", _source()))


def _exists_route(name: str) -> bool:
    path = name.split(" ", 1)[1]
    return re.search(rf"[\"']{re.sub(r'{[^}]*}', '{[^}]*}', path)}[\"']", _source()) is not None


def _exists_identifier(name: str) -> bool:
    return all(part in _identifiers() for part in name.split("."))


# The first pattern that matches decides. A literal that matches none promises nothing.
KINDS: list[tuple[str, re.Pattern[str], Callable[[str], bool]]] = [
    ("environment variable", re.compile(r"MSTAR_(?!TEST_)[A-Z_]+"), _exists_variable),
    ("metric", re.compile(r"mstar_[a-z_]+(\{.*\})?"), _exists_metric),
    ("path", re.compile(rf"({'|'.join(map(re.escape, TOP_FOLDERS))})/[\w./*:-]*"), _exists_path),
    ("path", re.compile(r"(Makefile|LICENSE|[\w-]+\.(md|toml|txt))"), _exists_path),
    ("module or attribute", re.compile(r"mstar(\.\w+)+"), _exists_dotted),
    ("command", re.compile(r"mstar .+"), _exists_command),
    ("make target", re.compile(r"make [a-z].*"), lambda line: line.split()[1] in make_targets()),
    ("route", re.compile(r"(GET|POST|DELETE|PUT) /\S*"), _exists_route),
    ("class", re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*(\.\w+)*(\(.*\))?"), _exists_class),
    ("identifier", re.compile(r"[a-z]+(_[a-z0-9]+)+(\.[a-z_0-9]+)*|[a-z]+(\.[a-z]+_[a-z_0-9]+)+"), _exists_identifier),
]


def kind_of(name: str) -> str | None:
    """Which promise a literal makes."""
    return next((kind for kind, pattern, _ in KINDS if pattern.fullmatch(name)), None)


def exists(name: str) -> bool:
    """Whether what the literal names is there; True for a literal that promises nothing."""
    return next((check(name) for _, pattern, check in KINDS if pattern.fullmatch(name)), True)


def missing(path: Path) -> Iterator[str]:
    """Names of a page that do not exist, with what they claim to be."""
    for name in sorted(literals(path)):
        if not exists(name):
            yield f"{name} ({kind_of(name)})"
