import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.checkpoints import write_directory

COMMIT = "c0ffee" * 6 + "c0ff"
RESOLVE = """
import json, sys
from pathlib import Path
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.loader.errors import CheckpointError
reports = []
try:
    path = str(resolve_checkpoint(sys.argv[1], cache_dir=Path(sys.argv[2]), progress=lambda *r: reports.append(r)).path)
    print(json.dumps({"path": path, "reports": reports}))
except CheckpointError as error:
    print(json.dumps({"error": str(error)}))
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def _resolve(spec: str, home: Path, environment: Mapping[str, str]) -> dict:
    """The result in a fresh process: the hub's client reads its settings when it is imported."""
    command = [sys.executable, "-c", RESOLVE, spec, str(home / "cache")]
    clean = {name: value for name, value in os.environ.items() if "PROXY" not in name.upper()}
    settings = {**clean, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    run = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


class _Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download of one small repository needs."""

    files: Mapping[str, bytes] = {}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        prefix = f"/org/name/resolve/{COMMIT}/"
        if path == "/api/models/org/name/revision/main":
            self._send(json.dumps({"id": "org/name", "sha": COMMIT}).encode())
        elif path == f"/api/models/org/name/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            self._send(json.dumps(entries).encode())
        elif path.startswith(prefix) and path.removeprefix(prefix) in self.files:
            data = self.files[path.removeprefix(prefix)]
            self._send(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        elif path == "/api/models/org/name/revision/v9":
            self._fail(404, "RevisionNotFound")
        elif path.startswith("/api/models/org/gated/"):
            self._fail(403, "GatedRepo")
        elif path.startswith("/api/models/org/absent/"):
            self._fail(404, "RepoNotFound")
        else:
            self._fail(404, "")

    do_HEAD = do_GET

    def _send(self, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment that leads to a small hub on this machine."""
    directory = tmp_path_factory.mktemp("repository")
    write_directory(directory)
    contents = {path.name: path.read_bytes() for path in directory.iterdir()}
    handler = type("Hub", (_Hub,), {"files": {**contents, "original/model.safetensors": b"copy", "README.md": b"#"}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_repository_is_downloaded_once_and_found_offline(hub: dict[str, str], tmp_path: Path):
    first = _resolve("org/name", tmp_path, hub)
    files = {path.name: path.stat().st_size for path in Path(first["path"]).iterdir()}
    assert "model.safetensors.index.json" in files
    assert "README.md" not in files
    assert "original" not in files, "a second copy of the weights is not downloaded"
    labels = {label for label, _, _ in first["reports"]}
    assert labels == {"downloading org/name"}
    assert first["reports"][-1][1:] == [sum(files.values())] * 2
    assert _resolve("org/name", tmp_path, {"HF_HUB_OFFLINE": "1"})["path"] == first["path"]


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("org/absent", "no such public repository"),
        ("org/gated", "https://huggingface.co/org/gated"),
        ("org/name@v9", "at revision v9: the repository has no such revision"),
    ],
)
def test_refusals_of_the_hub_are_explained(hub: dict[str, str], tmp_path: Path, spec: str, part: str):
    assert part in _resolve(spec, tmp_path, hub)["error"]


@pytest.mark.parametrize(
    "environment",
    [
        {"HF_HUB_OFFLINE": "1"},
        {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
    ],
    ids=["switched off", "unreachable"],
)
def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, environment: dict[str, str]):
    error = _resolve("org/name", tmp_path, environment)["error"]
    assert error.startswith("hub checkpoint org/name: not downloaded on this machine")
    assert "give its directory as checkpoint" in error


def test_a_proxy_that_refuses_is_no_traceback(tmp_path: Path):
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            self.send_error(403)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {"HF_HUB_OFFLINE": "0", "HTTPS_PROXY": f"http://127.0.0.1:{server.server_port}"}
    try:
        assert "the hub cannot be reached" in _resolve("org/name", tmp_path, environment)["error"]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
