"""Four requests to a tiny text model, and what must have become of them when some were hit by a fault."""

from __future__ import annotations

from collections.abc import Set

from support.faults.instance_faults import InstanceFaults
from support.instance import Instance
from support.tiny_serving import TinyLlama

NUM_TOKENS = 8
RIDS = ("r0", "r1", "r2", "r3")


class Texts:
    """Prompts of four lengths, and their solo continuations by the reference."""

    def __init__(self, tiny: TinyLlama, instance: Instance) -> None:
        self._tiny = tiny
        self._instance = instance
        self._prompts = {rid: tiny.prompt(5 + index, index) for index, rid in enumerate(RIDS)}

    def solo(self, rid: str) -> list[int]:
        return self._tiny.greedy(self._prompts[rid], NUM_TOKENS)

    def submit(self, *rids: str) -> None:
        for rid in rids:
            self._tiny.submit(self._instance, rid, self._prompts[rid], max_tokens=NUM_TOKENS)

    def assert_only_failed(self, failed: Set[str], why: str) -> None:
        """Those failed and say why; what they had emitted before is right. All others have their solo text."""
        for rid in RIDS:
            result = self._instance.results[rid]
            if rid in failed:
                assert why in (result.failure or ""), f"{rid}: {result.failure}, {result.tokens}"
                assert result.tokens == self.solo(rid)[: len(result.tokens)], rid
            else:
                assert (result.failure, result.tokens) == (None, self.solo(rid)), rid

    def assert_well_again(self, faults: InstanceFaults) -> None:
        """Nothing is held, a further request is answered as if nothing had been, and nothing is held after it. Ends
        the instance."""
        faults.assert_baseline()
        prompt = self._tiny.prompt(9)
        after = self._tiny.submit(self._instance, "after", prompt, max_tokens=NUM_TOKENS)
        self._instance.run()
        assert (after.failure, after.tokens) == (None, self._tiny.greedy(prompt, NUM_TOKENS))
        faults.assert_baseline()
        self._instance.close()
