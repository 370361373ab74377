"""Requests that come and go while others run."""

import random
from collections.abc import Callable

from support.instance import Instance

MOST_ABORTED = 2


def run_random_arrivals(
    instance: Instance, submit: Callable[[Instance, int], None], num_requests: int, rng: random.Random
) -> list[int]:
    """Submits the requests `r0`, `r1`, ... in any order, a few at a time with turns of the loop between, aborts up to
    two on the way, and runs to the end. Returns those that were not aborted."""
    waiting = rng.sample(range(num_requests), num_requests)
    aborted = set(rng.sample(waiting, MOST_ABORTED))
    sent: list[int] = []
    while waiting:
        for _ in range(rng.randint(1, 3)):
            if waiting:
                sent.append(waiting.pop())
                submit(instance, sent[-1])
        for _ in range(rng.randint(0, 6)):
            instance.tick()
        for index in sent:
            if index in aborted and rng.random() < 0.5 and not instance.results[f"r{index}"].done:
                instance.abort(f"r{index}")
    instance.run()
    return [index for index in sent if not instance.results[f"r{index}"].aborted]
