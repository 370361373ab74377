"""Where the value of an input is kept: its registers, and when each is emptied.

Start-up only. An input is fed at most once per scope: from outside every loop (or from the request), then by the
loop-backs of the loops around its node, the outermost first. The value that counts in an iteration is that of the
innermost loop whose iteration is not its first; the others come into their own when that loop starts anew.

Neighbouring feeds share a register when the inner loop is renewed each time the outer feed is (nothing is then left
to come back to). Otherwise the outer value is *held*: it must survive the loops between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mstar.graph.layout import LoopUnit, NodeUnit, Transfer, WalkLayout, sources_of


@dataclass(eq=False, slots=True)
class Register:
    """One position. `feeds` are the scopes that renew it, outermost first (None: the walk itself)."""

    position: int
    feeds: list[LoopUnit | None]

    @property
    def innermost(self) -> LoopUnit | None:
        return self.feeds[-1]


@dataclass(frozen=True, slots=True)
class LoopBack:
    """The next iteration's value of a loop-back waits in `position` until `edge.scope` advances to `register`."""

    edge: Transfer
    position: int
    register: Register


@dataclass(eq=False, slots=True)
class InputRegisters:
    """`registers` outermost first; `forward` is the edge that feeds the first (None: bound by name at the start)."""

    node: NodeUnit
    name: str
    registers: list[Register]
    forward: Transfer | None
    backs: list[LoopBack] = field(default_factory=list)

    def used_by_node(self) -> list[Register]:
        """Registers whose value serves one run of the node only."""
        return [register for register in self.registers if register.innermost is self.node.scope]

    def dropped_by(self, loop: LoopUnit) -> list[int]:
        """Positions without a reader once the loop, which is around the node, has ended."""
        gone = [register.position for register in self.registers if loop.scope in register.feeds]
        return gone + [back.position for back in self.backs if back.edge.scope is loop]


def find_registers(layout: WalkLayout, node: NodeUnit, name: str, free: int) -> InputRegisters:
    """Registers of one input, at positions from `free` on. The layout's sources are known to be consistent."""
    sources = sources_of(layout, node, name)
    forward = sources[0] if sources and not sources[0].back else None
    first = Register(free, [forward.scope if forward is not None else None])
    found = InputRegisters(node, name, [first], forward)
    free += 1
    for edge in sources[1 if forward is not None else 0 :]:
        register = found.registers[-1]
        loop = edge.scope
        assert loop is not None  # a loop-back without a loop was refused
        if loop.scope is not register.innermost:
            register = Register(free, [])
            found.registers.append(register)
            free += 1
        register.feeds.append(loop)
        found.backs.append(LoopBack(edge, free, register))
        free += 1
    return found


def num_positions(found: InputRegisters) -> int:
    return len(found.registers) + len(found.backs)
