"""Packages of the front process load no torch, and `mstar version` is quick. Imports run in fresh interpreters."""

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import PACKAGE, ROOT, module_name, package_files, relative

# Packages whose every module has to import without torch.
TORCH_FREE = [
    "mstar.api_server",
    "mstar.client",
    "mstar.communication.bus",
    "mstar.communication.messages",
    "mstar.communication.wire",
    "mstar.conductor",
    "mstar.config",
    "mstar.envs",
    "mstar.graph",
    "mstar.platforms",
    "mstar.streaming",
]
HEAVY = ("torch", "transformers", "xgrammar")
VERSION_CPU_S = 0.5

PROBE = f"""
import importlib, json, sys
loaded = {{}}
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded[name] = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
print(json.dumps(loaded))
"""


def _modules_of(name: str) -> list[str]:
    return [m for m in map(module_name, package_files()) if m == name or m.startswith(name + ".")]


def _loaded(modules: list[str]) -> dict[str, list[str]]:
    """Heavy packages that are loaded after each import, all in one fresh interpreter, in that order."""
    run = subprocess.run([sys.executable, "-c", PROBE, *modules], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", TORCH_FREE)
def test_imports_without_torch(name: str):
    modules = _modules_of(name)
    assert modules, f"{name} is missing"
    assert {module: heavy for module, heavy in _loaded(modules).items() if heavy} == {}


def test_model_declarations_import_without_torch():
    modules = [module_name(path) for path in sorted((PACKAGE / "model").glob("*/model.py"))]
    assert modules, "no model found"
    assert {module: heavy for module, heavy in _loaded(modules).items() if heavy} == {}


def test_models_that_tests_serve_are_declared_without_torch(monkeypatch: pytest.MonkeyPatch):
    """All processes of a server import them, so each start would take seconds more."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "test"))
    modules = ["support.slow_llama", "support.faults.served", "support.composite.served", "soak.models"]
    assert {module: heavy for module, heavy in _loaded(modules).items() if heavy} == {}


def test_the_probe_sees_torch():
    assert _loaded(["mstar", "torch"]) == {"mstar": [], "torch": ["torch"]}


def test_version_is_quick():
    script = Path(sys.executable).parent / "mstar"
    cpu_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run([str(script), "version"], capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run.returncode == 0, run.stderr
        cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert run.stdout.split()[-1] == importlib.import_module("mstar").__version__
    assert min(cpu_s) < VERSION_CPU_S, f"CPU seconds of three runs: {cpu_s}"


def test_every_package_has_an_init_file():
    folders = {path.parent for path in package_files()}
    assert sorted(relative(folder) for folder in folders if not (folder / "__init__.py").exists()) == []
    assert importlib.util.find_spec("mstar") is not None
