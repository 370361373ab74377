"""Finding stop strings in text that arrives in pieces, and holding back what may become one. Pure, no I/O.

The rule does not depend on where pieces begin: the first stop string to be *complete* ends the text, which is cut where
that string begins; of several that are complete at the same character, the longest counts. A text whose end is the
beginning of a stop string is held back from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """Aho–Corasick automaton (Aho, Corasick 1975) of a set of non-empty strings. State 0 is the root.

    `next_of[s]`: transitions of state s by character. `fallback[s]`: the state of the longest proper suffix of s that
    begins a string. `depth[s]`: length of what s has matched. `match[s]`: length of the longest string that ends
    there, 0 for none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next_of: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.depth = [0]
        self.match = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        while True:
            following = self.next_of[state].get(character)
            if following is not None:
                return following
            if not state:
                return 0
            state = self.fallback[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.next_of[state].get(character)
            if following is None:
                following = self.next_of[state][character] = len(self.next_of)
                self.next_of.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
            state = following
        self.match[state] = len(stop)

    def _link(self) -> None:
        """Breadth first, so that a state's fallback is complete before the state is reached."""
        queue = deque(self.next_of[0].values())
        while queue:
            state = queue.popleft()
            self.match[state] = self.match[state] or self.match[self.fallback[state]]
            for character, following in self.next_of[state].items():
                self.fallback[following] = self.step(self.fallback[state], character)
                queue.append(following)


class StopMatcher:
    """Follows one text. `is_matched`: a stop string is complete; nothing more is released."""

    __slots__ = ("_automaton", "_held", "_state", "is_matched")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""
        self.is_matched = False

    def feed(self, text: str) -> str:
        """Adds text; returns what can no longer be part of a stop string."""
        if self.is_matched:
            return ""
        automaton, state = self._automaton, self._state
        whole = self._held + text
        for index, character in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, character)
            if automaton.match[state]:
                self.is_matched = True
                self._held = ""
                return whole[: index - automaton.match[state]]
        self._state = state
        released = len(whole) - automaton.depth[state]
        self._held = whole[released:]
        return whole[:released]

    def flush(self) -> str:
        """The text ends here: releases what was held back."""
        held, self._held = self._held, ""
        return held
