"""Connections to public addresses only. Front loop only.

A name is resolved here, all its addresses are checked, and the connection goes to one of these: a name that resolves
differently a moment later gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import cast

import httpcore

_EMBEDDING = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for an IPv4 one behind a translator (RFC 6052)."""


class RefusedAddressError(Exception):
    """A host has an address that is not public."""


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """See the module docstring. `allows_private`: nothing is refused."""

    def __init__(self, allows_private: bool) -> None:
        self._allows_private = allows_private
        self._inner = cast(httpcore.AsyncNetworkBackend, httpcore.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        if not (self._allows_private or all(map(is_public, addresses))):
            raise RefusedAddressError("the URL leads to an address that is not public")
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


def is_public(text: str) -> bool:
    """Whether anyone on the internet could reach the address, directly or as the one that it stands for."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if embedded is None and address in _EMBEDDING:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None and not is_public(str(embedded)):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast
