"""Finds stop strings in a stream of text pieces, wherever the pieces are cut.

StopStrings, the automaton of one request (Aho and Corasick's) <--shared-- StopMatcher, one for each of its answers
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

# Requests of one application have the same stop strings, and so have the prompts of one list.
_KEPT_AUTOMATA = 16


class StopStrings:
    """Stop strings, built into an automaton over characters: reading one costs the same for many, long ones as for one.

    A state is a beginning of some stop string, and the text's state is the longest one with which the text ends. States
    of one string are numbered one after the other, so one integer and one character describe most of them.

    Attributes:
        stops: the strings, none of them empty.
        begin: the characters with which one begins.
        matched: by state, characters of the longest stop string with which it ends; 0: of none.
        held: by state, the last characters of the text that can still become a stop string.
    """

    __slots__ = ("_branches", "_instead", "_labels", "begin", "held", "matched", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self.begin = frozenset(stop[0] for stop in self.stops)
        # By state, the character that leads to the state with the next number; "": none does.
        self._labels = [""]
        # The other edges: by state, where its further characters lead.
        self._branches: dict[int, dict[str, int]] = {}
        # By state: the one before it, the character between them, its length, and that of the stop string that it is.
        before, characters, lengths, ends = [0], [""], [0], [0]
        for stop in self.stops:
            state = length = 0
            while length < len(stop) and (following := self._edge(state, stop[length])):
                state, length = following, length + 1
            rest, first = stop[length:], len(ends)
            if rest:
                self._add_edge(state, rest[0], first)
                self._labels += [*rest[1:], ""]
                before += [state, *range(first, first + len(rest) - 1)]
                characters += rest
                lengths += range(length + 1, len(stop) + 1)
                ends += [0] * len(rest)
                state = len(ends) - 1
            ends[state] = len(stop)
        self._link(before, characters, lengths, ends)

    def step(self, state: int, character: str) -> int:
        """The state after ``character``."""
        labels, branches = self._labels, self._branches
        while labels[state] != character:
            if state in branches and character in branches[state]:
                return branches[state][character]
            if not state:
                return 0
            state = self._instead[state]
        return state + 1

    def _edge(self, state: int, character: str) -> int:
        """Where ``character`` leads from ``state``; 0: nowhere."""
        return state + 1 if self._labels[state] == character else self._branches.get(state, {}).get(character, 0)

    def _add_edge(self, state: int, character: str, following: int) -> None:
        if following == state + 1:
            self._labels[state] = character
        else:
            self._branches.setdefault(state, {})[character] = following

    def _link(self, before: list[int], characters: list[str], lengths: list[int], ends: list[int]) -> None:
        """Finds the longest proper end of each state that is a state too; the shorter ones must be known by then."""
        labels, branches, step, count = self._labels, self._branches, self.step, len(ends)
        matched, held, suffixes = ends, lengths.copy(), [0] * count
        self.matched, self.held, self._instead = matched, held, (instead := [0] * count)
        for state in sorted(range(1, count), key=lengths.__getitem__):
            suffix = step(suffixes[before[state]], characters[state]) if before[state] else 0
            suffixes[state] = suffix
            matched[state] = matched[state] or matched[suffix]
            label = labels[state]
            if not label and state not in branches:
                held[state] = held[suffix]
            # A suffix without an edge of another character would be tried in vain.
            in_vain = suffix not in branches and labels[suffix] in ("", label)
            instead[state] = instead[suffix] if in_vain else suffix


@lru_cache(_KEPT_AUTOMATA)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of ``stops``, which all answers of all requests with the same strings share."""
    return StopStrings(stops)


class StopMatcher:
    """Lets text through until a stop string is complete; nothing of a stop string is ever let through.

    Text that could still become a stop string is held back: less than the longest of them. The match that is complete
    first wins, and of two that end together the longer one, so the outcome does not depend on where pieces are cut.
    A stop string that ends in text that is only passed counts for nothing; one that begins there and ends later counts.

    Attributes:
        found: the stop string that is complete; "" while none is.
    """

    __slots__ = ("_held", "_state", "_strings", "found")

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""
        self.found = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return bool(self.found)

    def push(self, piece: str) -> str:
        """The text that is certain now. Once ``stopped`` is true it is the last, and later pieces give nothing."""
        return "" if self.found else self._read(piece, self._strings.matched)

    def pass_by(self, piece: str) -> str:
        """The text that is certain now, whatever stop string ends in ``piece``: it is too early for one."""
        return self._read(piece, None)

    def flush(self) -> str:
        """What was held back and turned out to be no stop string. Call once, at the end."""
        held, self._held = self._held, ""
        return held

    def _read(self, piece: str, matched: Sequence[int] | None) -> str:
        """Moves on through ``piece``, to the first stop string that is complete by ``matched``."""
        strings, state = self._strings, self._state
        if not state and strings.begin.isdisjoint(piece):
            # Nearly every piece.
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            state = strings.step(state, character)
            if matched is not None and matched[state]:
                begin = end - matched[state]
                self._held, self.found = "", text[begin:end]
                return text[:begin]
        self._state = state
        certain = len(text) - strings.held[state]
        self._held = text[certain:]
        return text[:certain]
