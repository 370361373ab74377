"""Media that a request names: bytes of data URLs, and of http(s) URLs that the deployment allows. Front loop only;
nothing is decoded here but base64, files are looked at in the preprocess pool.

What a client may make this server fetch is bounded on every side: hosts are allow-listed, every redirect is checked as
the first URL was, addresses that are not public are refused, and the connection goes to the address that was checked.
"""

from __future__ import annotations

import asyncio
import binascii
import ssl
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote_to_bytes, urljoin, urlsplit

import httpcore

from mstar.api_server.checked_network import CheckedNetwork, RefusedAddressError
from mstar.api_server.errors import MAX_SHOWN, bad_request
from mstar.conductor.events import RefusedError
from mstar.config.schema import MediaConfig

MAX_FETCHES = 16
"""At once, for all requests together."""
NOTHING_REMOTE = MediaConfig()
PORTS = {"http": 80, "https": 443}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_TARGET_CHARS = "/?#[]@!$&'()*+,;=:%-._~"
HEADERS = [(b"accept", b"*/*"), (b"accept-encoding", b"identity"), (b"user-agent", b"mstar")]


class MediaSource(NamedTuple):
    """A URL in a request; `field` is where it stands."""

    url: str
    field: str


class MediaLoader:
    """Loads what requests name, as the deployment's `server.media` allows."""

    def __init__(
        self, config: MediaConfig = NOTHING_REMOTE, network: httpcore.AsyncNetworkBackend | None = None
    ) -> None:
        """`network`: what connects; None, it does so as `config` says."""
        self._config = config
        self._network = CheckedNetwork(config.allows_private_addresses) if network is None else network
        self._free = asyncio.Semaphore(MAX_FETCHES)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpcore.default_ssl_context()

    async def load(self, sources: Sequence[MediaSource]) -> list[bytes]:
        """The files, in order.

        Raises:
            RefusedError: 400, one of them cannot be had; it names the field.
        """
        found: dict[int, bytes] = {}
        remote: dict[int, MediaSource] = {}
        room = self._config.max_bytes
        for index, source in enumerate(sources):
            if source.url[:5].lower() == "data:":
                found[index] = data = data_url_bytes(source, room)
                room -= len(data)
            else:
                remote[index] = source
        if remote:
            found |= await self._fetch_all(remote, room)
        return [found[index] for index in range(len(sources))]

    async def _fetch_all(self, sources: dict[int, MediaSource], room: int) -> dict[int, bytes]:
        """One time limit and one size limit hold for all of them together."""
        for source in sources.values():
            self._checked(source.url, source.field)
        budget = _Budget(room)
        tasks = [asyncio.create_task(self._fetch(source, budget)) for source in sources.values()]
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return dict(zip(sources, await asyncio.gather(*tasks), strict=True))
        except TimeoutError:
            message = f"The media were not fetched within {self._config.timeout_s:g} s."
            raise bad_request(message, next(iter(sources.values())).field, "media_not_fetched") from None
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch(self, source: MediaSource, budget: _Budget) -> bytes:
        async with self._free:
            try:
                return await self._follow(source, budget)
            except RefusedAddressError as error:
                raise bad_request(f"{source.field}: {error}", source.field, "media_url_refused") from None
            except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as error:
                message = f"{source.field}: the URL could not be fetched ({type(error).__name__})."
                raise bad_request(message, source.field, "media_not_fetched") from None

    async def _follow(self, source: MediaSource, budget: _Budget) -> bytes:
        url = source.url
        for _ in range(self._config.max_redirects + 1):
            target = self._checked(url, source.field)
            pool = httpcore.AsyncConnectionPool(self._tls, max_connections=1, network_backend=self._network)
            async with pool, pool.stream("GET", target, headers=HEADERS) as response:
                if response.status not in REDIRECTS:
                    return await self._body(response, source.field, budget)
                url = _redirected(url, _header(response, b"location").decode("latin-1"), source.field)
        most = self._config.max_redirects
        raise bad_request(
            f"{source.field}: the URL redirects more than {most} times.", source.field, "media_not_fetched"
        )

    async def _body(self, response: httpcore.Response, field: str, budget: _Budget) -> bytes:
        if response.status != 200:
            message = f"{field}: the URL was answered with status {response.status}."
            raise bad_request(message, field, "media_not_fetched")
        if _header(response, b"content-encoding").strip().lower() not in (b"", b"identity"):
            raise bad_request(f"{field}: the URL was answered compressed.", field, "media_not_fetched")
        length = _header(response, b"content-length")
        if length.isdigit() and (len(length) > 18 or int(length) > budget.left):
            raise self._too_large(field)
        body = bytearray()
        async for part in response.aiter_stream():
            body += part
            if not budget.take(len(part)):
                raise self._too_large(field)
        return bytes(body)

    def _too_large(self, field: str) -> RefusedError:
        message = f"{field}: the media of a request may have {self._config.max_bytes} bytes together."
        return bad_request(message, field, "media_too_large")

    def _checked(self, url: str, field: str) -> httpcore.URL:
        """The URL to ask, made of the parts that were checked, so that nothing reads it in another way."""
        parts, host, port = _split(url, field)
        if not self._allows(host, port, parts.scheme):
            message = (
                f"{field}: this server does not fetch from {host[:MAX_SHOWN]!r}. Send a data URL, or allow the host in "
                "server.media.allowed_hosts."
            )
            raise bad_request(message, field, "media_url_refused")
        target = quote(parts.path or "/", safe=_TARGET_CHARS)
        if parts.query:
            target += "?" + quote(parts.query, safe=_TARGET_CHARS)
        return httpcore.URL(scheme=parts.scheme, host=host, port=port, target=target)

    def _allows(self, host: str, port: int, scheme: str) -> bool:
        for entry in self._config.allowed_hosts:
            name, colon, number = entry.lower().rpartition(":")
            if not colon:
                name, number = entry.lower(), str(PORTS[scheme])
            is_named = name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]))
            if is_named and number == str(port):
                return True
        return False


class _Budget:
    """Bytes that the media of one request may still have."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, num_bytes: int) -> bool:
        self.left -= num_bytes
        return self.left >= 0


def data_url_bytes(source: MediaSource, max_bytes: int) -> bytes:
    """The bytes of `data:[TYPE];base64,DATA`. The type is not looked at: files say themselves what they are. Of base64
    both alphabets will do, with or without padding, with white space anywhere.

    Raises:
        RefusedError: 400.
    """
    field = source.field
    head, comma, payload = source.url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise bad_request(f"{field}: a data URL must be 'data:TYPE;base64,DATA'.", field, "invalid_data_url")
    try:
        raw = unquote_to_bytes(payload) if "%" in payload else payload.encode("ascii")
        raw = raw.translate(_URL_SAFE, _SPACE).rstrip(b"=")
        data = binascii.a2b_base64(raw + b"=" * (-len(raw) % 4), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise bad_request(f"{field}: the data is not base64.", field, "invalid_data_url") from None
    if not data:
        raise bad_request(f"{field}: the data is empty.", field, "invalid_data_url")
    if len(data) > max_bytes:
        raise bad_request(f"{field}: the media are larger than {max_bytes} bytes.", field, "media_too_large")
    return data


def _split(url: str, field: str) -> tuple[SplitResult, str, int]:
    """A URL's parts, its host in ASCII and its port."""
    try:
        if any(character <= " " or character == "\x7f" for character in url):
            raise ValueError("it has control characters or spaces")
        parts = urlsplit(url)
        if parts.scheme not in PORTS:
            raise ValueError("it must be a data URL, or an http or https one")
        if parts.username is not None or parts.password is not None:
            raise ValueError("it must not have a user")
        host = (parts.hostname or "").encode("idna").decode("ascii").rstrip(".").lower()
        if not host:
            raise ValueError("it has no host")
        return parts, host, parts.port or PORTS[parts.scheme]
    except ValueError as error:  # UnicodeError is one
        raise _unreadable(url, field, error) from None


def _redirected(url: str, location: str, field: str) -> str:
    """Where the answer of `url` leads."""
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise _unreadable(location, field, error) from None


def _unreadable(url: str, field: str, error: ValueError) -> RefusedError:
    return bad_request(f"{field}: {url[:MAX_SHOWN]!r} cannot be fetched: {error}.", field, "media_url_refused")


def _header(response: httpcore.Response, name: bytes) -> bytes:
    return next((value for key, value in response.headers if key.lower() == name), b"")
