"""An EAGLE head without arithmetic, whose every entry has to be made of the right state and the right token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pillion.engine.drafts.draft_chains import DraftPlan
from pillion.engine.drafts.draft_model import DraftModel
from pillion.engine.drafts.eagle_chains import EagleChain
from pillion.kernels.step import Int32
from tests.support.fake_backend import VOCAB_SIZE, FakeBackend, greedy, kv_of

Int64 = npt.NDArray[np.int64]


class FakeHead(DraftModel):
    """A head over states that are the KV of :mod:`tests.support.fake_backend`. Its guesses are what the model says
    without a seed, and are made only where all entries of a text are in its blocks.

    ``first_passes`` are the tokens of each plan's first pass, ``contexts`` the entries after each guess, ``guessed``
    how many tokens were guessed. ``failing``: the passes fail from now on.
    """

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend, backend.layout.block_bytes, VOCAB_SIZE)
        self.fake = backend
        self.first_passes: list[int] = []
        self.contexts: list[int] = []
        self.guessed = 0
        self.failing = False

    def run(self, plan: DraftPlan) -> list[Int32] | None:
        self.first_passes.append(plan.num_tokens)
        if self.failing:
            return None
        found = []
        for piece in plan.pieces:
            chain = piece.chain
            assert isinstance(chain, EagleChain)
            text, begin = chain.sequence.tokens(0, chain.sequence.num_tokens), chain.begin
            states = kv_of(text, np.arange(len(text)))[begin:]
            wanted = states[:-1] ^ text[begin + 1 :]
            end = piece.start + piece.count
            assert (chain.states(piece.count)[:, 0] == states[piece.start : end]).all(), "a state of another position"
            pool, at = self._places(chain, max(end, end + piece.guesses - 1))
            pool[at[0][piece.start : end], at[1][piece.start : end]] = states[piece.start : end] ^ chain.tokens(
                piece.start, end
            )
            if piece.guesses:
                assert end == len(wanted)
                assert (pool[at][:end] == wanted).all(), "an entry is lost, or another one's"
                self.contexts.append(end)
                # The entries of guesses: the model's states overwrite them.
                pool[at[0][end:], at[1][end:]] = -7
            found.append(np.array(greedy(text.tolist(), piece.guesses), dtype=np.int32))
            self.guessed += piece.guesses
        return found

    def _places(self, chain: EagleChain, count: int) -> tuple[Int64, tuple[Int64, Int64]]:
        """The pool, int64 [slots, block size], and where the first ``count`` entries of a chain are in it."""
        entries, size = np.arange(count), self.fake.layout.block_size
        return self.fake._bound_pool().numpy().view(np.int64), (chain.table()[entries // size], entries % size)
