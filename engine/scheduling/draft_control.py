"""How many tokens are guessed for each stream of a step: as many as gain more than their rows cost.

A step without guesses brings a token for each of its decodes, D of them, in T seconds. A guess adds a row, which costs
c seconds, and brings a token more with the chance P that it and those before it are right. So guesses are added in
falling order of P as long as P / c, what a second spent on the guess brings, is above what a second of the whole step
brings, (D + all P so far) / (T + all c so far). T and c come from the measured cost of steps
(:mod:`pillion.engine.scheduling.step_cost`), P from the measured acceptance of the stream's and all streams' guesses.
For one stream on a machine that reads weights for most of a step nearly every guess is worth its row; in a full batch
hardly any is.

Where no guess is worth its row, the acceptance is measured all the same: now and then the drafter is asked, and what it
says is compared with the text that comes without it. Such a probe costs a look-up and no row. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from pillion.engine.backends.batch import Int32
from pillion.engine.scheduling.acceptance import UNKNOWN_RATE, UNKNOWN_WEIGHT, WORKER_FADING, Acceptance, Float64
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import StepCost, features
from pillion.engine.scheduling.step_plan import SequencePiece

# Guesses are made where they should make decoding faster by this factor, at least: estimates err, and a worker that
# runs ahead of its device stops doing so for a step with guesses.
LEAST_SPEEDUP = 1.05
# Guesses are made for the streams that look best, so fewer are right than it seems. The chances are therefore corrected
# by the share that was right of what was expected, which begins as if so many tokens had come as expected.
CALIBRATION_TOKENS = 8.0
# A stream without guesses is probed once in so many tokens; by a drafter that takes its time, more rarely.
PROBE_TOKENS = 8
SLOW_PROBE_TOKENS = 128


class DraftControl:
    """Decides for one scheduler how much is guessed.

    Args:
        most_guesses: most tokens that are guessed for a stream in one step.
        most_decodes: steps of more decodes guess nothing; 0: the costs alone decide.
    """

    def __init__(self, most_guesses: int, most_decodes: int = 0) -> None:
        self.most_guesses = most_guesses
        self._most_decodes = most_decodes
        self._all = Acceptance(WORKER_FADING)
        self._level = UNKNOWN_RATE
        # Right guesses of steps, and how many were expected; and their ratio.
        self._right = self._expected = CALIBRATION_TOKENS
        self._trust = 1.0
        self._rates: Float64 = self._all.rates(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        # Seconds of the last step's decodes without guesses, of a guess's row beside them, and how many they were.
        self._base_s = self._row_s = 0.0
        self._decodes = 0

    def observe(self, decodes: Seq[SequencePiece], cost: StepCost, drafting_s: float) -> None:
        """The next step has these decodes, one token each as yet. ``drafting_s``: what making a guess takes."""
        self._decodes = len(decodes)
        if cost.steps:
            found = features(decodes)
            self._base_s = cost.predict(found)
            self._row_s = drafting_s + cost.row_seconds(sum(piece.start for piece in decodes) / max(1, len(decodes)))

    def shares(self, streams: Seq[Sequence], room: Seq[int], left: int) -> list[int]:
        """How many tokens to guess for each of these streams, at most ``room`` of each and ``left`` of all."""
        none = [0] * len(streams)
        crowded = 0 < self._most_decodes < self._decodes
        if not (streams and self._decodes) or left <= 0 or crowded:
            return none
        least = self._row_s * self._decodes
        if self._base_s and all(s.guesses.chances[0] * self._trust * self._base_s <= least for s in streams):
            return none
        chances = np.array([stream.guesses.chances for stream in streams])[:, : self.most_guesses] * self._trust
        chances[np.arange(chances.shape[1]) >= np.array(room)[:, None]] = 0.0
        order = np.argsort(-chances, axis=None, kind="stable")[:left]
        best = chances.ravel()[order]
        brought, seconds = self._decodes + np.cumsum(best), self._base_s + self._row_s * np.arange(len(best))
        worth = (best > 0) & (best * seconds > self._row_s * (brought - best)) if self._base_s else best > 0
        count = len(worth) if worth.all() else int(worth.argmin())
        if not count:
            return none
        faster = brought[count - 1] / self._decodes
        if self._base_s:
            faster *= self._base_s / (self._base_s + count * self._row_s)
        if faster < LEAST_SPEEDUP:
            return none
        return np.bincount(order[:count] // chances.shape[1], minlength=len(streams)).tolist()  # type: ignore[no-any-return]

    def may_guess(self, streams: Iterable[Sequence]) -> bool:
        """Whether the step behind the one just planned would guess something for these streams."""
        likely = [stream for stream in streams if stream.guesses.found]
        return any(self.shares(likely, [self.most_guesses] * len(likely), self.most_guesses * len(likely)))

    def judged(self, stream: Sequence, made: int, right: int) -> None:
        """A step has judged a guess of ``made`` tokens for a stream: its first ``right`` ones were right."""
        self._right = self._right * WORKER_FADING + right
        self._expected = self._expected * WORKER_FADING + stream.guesses.expected
        self._trust = min(1.0, (self._right + CALIBRATION_TOKENS) / (self._expected + CALIBRATION_TOKENS))
        self._learn(stream, made, right)

    def _learn(self, stream: Sequence, made: int, right: int) -> None:
        """A guess was judged, or a probe."""
        self._all.judge(made, right)
        self._level = self._all.level(UNKNOWN_RATE, UNKNOWN_WEIGHT)
        self._rates = self._all.rates(self._level, UNKNOWN_WEIGHT)
        stream.guesses.judge(made, right)
        stream.guesses.expect(self._rates, self._level)

    def begin(self, stream: Sequence) -> None:
        """A stream begins: it is expected to be like all others."""
        stream.guesses.expect(self._rates, self._level)

    # Probes.

    def due_for_probe(self, streams: Iterable[Sequence], slow: bool) -> list[tuple[Sequence, int]]:
        """The streams to probe, and by how many tokens, once their last probe is judged."""
        every = SLOW_PROBE_TOKENS if slow else PROBE_TOKENS
        due = []
        for stream in streams:
            if stream.guesses.probe_is_due(stream.num_tokens, every):
                made, right = stream.guesses.take_probe(stream.tokens(0, stream.num_tokens))
                if made:
                    self._learn(stream, made, right)
                due.append((stream, min(self.most_guesses, PROBE_TOKENS)))
        return due

    def probed(self, due: Seq[tuple[Sequence, int]], guesses: Seq[Int32]) -> None:
        """The drafter's answers."""
        for (stream, _), guess in zip(due, guesses, strict=True):
            stream.guesses.probe(guess, stream.num_tokens)
