"""Puts a stream of checkpoint tensors into a module by declared rules, strictly: every parameter gets exactly one value
and every tensor a place, or nothing is accepted. Runs in the worker, before the module serves anything.

Only one model is held: each tensor is copied into its place as it arrives. Sources of a packed parameter wait for each
other (they come close together), and a parameter on the meta device is allocated when its first value is there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.load_rules import LoadRules, Place, TieRule, place_of, renamed, split_of
from mstar.model.loader.progress import LoadProgress, counted

_NAMES_SHOWN = 40


@dataclass(frozen=True, slots=True)
class LoadReport:
    """`num_tensors` read from the checkpoint and used, `num_bytes` of module memory filled, names not used."""

    num_tensors: int
    num_bytes: int
    ignored: tuple[str, ...]
    seconds: float


def load_weights(
    module: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    rules: LoadRules,
    *,
    device: torch.device | str | None = None,
    progress: LoadProgress | None = None,
) -> LoadReport:
    """Fills parameters and persistent buffers of `module`. Meta tensors are allocated on `device` (default: CPU) in
    their own dtype, others keep their memory. `progress` counts module bytes; give it here or to `iter_weights`, not to
    both.

    Raises:
        CheckpointError: missing, unexpected, doubled or misshapen tensors, all listed by name.
    """
    started = time.monotonic()
    destination = _Destination(module, torch.device(device or "cpu"), rules.ties)
    stacks: dict[str, _Stack] = {}
    ignored: list[str] = []
    num_tensors = 0
    tied = {tie.target for tie in rules.ties}
    add = counted("loading weights", destination.total_bytes, progress)
    for checkpoint_name, tensor in weights:
        name = renamed(checkpoint_name, rules.renames)
        if name in tied or any(fnmatchcase(checkpoint_name, pattern) for pattern in rules.ignore):
            ignored.append(checkpoint_name)
            continue
        num_tensors += 1
        for part, value in _parts(name, tensor, rules, destination):
            place = place_of(part, rules)
            if place is None:
                add(destination.fill(part, {part: value}))
                continue
            stack = stacks.setdefault(place.target, _Stack(place))
            if place.source in stack.parts:
                destination.problem("given twice", checkpoint_name)
                continue
            stack.parts[place.source] = value
            if len(stack.parts) == len(place.sources):
                values = {source: stack.parts[source] for source in place.sources}
                add(destination.fill(place.target, values, place.dim, by_expert=place.by_expert))
                stack.parts = dict.fromkeys(place.sources)  # remembered as seen, no longer held
    for target, stack in stacks.items():
        if absent := [source for source in stack.place.sources if source not in stack.parts]:
            destination.problem("missing", f"{target} (its {', '.join(absent)})")
            destination.settled.add(target)
    destination.finish()
    return LoadReport(num_tensors, destination.total_bytes, tuple(ignored), time.monotonic() - started)


@dataclass(slots=True)
class _Stack:
    place: Place
    parts: dict[str, torch.Tensor | None] = field(default_factory=dict)


def _parts(
    name: str, tensor: torch.Tensor, rules: LoadRules, destination: _Destination
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor, or what a rule splits it into."""
    split = split_of(name, rules.splits)
    if split is None:
        yield name, tensor
        return
    rule, names = split
    if tensor.ndim == 0 or tensor.shape[0] % (rule.groups * len(names)):
        destination.problem(
            "wrong shape", f"{name}: {rule.groups} groups of {len(names)} parts, checkpoint {list(tensor.shape)}"
        )
        return
    turns = tensor.unflatten(0, (rule.groups, len(names), -1))  # [groups, parts, rows, ...]
    for index, part in enumerate(names):
        yield part, turns[:, index].flatten(0, 1)


class _Destination:
    """The tensors of the module by name, which of them have a value, and what went wrong so far."""

    def __init__(self, module: nn.Module, device: torch.device, ties: tuple[TieRule, ...]) -> None:
        self.module = module
        self.device = device
        self.tensors: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True))
        self.settled: set[str] = set()  # names with a value, or already reported
        self.problems: dict[str, list[str]] = {}
        for tie in ties:
            if tie.source not in self.tensors:
                self.problem("missing", f"{tie.source}, to which {tie.target} is tied")
            elif tie.target in self.tensors:
                self.assign(tie.target, self.tensors[tie.source])
        by_identity: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            by_identity.setdefault(id(tensor), []).append(name)
        self.aliases = {name: by_identity[id(tensor)] for name, tensor in self.tensors.items()}
        self.total_bytes = sum(tensor.nbytes for tensor in {id(t): t for t in self.tensors.values()}.values())

    def problem(self, kind: str, what: str) -> None:
        self.problems.setdefault(kind, []).append(what)

    def fill(
        self, name: str, parts: Mapping[str, torch.Tensor | None], dim: int = 0, *, by_expert: bool = False
    ) -> int:
        """Copies `parts`, one after the other along `dim`, into the tensor `name` (`by_expert`: whose first two
        dimensions count as one). Returns the bytes filled."""
        values = [part for part in parts.values() if part is not None]
        if name not in self.tensors:
            self.problem("unexpected", name if len(values) == 1 else f"{name} (from {', '.join(parts)})")
            return 0
        if name in self.settled:
            self.problem("given twice", name)
            return 0
        self.settled.update(self.aliases[name])
        tensor = self.tensors[name]
        shapes = " + ".join(str(list(value.shape)) for value in values)
        whole = tensor.flatten(0, 1) if by_expert else tensor
        if _concatenated_shape(values, dim) != whole.shape:
            self.problem("wrong shape", f"{name}: module {list(tensor.shape)}, checkpoint {shapes}")
            return 0
        if any(value.is_floating_point() != tensor.is_floating_point() for value in values):
            self.problem("wrong type", f"{name}: module {tensor.dtype}, checkpoint {values[0].dtype}")
            return 0
        if tensor.is_meta:
            tensor = self.materialize(name)
        with torch.no_grad():
            whole = tensor.flatten(0, 1) if by_expert else tensor
            start = 0
            for value in values:
                size = value.shape[dim] if value.ndim else 1
                place = whole.narrow(dim, start, size) if len(values) > 1 else whole
                place.copy_(value)
                start += size
        return tensor.nbytes

    def materialize(self, name: str) -> torch.Tensor:
        """Replaces a meta tensor, under all its names, by memory on the device."""
        old = self.tensors[name]
        # Not `empty_like`: of a meta tensor it loads torch's symbolic shapes, seconds of imports.
        new: torch.Tensor = torch.empty(old.shape, dtype=old.dtype, device=self.device)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            vars(new).update(vars(old))  # attributes that a layer hung on its parameter
        for alias in self.aliases[name]:
            self.assign(alias, new)
        return new

    def assign(self, name: str, tensor: torch.Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        setattr(self.module.get_submodule(path), attribute, tensor)
        self.tensors[name] = tensor

    def finish(self) -> None:
        """Raises if anything is wrong or still without memory."""
        for name in self.tensors:
            if name not in self.settled:
                self.problem("missing", name)
        if not self.problems:
            rest = (*self.module.named_parameters(), *self.module.named_buffers())
            for name in [name for name, tensor in rest if tensor.is_meta]:
                self.problem("left on the meta device (not part of a checkpoint: make it on a real device)", name)
        if self.problems:
            raise CheckpointError(
                f"the checkpoint does not fit {type(self.module).__name__}:\n"
                + "\n".join(f"  {kind}: {_listed(names)}" for kind, names in sorted(self.problems.items()))
            )


def _concatenated_shape(values: list[torch.Tensor], dim: int) -> torch.Size | None:
    """Shape of the values put together along `dim`; None if they do not go together."""
    shapes = [list(value.shape) for value in values]
    if len(shapes) == 1:
        return values[0].shape
    if any(dim >= len(shape) for shape in shapes):
        return None
    total = sum(shape[dim] for shape in shapes)
    frames = {(*shape[:dim], total, *shape[dim + 1 :]) for shape in shapes}
    return torch.Size(frames.pop()) if len(frames) == 1 else None


def _listed(names: list[str]) -> str:
    names = sorted(names)
    more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
