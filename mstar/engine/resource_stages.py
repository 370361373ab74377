"""One stage of a step over all resources that it touches. Loop thread, host integers.

Where a resource raises, the stage ends with `ResourceFailed`: that is for the step's rows, and the worker goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np

from mstar.engine.execution import AdmitOutcome, StepOutputs
from mstar.engine.fault_log import log_fault
from mstar.engine.resources.base import Resource
from mstar.engine.staging import NoDeviceCopies
from mstar.engine.step_plan import StepPlan
from mstar.engine.touched import Touched
from mstar.engine.transaction import Transaction


class ResourceFailed(Exception):
    """A resource raised in a stage of a step. The message names both; the traceback goes to the log."""

    def __init__(self, stage: str, item: Touched, error: Exception) -> None:
        message = f"{stage} of resource {item.resource.key!r} raised {type(error).__name__}: {error}"
        super().__init__(message)
        self.item = item
        log_fault(message, error)


def admit(plan: StepPlan, txn: Transaction) -> AdmitOutcome:
    """The first refusal, if there is one; what was reserved before it is in `txn`."""
    for item in plan.touched:
        try:
            outcome = item.resource.admit(item.step, item.context({}, plan.shape), txn)
        except Exception as error:
            raise ResourceFailed("admit", item, error) from error
        if not outcome.ok:
            return outcome
    return AdmitOutcome()


def stage(plan: StepPlan, views: Mapping[str, np.ndarray], *, guard_device: bool) -> None:
    """Every resource plans into the slot's `views`. `guard_device`: one that reaches the device meanwhile fails."""
    captured = plan.bucket is not None
    for item in plan.touched:
        guard = guard_device and not item.resource.force_double_buffer
        try:
            with NoDeviceCopies(item.resource.key) if guard else nullcontext():
                item.facts = item.resource.plan(item.step, item.context(views, plan.shape, captured=captured))
        except Exception as error:
            raise ResourceFailed("plan", item, error) from error


def advance(plan: StepPlan, txn: Transaction) -> None:
    """Move lengths and draw indices, inside the step's transaction."""
    for item in plan.touched:
        try:
            item.resource.advance(item.step, item.context({}, plan.shape), txn)
        except Exception as error:
            raise ResourceFailed("advance", item, error) from error


def settle(item: Touched, host: Mapping[str, np.ndarray], outputs: StepOutputs) -> Mapping[int, str]:
    """Handles that failed in the step by what the resource found, with the reason."""
    try:
        return item.resource.settle(item.facts, item.rows, host, outputs)
    except Exception as error:
        raise ResourceFailed("settle", item, error) from error


def publishing(plan: StepPlan) -> Sequence[Touched]:
    """Those that have anything to publish."""
    return [item for item in plan.touched if type(item.resource).publish is not Resource.publish]


def publish(item: Touched, keep: np.ndarray | None) -> None:
    """`keep` bool [rows of the resource]: None: all."""
    try:
        item.resource.publish(item.step, item.rows, item.facts, keep)
    except Exception as error:
        raise ResourceFailed("publish", item, error) from error
