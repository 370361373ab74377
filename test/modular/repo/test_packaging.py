"""What is installed: every dependency has a reason and a use, pins meet the ranges, the wheel works alone, and the
make targets skip what is done."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.repository import PACKAGE, ROOT, imported_names, package_files, pyproject, tree
from support.server import running

import mstar

# Imported under another name than the distribution's.
IMPORT_NAMES = {"pyzmq": "zmq", "pyyaml": "yaml", "prometheus-client": "prometheus_client", "pillow": "PIL"}
# Needed without being imported by the package.
INDIRECT = {
    "jinja2": "transformers imports it to render chat templates",
    "httptools": "uvicorn picks it up",
}
OPTIONAL = {"flashinfer": "cuda", "fla": "cuda", "triton": "cuda"}  # imports that an extra brings


def _requirements(extra: str | None = None) -> list[Requirement]:
    project = pyproject()["project"]
    lines = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def _pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line)}


def _imported_roots() -> set[str]:
    names = {name for path in package_files() for _, name in imported_names(tree(path))}
    return {name.split(".")[0] for name in names}


def test_every_dependency_says_what_it_is_for():
    lines = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[0].split("dependencies = [", 1)[1]
    entries = [line for line in lines.splitlines() if re.match(r'\s+"', line)]
    assert len(entries) == sum(map(len, (_requirements(), *map(_requirements, ("cuda", "test", "browser", "docs")))))
    assert [line for line in entries if not re.search(r",\s+# \S.{10,}", line)] == []


def test_every_dependency_is_used():
    roots = _imported_roots()
    unused = {
        requirement.name
        for requirement in _requirements()
        if requirement.name not in INDIRECT
        and IMPORT_NAMES.get(requirement.name, requirement.name.replace("-", "_")) not in roots
    }
    assert sorted(unused) == []


def test_every_import_is_a_dependency():
    declared = {IMPORT_NAMES.get(r.name, r.name.replace("-", "_")) for r in _requirements()} | OPTIONAL.keys()
    foreign = {root for root in _imported_roots() if root not in sys.stdlib_module_names and root != "mstar"}
    # Part of fastapi and uvicorn's published interface, and always installed with them.
    assert sorted(foreign - declared - {"starlette", "typing_extensions", "click"}) == []


def test_pins_meet_the_ranges_and_cover_every_direct_dependency():
    pins = _pins()
    direct = [*_requirements(), *_requirements("test"), *_requirements("browser"), *_requirements("docs")]
    assert [r.name for r in direct if canonicalize_name(r.name) not in pins] == []
    assert [str(r) for r in direct if pins[canonicalize_name(r.name)] not in r.specifier] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_the_package_and_the_configurations(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert f"mstar-{mstar.__version__}-" in wheel.name
    configs = [path.name for path in (ROOT / "configs").glob("*.yaml")]
    assert "smollm2.yaml" in configs
    assert [name for name in configs if f"mstar/configs/{name}" not in names] == []
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert any(path.suffix == ".cpp" for path in files), "kernels are compiled where they run"
    assert {path.relative_to(ROOT).as_posix() for path in files} - names == set()
    assert {name.split("/")[0] for name in names} == {"mstar", f"mstar-{mstar.__version__}.dist-info"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment that has the wheel, and finds everything else in this one."""
    environment = tmp_path_factory.mktemp("environment")
    programs = environment / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, timeout=240)
    # Only after pip has run: it is to see nothing of this environment. The .pth files in there are not followed, so a
    # checkout that is installed there stays out of sight.
    [site] = environment.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    return programs


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    return directory


@pytest.mark.network
def test_installed_wheel_finds_its_configurations(installed: Path, elsewhere: Path):
    def run(program: str, *arguments: str) -> str:
        command = [str(installed / program), *arguments]
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=elsewhere, env=outside, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("python", "-c", "import mstar; print(mstar.__file__)").startswith(str(installed.parent))
    assert run("mstar", "version") == f"{mstar.__version__}\n"
    assert "llama on 1 worker" in run("mstar", "check", "smollm2")


@pytest.mark.network
def test_installed_wheel_serves(installed: Path, elsewhere: Path):
    """With the kernels that it ships, where they can be compiled."""
    kernels = "native" if shutil.which("g++") or shutil.which("c++") else "torch"
    command = (str(installed / "mstar"),)
    variables = {"PYTHONPATH": "", "MSTAR_CPU_KERNELS": kernels}
    with running(["smollm2"], elsewhere / "log", command=command, directory=elsewhere, **variables) as server:
        for pid in (server.pid, *server.children()):
            started = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert started.startswith(str(installed)), "every process runs the installed package"
        body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].startswith(" Paris")
        assert server.stop() == 0


def _make(target: str, venv: Path) -> str:
    run = subprocess.run(["make", "-n", target, f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_installs_once(tmp_path: Path):
    assert "pip" in _make("install", tmp_path)
    for name in (".stamp-runtime", ".stamp-dev"):
        (tmp_path / name).touch()
    assert "pip" not in _make("install", tmp_path)
    assert "pip" not in _make("serve", tmp_path)
    os.utime(tmp_path / ".stamp-runtime", (0, 0))
    assert "pip" in _make("serve", tmp_path)


def test_ci_runs_make_test_and_make_test_runs_the_list():
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert re.search(r"^exec make test$", script, re.MULTILINE)
    recipe = re.search(r"^test: install.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    assert "check" in recipe[1]
    assert "pytest -q @test/cpu-core.txt" in recipe[1]
