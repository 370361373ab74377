"""Compiling, caching and choosing the kernels."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mstar import envs
from mstar.kernels import ops
from mstar.kernels.cpu import build

RACER = """
import sys
from pathlib import Path
from mstar.kernels.cpu import build
build.__file__, build._SOURCES, build._HEADERS = sys.argv[1] + "/build.py", ("replay.cpp",), ()
print(build.load_or_build(Path(sys.argv[2])))
"""

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler on this machine"
)


@pytest.fixture(autouse=True)
def _torch_afterwards() -> object:
    yield
    ops.use_kernels(None)


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one tiny source in place of the kernels', so that compiling costs nothing."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "replay.cpp").write_text('extern "C" long mstar_vector_width() { return 4; }\n')
    monkeypatch.setattr(build, "__file__", str(folder / "build.py"))
    monkeypatch.setattr(build, "_SOURCES", ("replay.cpp",))
    monkeypatch.setattr(build, "_HEADERS", ())
    return folder


@needs_compiler
def test_a_library_is_built_once_and_again_when_a_source_changes(small_sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = build.load_or_build(cache)
    built = first.stat().st_mtime_ns
    assert build.load_or_build(cache) == first and first.stat().st_mtime_ns == built
    with (small_sources / "replay.cpp").open("a") as source:
        source.write("// another\n")
    second = build.load_or_build(cache)
    assert second != first
    assert build.load_or_build(cache, ("-O0",)) not in (first, second)
    assert len(list((cache / "kernels").iterdir())) == 3  # and no build folder left


@needs_compiler
def test_a_source_that_does_not_compile_is_reported(small_sources: Path, tmp_path: Path) -> None:
    (small_sources / "replay.cpp").write_text("int broken(\n")
    with pytest.raises(build.BuildError, match="broken"):
        build.load_or_build(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "kernels").iterdir())


@needs_compiler
def test_a_cache_that_cannot_be_written_is_reported(small_sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(build.BuildError, match="cannot write the kernel cache"):
        build.load_or_build(tmp_path / "file")


@needs_compiler
def test_processes_may_race_to_the_first_build(small_sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(small_sources), str(cache)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    paths = {racer.communicate(timeout=120)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0] and len(paths) == 1
    assert [str(path) for path in (cache / "kernels").iterdir()] == list(paths)


def test_without_a_compiler_auto_falls_back_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.INFO):
        assert ops.select_kernels("auto") == "torch"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text
    weight, x = torch.randn(4, 4), torch.randn(2, 4)
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), x @ weight.T)
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        ops.select_kernels("native")


def test_the_environment_chooses_and_wrong_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CPU_KERNELS.name, "torch")
    assert ops.select_kernels() == "torch"
    monkeypatch.setenv(envs.CPU_KERNELS.name, "fast")
    with pytest.raises(ValueError, match="fast"):
        ops.select_kernels()
    with pytest.raises(ValueError, match="auto, native or torch"):
        ops.select_kernels("fast")
