"""How the names and layouts of a checkpoint become those of a module: the declarations that `load_weights` follows.
Pure data and arithmetic on names; holds no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StackRule:
    """`target`, a suffix of module names, holds `sources`, suffixes of checkpoint names, concatenated along `dim`."""

    target: str
    sources: tuple[str, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class SplitRule:
    """`source`, a suffix of checkpoint names, holds `parts` of equal size, taking turns in each of `groups` groups of
    its first dimension (queries and gates head by head). The parts go on under their own suffixes, as if the checkpoint
    had them."""

    source: str
    parts: tuple[str, ...]
    groups: int


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """`target`, a suffix of module names such as `mlp.experts.gate_up_proj`, is `[num_experts, rows, columns]`. A
    checkpoint may have it whole, or as `mlp.experts.<index>.<source>`, the `sources` of an expert one after the other
    along its rows."""

    target: str
    sources: tuple[str, ...]
    num_experts: int

    @property
    def prefix(self) -> str:
        """Of an expert's names: the target's, up to its last part."""
        return self.target.rpartition(".")[0] + "."


@dataclass(frozen=True, slots=True)
class RenameRule:
    """Checkpoint names that begin with `prefix` begin with `replacement` in the module. The first match counts."""

    prefix: str
    replacement: str


@dataclass(frozen=True, slots=True)
class TieRule:
    """Module name `target` is the same tensor as module name `source`. A value for `target` in the checkpoint is not
    used, as in transformers' tied embeddings."""

    target: str
    source: str


@dataclass(frozen=True, slots=True)
class LoadRules:
    """How checkpoint names become module names: `ignore` (shell patterns on checkpoint names) first, then `renames`,
    then `ties`, then `splits`, then `stacks` and `experts`; other names stay as they are."""

    renames: tuple[RenameRule, ...] = ()
    stacks: tuple[StackRule, ...] = ()
    ties: tuple[TieRule, ...] = ()
    ignore: tuple[str, ...] = ()
    splits: tuple[SplitRule, ...] = ()
    experts: tuple[ExpertRule, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint tensor goes: it is `source`, one of `sources` that make up the module's `target` along `dim`.
    `by_expert`: the target's first two dimensions count as one."""

    target: str
    source: str
    sources: tuple[str, ...]
    dim: int
    by_expert: bool


def renamed(name: str, renames: tuple[RenameRule, ...]) -> str:
    for rename in renames:
        if name.startswith(rename.prefix):
            return rename.replacement + name.removeprefix(rename.prefix)
    return name


def split_of(name: str, splits: tuple[SplitRule, ...]) -> tuple[SplitRule, list[str]] | None:
    """The rule for a tensor of several parts and the names of those, or None."""
    for rule in splits:
        if _ends(name, rule.source):
            return rule, [name.removesuffix(rule.source) + part for part in rule.parts]
    return None


def place_of(name: str, rules: LoadRules) -> Place | None:
    """None for a tensor that is not packed with others."""
    for rule in rules.stacks:
        for source in rule.sources:
            if _ends(name, source):
                return Place(name.removesuffix(source) + rule.target, source, rule.sources, rule.dim, False)
    for expert in rules.experts:
        stem, found, rest = name.rpartition(expert.prefix)
        index, _, source = rest.partition(".")
        if found and source in expert.sources and index.isdecimal() and int(index) < expert.num_experts:
            return Place(stem + expert.target, rest, _sources_of(expert), 0, True)
    return None


@lru_cache
def _sources_of(rule: ExpertRule) -> tuple[str, ...]:
    return tuple(f"{index}.{source}" for index in range(rule.num_experts) for source in rule.sources)


def _ends(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith("." + suffix)
