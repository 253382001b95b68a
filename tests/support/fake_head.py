"""An EAGLE head without arithmetic, which checks that every entry is made of the right state and token."""

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
    """A head over states that are the KV of :mod:`tests.support.fake_backend`. Its draft tokens are the model's
    unseeded ones, and are made only if all entries of a text are in its blocks.

    ``first_passes`` are the tokens of each plan's first pass, ``contexts`` the entries after each draft token,
    ``drafted`` the number of drafted tokens. ``failing``: passes fail from now on.
    """

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend, backend.layout.block_bytes, VOCAB_SIZE)
        self.fake = backend
        self.first_passes: list[int] = []
        self.contexts: list[int] = []
        self.drafted = 0
        self.failing = False

    def run(self, plan: DraftPlan) -> list[Int32] | None:
        self.first_passes.append(plan.num_tokens)
        if self.failing:
            return None
        found = []
        for chunk in plan.scheduled:
            chain = chunk.chain
            assert isinstance(chain, EagleChain)
            text, begin = chain.sequence.tokens(0, chain.sequence.num_tokens), chain.begin
            states = kv_of(text, np.arange(len(text)))[begin:]
            wanted = states[:-1] ^ text[begin + 1 :]
            end = chunk.start + chunk.count
            assert (chain.states(chunk.count)[:, 0] == states[chunk.start : end]).all(), "a state of another position"
            pool, at = self._places(chain, max(end, end + chunk.draft_tokens - 1))
            pool[at[0][chunk.start : end], at[1][chunk.start : end]] = states[chunk.start : end] ^ chain.tokens(
                chunk.start, end
            )
            if chunk.draft_tokens:
                assert end == len(wanted)
                assert (pool[at][:end] == wanted).all(), "an entry is lost, or another one's"
                self.contexts.append(end)
                # Entries of draft tokens, later overwritten by the model's states.
                pool[at[0][end:], at[1][end:]] = -7
            found.append(np.array(greedy(text.tolist(), chunk.draft_tokens), dtype=np.int32))
            self.drafted += chunk.draft_tokens
        return found

    def _places(self, chain: EagleChain, count: int) -> tuple[Int64, tuple[Int64, Int64]]:
        """Return the pool, int64 [slots, block size], and the places of a chain's first ``count`` entries in it."""
        entries, size = np.arange(count), self.fake.layout.block_size
        return self.fake._bound_pool().numpy().view(np.int64), (chain.table()[entries // size], entries % size)
