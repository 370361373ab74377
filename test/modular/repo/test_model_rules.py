"""What a model package may import: declarations, layers and its own files; no other model and none of the machinery."""

import ast
from pathlib import Path

import pytest
from support.repository import PACKAGE, imported_names, relative, tree

MODEL = PACKAGE / "model"
SHARED = {"loader"}  # packages under mstar/model that are not models

# Below mstar.engine only the files that hold declarations.
DECLARATIONS = {"spec", "step", "cuda_graph_config", "chunking", "submodule"}
ALLOWED_PACKAGES = ("mstar.layers", "mstar.graph", "mstar.streaming", "mstar.config", "mstar.platforms", "mstar.model")
TORCH_FREE_FILE = "model.py"
TORCH_PACKAGES = ("torch", "mstar.layers", "mstar.engine")


def _model_packages() -> list[Path]:
    return sorted(path.parent for path in MODEL.glob("*/__init__.py") if path.parent.name not in SHARED)


MODELS = {package.name for package in _model_packages()} | {"some_model", "other_model"}


def complaints(module: ast.Module, own: str, file_name: str) -> list[str]:
    """What is wrong with the imports of `file_name` in the model package `own`."""
    found = []
    for line, name in imported_names(module):
        parts = name.split(".")
        if parts[0] == "mstar" and not _may_import(parts, own):
            found.append(f"{line}: {name}")
        if file_name == TORCH_FREE_FILE and any(name == p or name.startswith(p + ".") for p in TORCH_PACKAGES):
            if not _is_declaration(parts):
                found.append(f"{line}: {name} in the half of the model that runs without torch")
    return found


def _is_declaration(parts: list[str]) -> bool:
    return parts[:2] == ["mstar", "engine"] and not DECLARATIONS.isdisjoint(parts[2:]) and "submodule" not in parts[2:3]


def _may_import(parts: list[str], own: str) -> bool:
    if parts[:2] == ["mstar", "engine"]:
        return not DECLARATIONS.isdisjoint(parts[2:])
    if parts[:2] == ["mstar", "model"] and len(parts) > 2 and parts[2] in MODELS:
        return parts[2] == own
    return ".".join(parts[:2]) in ALLOWED_PACKAGES


def test_models_import_only_what_they_may():
    packages = _model_packages()
    assert packages, "no model package found: this test would check nothing"
    found = [
        f"{relative(path)}:{complaint}"
        for package in packages
        for path in sorted(package.rglob("*.py"))
        for complaint in complaints(tree(path), package.name, path.name)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "from mstar.engine.resources.manager import KVManager",
        "from mstar.engine.cuda_graph_runner import Runner",
        "import mstar.engine.engine",
        "from mstar.kernels import attention",
        "from mstar.communication.wire import encode",
        "from mstar.envs import LOG_LEVEL",
        "from mstar.distributed import communication",
        "from mstar.worker.worker import Worker",
    ],
)
def test_machinery_is_refused(line: str):
    assert complaints(ast.parse(line), "some_model", "submodules.py")


def test_another_model_is_refused():
    line = ast.parse("from mstar.model.other_model.network import Decoder")
    assert complaints(line, "some_model", "network.py")
    assert complaints(line, "other_model", "submodules.py") == []


@pytest.mark.parametrize("line", ["import torch", "from torch import nn", "from mstar.layers.norm import RMSNorm"])
def test_the_declaring_half_is_free_of_torch(line: str):
    assert complaints(ast.parse(line), "some_model", "model.py")
    assert complaints(ast.parse(line), "some_model", "network.py") == []


def test_declarations_are_allowed():
    source = (
        "from mstar.engine.resources.spec import NodeResourceSpec\n"
        "from mstar.engine.submodule import NodeSubmodule\n"
        "from mstar.graph.base import GraphNode\n"
        "from mstar.streaming.chunk_policy import fixed\n"
        "from mstar.model.base import Model\n"
    )
    assert complaints(ast.parse(source), "some_model", "submodules.py") == []
