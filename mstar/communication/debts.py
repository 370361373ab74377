"""What this worker owes its peers: tickets of tensors it has copied out, and credit for stream items it has consumed.

Loop thread of a worker. Filled while frames are read and steps are routed, paid with the next message to the peer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mstar.communication.messages import AckFrame


class RowFailure(NamedTuple):
    """Something of this request could not be sent or fetched: it cannot go on."""

    rid: str
    detail: str


@dataclass(slots=True)
class _Owed:
    tickets: list[int] = field(default_factory=list)
    rids: list[str] = field(default_factory=list)
    edges: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class Debts:
    """By rank of the peer."""

    def __init__(self) -> None:
        self._owed: dict[int, _Owed] = {}

    def owe_ticket(self, peer: int, ticket: int) -> None:
        self._of(peer).tickets.append(ticket)

    def owe_credits(self, peer: int, rids: list[str], edges: list[int], counts: list[int]) -> None:
        owed = self._of(peer)
        owed.rids += rids
        owed.edges += edges
        owed.counts += counts

    def peers(self) -> list[int]:
        """Ranks that something is owed to."""
        return list(self._owed)

    def pay(self, peer: int, src: int) -> AckFrame | None:
        """Everything owed to `peer`, as a frame from rank `src`; nothing is owed afterwards."""
        owed = self._owed.pop(peer, None)
        if owed is None:
            return None
        return AckFrame(
            src=src, tickets=owed.tickets, credit_rids=owed.rids, credit_edges=owed.edges, credit_counts=owed.counts
        )

    def forgive(self, peer: int) -> None:
        """The peer is gone."""
        self._owed.pop(peer, None)

    def _of(self, peer: int) -> _Owed:
        owed = self._owed.get(peer)
        if owed is None:
            owed = self._owed[peer] = _Owed()
        return owed
