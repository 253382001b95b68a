"""Kernel arguments that locate a step's states, as one vector of integers, copied to the device at once.

    owners [max_tokens] | count [1] | starts [max_seqs + 1] | firsts [max_seqs] | chunk_starts [max_seqs + 1]
    | chunk_owners [most_chunks] | slots [max_seqs, 2, pages]

Like the step's record (:mod:`pillion.engine.backends.gpu.gpu_step`), it has a fixed address on the device, and host
buffers used in rotation. The copy ends after the last sequence.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.backends.gpu.gpu_step import HOST_RECORDS, StepShape
from pillion.errors import Internal
from pillion.kernels.gpu_states.state_places import SIDES, StepOfStates, most_chunks
from pillion.kernels.state_pieces import CHUNK
from pillion.kernels.step import StateSlots, StepBatch


class StateRecord:
    """Record of the states of the next step, for up to ``max_tokens`` tokens and ``max_seqs`` sequences; a state has
    ``pages`` slots. ``step``: views of the record on the device, and of the pool as float32 [slots, values]."""

    def __init__(self, pool: torch.Tensor, max_tokens: int, max_seqs: int, pages: int, device: torch.device) -> None:
        self._max_tokens, self._pages = max_tokens, pages
        chunks = most_chunks(max_tokens, max_seqs)
        sizes = [max_tokens, 1, max_seqs + 1, max_seqs, max_seqs + 1, chunks, max_seqs * SIDES * pages]
        _, *self._offsets, self._slots_at = itertools.accumulate(sizes[:-1], initial=0)
        words = sum(sizes)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(HOST_RECORDS)]
        self._turn = 0
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        parts = torch.split(self._device, sizes)
        owners, count, starts, firsts, chunk_starts, chunk_owners, slots = parts
        chunked = firsts, chunk_starts, chunk_owners
        self.step = StepOfStates(pool, owners, starts, count, *chunked, slots.view(max_seqs, SIDES, pages))

    def clear(self) -> None:
        """Make the record a step without sequences."""
        self._device.zero_()
        self.step.owners.fill_(-1)

    def check(self, states: StateSlots | None, num_seqs: int) -> None:
        """Raise Internal unless each of a step's sequences has slots in the pool."""
        if states is None:
            raise Internal("a step of a model with states has no slots for them")
        shape, num_slots = (num_seqs, self._pages), len(self.step.pool)
        for name, slots, min_slot in (("read", states.reads, -1), ("written", states.writes, 0)):
            if slots.shape != shape or slots.dtype != np.int32:
                raise Internal(f"slots to be {name} are {slots.dtype} {list(slots.shape)}, not int32 {list(shape)}")
            if slots.size and not min_slot <= slots.min() <= slots.max() < num_slots:
                raise Internal(f"a state to be {name} is outside of the pool of {num_slots} slots")

    def send(self, batch: StepBatch, shape: StepShape) -> None:
        """Queue the copy of a step that has passed :meth:`check` on the current stream."""
        turn, seqs, states = self._turn, batch.num_seqs, batch.states
        self._turn = (turn + 1) % HOST_RECORDS
        assert states is not None
        record = self._hosts[turn].numpy()
        lengths = np.diff(batch.query_starts)
        firsts = batch.context_lens - lengths
        chunks = (firsts % CHUNK + lengths + CHUNK - 1) // CHUNK
        record[: batch.num_tokens] = np.repeat(np.arange(seqs), lengths)
        record[batch.num_tokens : shape.tokens] = -1
        values: tuple[npt.NDArray[Any], ...] = (
            np.array([seqs]),
            batch.query_starts,
            firsts,
            np.concatenate(([0], np.cumsum(chunks))),
            np.repeat(np.arange(seqs), chunks),
        )
        for begin, numbers in zip(self._offsets, values, strict=True):
            record[begin : begin + len(numbers)] = numbers
        used = self._slots_at + seqs * SIDES * self._pages
        record[self._slots_at : used].reshape(seqs, SIDES, -1)[:] = np.stack((states.reads, states.writes), 1)
        self._device[:used].copy_(self._hosts[turn][:used], non_blocking=True)
