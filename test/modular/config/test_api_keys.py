"""Where API keys come from, and what is none."""

from pathlib import Path

import pytest

from mstar.config.api_keys import AcceptedKeys, accepted_keys
from mstar.config.load import ConfigError
from mstar.config.schema import ServerConfig


@pytest.fixture(autouse=True)
def _no_keys_around(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MSTAR_API_KEYS", raising=False)


def test_without_any_none_is_asked_for():
    assert accepted_keys(ServerConfig()) == AcceptedKeys((), ())


def test_all_sources_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "keys"
    path.write_text("# ours\n\nfile-1\n  file-2  \nboss admin\n#file-3\n")
    monkeypatch.setenv("MSTAR_API_KEYS", "env-1, env-2,yaml-1")
    server = ServerConfig(api_keys=("yaml-1",), admin_keys=("root",), api_keys_file=str(path))
    keys, admin_keys = accepted_keys(server)
    assert sorted(keys) == ["boss", "env-1", "env-2", "file-1", "file-2", "root", "yaml-1"]
    assert sorted(admin_keys) == ["boss", "root"]


def test_an_admin_key_alone_closes_the_server():
    assert accepted_keys(ServerConfig(admin_keys=("root",))) == AcceptedKeys(("root",), ("root",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "there is no key in"),
        (b"# only words\n\n", "there is no key in"),
        (b"good\nsecret1 secret2\n", "line 2 of"),
        (b"secret1 admin more\n", "line 1 of"),
        (b"\xff\xfe\n", "it is no text"),
        (b"a" * 513, "1 to 512 printable characters"),
        (b"se\x00cret\n", "printable characters"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: bytes, said: str):
    path = tmp_path / "keys"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as refused:
        accepted_keys(ServerConfig(api_keys_file=str(path)))
    assert said in str(refused.value) and "secret" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*gone: No such file"):
        accepted_keys(ServerConfig(api_keys_file=str(tmp_path / "gone")))


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "x" * 513])
def test_what_is_no_key(key: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError):
        accepted_keys(ServerConfig(api_keys=(key,)))
    monkeypatch.setenv("MSTAR_API_KEYS", f"fine,{key}")
    if key.strip() == key and "\n" not in key and key:
        with pytest.raises(ConfigError):
            accepted_keys(ServerConfig())
