"""`Pace`: how much longer a node's steps take than `StepCost` foretells.

Loop thread; arithmetic only. The costs are measured at start-up, one node alone on an idle machine. Under load memory
is colder, cores are shared, and chunks and rows stand in other relations, so what ended corrects what is foretold.
"""

from __future__ import annotations

from mstar.engine.execution import Step
from mstar.engine.step_cost import StepCost

NEWEST = 1 / 16
"""Weight of the step that ended last in the running mean."""
OUTLIER = 1.5
"""One step counts as at most so many times as long, or as short, as the mean: something else on the machine."""
BOUND = 8.0


class Pace:
    """Of one node. `decode`: times of what is foretold that steps of decode rows alone take; `mixed`: steps with
    chunks."""

    def __init__(self) -> None:
        self.decode = 1.0
        self.mixed = 1.0

    def ended(self, step: Step, seconds: float, cost: StepCost) -> None:
        """The device took `seconds` for it."""
        spans, lengths = step.spans, step.columns.lengths
        num_tokens, contexts = int(spans.sum()), int(lengths.sum())
        if num_tokens == step.num_rows:
            self.decode = _moved(self.decode, seconds, cost.decode_s(num_tokens, contexts))
            return
        chunks = [(int(spans[row]), int(lengths[row])) for row in (spans > 1).nonzero()[0]]
        contexts -= sum(start for _, start in chunks)
        foretold = cost.mixed_s(step.num_rows - len(chunks), contexts) + sum(cost.chunk_s(*chunk) for chunk in chunks)
        self.mixed = _moved(self.mixed, seconds, foretold)


AS_FORETOLD = Pace()
"""Of a node of which no step has ended."""


def _moved(mean: float, seconds: float, foretold: float) -> float:
    if foretold <= 0.0:
        return mean
    newest = min(max(seconds / foretold, mean / OUTLIER), mean * OUTLIER)
    return min(max(mean + NEWEST * (newest - mean), 1 / BOUND), BOUND)
