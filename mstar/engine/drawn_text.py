"""Which rows of a step draw text, and what they drew: columns aligned to the step. Loop thread, host only."""

from __future__ import annotations

import numpy as np

from mstar.engine.resources.sampler import Sampler
from mstar.engine.step_plan import StepPlan
from mstar.engine.touched import Touched


def text_rows(sampler: Sampler | None, plan: StepPlan, handles: np.ndarray) -> np.ndarray:
    """bool [rows], for a planned step of `handles`."""
    draws = np.zeros(handles.size, np.bool_)
    item = _touched(sampler, plan)
    if item is not None:
        draws[item.rows.places(handles)] = item.facts.kept
    return draws


def text_tokens(sampler: Sampler | None, plan: StepPlan, handles: np.ndarray) -> np.ndarray:
    """int32 [rows], for a step that has ended well; 0 for rows that have no part in the draw."""
    tokens = np.zeros(handles.size, np.int32)
    item = _touched(sampler, plan)
    if item is not None and sampler is not None and plan.done is not None:
        tokens[item.rows.places(handles)] = plan.done.resource_host[sampler.key + ".tokens"]
    return tokens


def _touched(sampler: Sampler | None, plan: StepPlan) -> Touched | None:
    if sampler is None or not sampler.samples_text or sampler.draws_in_forward:
        return None
    return next((item for item in plan.touched if item.resource is sampler), None)
