"""A web site on loopback that answers as a test says, and a network on which names lead to it or elsewhere."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, dict[str, str], bytes | Iterable[bytes]]


@dataclass
class Site:
    """`pages` by path: status, headers, body (pieces are sent without a length). `asked`: paths, as they came."""

    port: int
    pages: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@contextmanager
def media_site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            site.headers.append({name.lower(): value for name, value in self.headers.items()})
            status, headers, body = site.pages.get(self.path, (404, {}, b""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if isinstance(body, bytes) and "content-length" not in headers:
                self.send_header("content-length", str(len(body)))
            self.end_headers()
            try:
                for piece in [body] if isinstance(body, bytes) else body:
                    self.wfile.write(piece)
                    self.wfile.flush()
            except OSError:
                pass  # the client has seen enough

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site = Site(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def resolver(addresses: dict[str, list[str]]) -> Callable[..., list[tuple[object, ...]]]:
    """Stands for `socket.getaddrinfo`: names have these addresses, any other fails."""

    def getaddrinfo(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses[host]]

    return getaddrinfo
