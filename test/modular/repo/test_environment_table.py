"""Environment variables: the documented table equals the rows of `mstar.envs`, each is read where it says, and values
are checked."""

import os
import re
import tempfile
from pathlib import Path

import pytest
from support.repository import ROOT, package_files

from mstar import envs

TABLE = ROOT / "docs" / "environment_variables.rst"


def _documented() -> list[list[str]]:
    """Cells of the table's rows below the header, markup removed."""
    rows: list[list[str]] = []
    for line in TABLE.read_text().splitlines():
        if match := re.match(r"   (\* - |  - )(.*)", line):
            if match[1] == "* - ":
                rows.append([])
            rows[-1].append(match[2].replace("``", ""))
        elif rows and line.startswith("       ") and line.strip():
            rows[-1][-1] += " " + line.strip().replace("``", "")
    return rows[1:]


def test_documentation_equals_the_rows():
    assert _documented() == [[k.name, k.type, k.default, k.meaning, k.reader] for k in envs.KNOBS]


def test_rows_are_complete_and_sorted():
    named = [value for value in vars(envs).values() if isinstance(value, envs.Knob)]
    assert sorted(map(id, named)) == sorted(map(id, envs.KNOBS))
    assert [k.name for k in envs.KNOBS] == sorted(k.name for k in envs.KNOBS)
    assert all(re.fullmatch(r"MSTAR_[A-Z]+(_[A-Z]+)*", k.name) for k in envs.KNOBS)


@pytest.mark.parametrize("knob", envs.KNOBS, ids=lambda knob: knob.name)
def test_reader_reads_it(knob: envs.Knob):
    attribute = next(name for name, value in vars(envs).items() if value is knob)
    asking = {
        ".".join(path.relative_to(ROOT).parts[:2])
        for path in package_files()
        if re.search(rf"\b{attribute}\.get\(\)", path.read_text())
    }
    assert asking == set(knob.reader.split(", "))


def test_unset_and_empty_mean_the_default(monkeypatch: pytest.MonkeyPatch):
    for text in (None, "", "  "):
        monkeypatch.delenv("MSTAR_WIRE_CODEC", raising=False)
        if text is not None:
            monkeypatch.setenv("MSTAR_WIRE_CODEC", text)
        assert envs.WIRE_CODEC.get() == "msgpack"
    monkeypatch.delenv("MSTAR_SOCKET_DIR", raising=False)
    assert envs.SOCKET_DIR.get() == Path(tempfile.gettempdir())


def test_values_are_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MSTAR_WIRE_CODEC", "JSON")
    assert envs.WIRE_CODEC.get() == "json"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MSTAR_CACHE_DIR", "cache")
    assert envs.CACHE_DIR.get() == tmp_path / "cache"


@pytest.mark.parametrize("name", ["MSTAR_WIRE_CODEC", "MSTAR_CPU_KERNELS", "MSTAR_LOG_LEVEL"])
def test_a_wrong_value_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str):
    knob = next(knob for knob in envs.KNOBS if knob.name == name)
    monkeypatch.setenv(name, "nonsense")
    with pytest.raises(envs.KnobError, match=rf"{name}='nonsense'.*{knob.get.__self__.default}"):
        knob.get()


@pytest.mark.parametrize("knob", [envs.SOCKET_DIR, envs.CACHE_DIR], ids=lambda knob: knob.name)
def test_a_path_that_no_message_can_carry_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, knob: envs.Knob):
    monkeypatch.setenv(knob.name, os.fsdecode(b"/tmp/\xff"))
    with pytest.raises(envs.KnobError, match=rf"{knob.name}=.*UTF-8") as raised:
        knob.get()
    assert str(raised.value).isascii(), "it can be printed"


def test_unknown_variables_are_found(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("MSTAR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MSTAR_CACHEDIR", "x")
    monkeypatch.setenv("MSTAR_CACHE_DIR", "x")
    monkeypatch.setenv("MSTAR_TEST_FULL", "1")
    assert envs.unknown_variables() == ["MSTAR_CACHEDIR"]


def test_a_child_gets_this_environment_and_the_overrides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MSTAR_LOG_LEVEL", "error")
    child = envs.child_environment({"OMP_NUM_THREADS": "1"})
    assert child["MSTAR_LOG_LEVEL"] == "error"
    assert child["OMP_NUM_THREADS"] == "1"
    child["MSTAR_LOG_LEVEL"] = "debug"
    assert os.environ["MSTAR_LOG_LEVEL"] == "error"
