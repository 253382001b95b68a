"""One step's work as arrays: the scheduler's input for a backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pillion.errors import Internal

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A ragged batch of S sequences with T query tokens in all, over a paged KV pool.

    Attributes:
        token_ids: [T] ids of the tokens to run, sequence after sequence. ``Backend.launch`` explains ids below 0.
        positions: [T] position of each token in its sequence.
        query_starts: [S + 1] sequence s owns rows query_starts[s] .. query_starts[s + 1].
        context_lens: [S] tokens that the last query row of s sees, itself included: that row's position + 1.
        block_tables: [S, B] slots of each sequence's blocks in order, padded with 0 behind its last block. The step
            writes the KV of position p of sequence s into row p % block_size of slot block_tables[s, p // block_size].
        sample_rows: [R + Q] numbers of the rows whose logits are computed. The first R are sampled, and rise; a row may
            occur several times among them. The last Q are only scored (SamplingRows.scored). Empty for pure prefill.
        rope_rows: [T] each token's row of the rotary tables; None where that is its position.
        adapters: [S] the place among the backend's adapters of each sequence's adapter, -1 for none; None where no
            sequence has one.
    """

    token_ids: Int32
    positions: Int32
    query_starts: Int32
    context_lens: Int32
    block_tables: Int32
    sample_rows: Int32
    rope_rows: Int32 | None = None
    adapters: Int32 | None = None

    @property
    def table_rows(self) -> Int32:
        """[T] each token's row of the rotary tables."""
        return self.positions if self.rope_rows is None else self.rope_rows

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)


def row_places(batch: StepBatch, max_adapters: int) -> Int32:
    """[T] the place of each row's adapter. Raises Internal for places that a backend of ``max_adapters`` lacks."""
    places = batch.adapters
    assert places is not None
    if len(places) != batch.num_seqs or places.min() < -1 or places.max() >= max_adapters:
        raise Internal(f"a step of {batch.num_seqs} sequences names adapter places {places.tolist()}")
    return np.repeat(places, np.diff(batch.query_starts)).astype(np.int32, copy=False)


def adapted_runs(places: Int32, most_rows: int) -> tuple[Int32, Int32]:
    """The numbers of the rows that have an adapter, ordered by place, and their runs, at most ``most_rows`` each.

    ``places``: [T] of all rows. Runs are int32 [n, 3]: a place, the first of its rows in that order, and how many.
    """
    rows = np.argsort(places, kind="stable").astype(np.int32)[np.count_nonzero(places < 0) :]
    ordered = places[rows]
    firsts = np.flatnonzero((np.arange(len(rows)) - np.searchsorted(ordered, ordered)) % most_rows == 0)
    counts = np.diff(np.append(firsts, len(rows)))
    return rows, np.ascontiguousarray(np.stack([ordered[firsts], firsts, counts], 1), np.int32)
