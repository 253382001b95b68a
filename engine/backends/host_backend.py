"""Runs steps on the calling thread, over a pool in the host's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pillion.engine.backends.backend import (
    BackendAdapters,
    KVLayout,
    PoolPlace,
    checked_copies,
    checked_memory,
    warm_up_batches,
)
from pillion.engine.sampling.sampler import LargestLogits, sample
from pillion.errors import ConfigError, Internal
from pillion.kernels.step import Float32, Sampled, SamplingRows, States, StateSlots, StepBatch


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The results of a step, which was run when it was launched."""

    sampled: Sampled

    def choose(self, rows: SamplingRows) -> None:
        raise Internal("a step that does not run ahead has its tokens")

    def wait(self) -> Sampled:
        return self.sampled


class HostBackend(ABC):
    """Implements :class:`pillion.engine.backends.backend.Backend`, whose docstring has the contract, over a subclass's
    ``_run``.

    Forward pass and copies can also be called one by one. The logits of a forward pass stay valid until the next one,
    which may use their memory again. Lifecycle: made -> bind_pool -> forward, forward, ... -> close; warm_up may be
    called at any time before close and uses memory of its own.
    """

    max_steps_under_way = 1
    # This says whether steps can give the vectors of rows (StepBatch.pooled).
    gives_vectors = False
    # These are the slots for adapters, which ``bind_adapters`` makes.
    adapters: BackendAdapters | None = None

    def __init__(self, layout: KVLayout, vocab_size: int) -> None:
        self.layout = layout
        self.vocab_size = vocab_size
        # This is how much longer the last forward pass would have taken without cores of other workers.
        self.borrowed_s = 0.0
        # These are the largest logits of the last forward pass's rows, where a backend finds them while it computes.
        self.largest: LargestLogits | None = None
        self._pool: torch.Tensor | None = None
        # A step keeps the inputs of these layers, in the order of the columns of ``Sampled.states``.
        self.state_layers: tuple[int, ...] = ()

    @property
    def here(self) -> HostBackend:
        """Gives the part of the backend that runs in this process."""
        return self

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Make the slots for adapters. Raises ConfigError, unless a subclass takes adapters."""
        raise ConfigError("--enable-lora: this backend takes no adapters")

    def keep_states(self, layers: Sequence[int]) -> None:
        """Make each step return the inputs of these layers for all its rows (``Sampled.states``). It is called at most
        once, before ``bind_adapters`` and ``bind_pool``."""
        self.state_layers = tuple(layers)

    def _read_states(self, num_tokens: int) -> States:
        """Return the states of the forward pass that has just run, a copy."""
        raise Internal("this backend keeps no states")

    def _read_vectors(self, batch: StepBatch) -> Float32:
        """Return what the last ``pooled`` of the batch's ``sample_rows`` were after the model's last norm, in the
        forward pass that has just run: a copy, float32 [pooled, hidden]."""
        raise Internal("this backend gives no vectors")

    def _pooled(self, batch: StepBatch, logits: torch.Tensor) -> tuple[Float32, ...]:
        """Return what each row of ``pooled_ids`` gives, a copy; ``logits`` are those of the rows that want some."""
        vectors = iter(self._read_vectors(batch) if batch.pooled else ())
        rows = iter(logits)
        return tuple(next(rows)[list(ids)].numpy() if ids else next(vectors) for ids in batch.pooled_ids)

    @abstractmethod
    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Run a forward pass over ``pool``, uint8 [slots, block_bytes]; return what :meth:`forward` returns."""

    def check_step(self, pool: torch.Tensor, batch: StepBatch) -> None:  # noqa: B027  (most refuse nothing)
        """Raise Internal for a batch that :meth:`_run` would refuse before it has begun."""

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use ``memory`` as the KV pool. Raises ConfigError for memory that is too small or read-only."""
        view, needed = checked_memory(memory, num_slots, self.layout)
        self._pool = torch.frombuffer(view, dtype=torch.uint8, count=needed).view(num_slots, -1)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's KV and return float32 logits [R, vocab_size] of ``sample_rows``, in that order, but the
        last ones, whose vectors are wanted."""
        return self._run(self._bound_pool(), batch)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slots, sources[i] to targets[i], pair after pair. The targets are leased to this worker. Raises
        Internal for lists of different length and for slots that the pool does not have."""
        pool = self._bound_pool()
        for source, target in checked_copies(sources, targets, len(pool)):
            pool[target].copy_(pool[source])

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> FinishedStep:
        """Run the whole step before it returns: copies blocks, runs the forward pass and samples."""
        if rows is None:
            raise Internal("a backend that does not run ahead needs a step's rows at its launch")
        if copies:
            self.copy_blocks(*zip(*copies, strict=True))
        logits = self.forward(batch)
        chosen = logits.shape[0] - sum(map(bool, batch.pooled_ids))
        sampled = sample(logits[:chosen], rows, self.largest)
        if batch.pooled_ids:
            sampled = replace(sampled, pooled=self._pooled(batch, logits[chosen:]))
        if self.state_layers:
            sampled = replace(sampled, states=self._read_states(batch.num_tokens))
        return FinishedStep(replace(sampled, borrowed_s=self.borrowed_s) if self.borrowed_s else sampled)

    def warm_up(self, max_tokens: int) -> None:
        """Read all weights and lets buffers grow to a step of so many tokens, over a pool of its own. A larger step
        lets them grow when it comes."""
        block_size, pages = self.layout.block_size, self.layout.state_pages
        blocks = -(-max_tokens // block_size)
        pool = torch.zeros(blocks + pages, self.layout.block_bytes, dtype=torch.uint8)
        writes = np.arange(blocks, blocks + pages, dtype=np.int32)[None]
        states = StateSlots(np.full_like(writes, -1), writes) if pages else None
        for batch in warm_up_batches(max_tokens, block_size):
            self._run(pool, replace(batch, states=states))

    def close(self) -> None:
        """Release the pool, so that its mapping can be closed. Idempotent."""
        self._pool = None

    def _bound_pool(self) -> torch.Tensor:
        if self._pool is None:
            raise Internal("a step before bind_pool")
        return self._pool


def states_of_rows(rows: torch.Tensor) -> States:
    """Return rows in host memory as states: float32 stays; bfloat16 becomes uint16 with the same bits."""
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()


def rows_of_states(states: States) -> torch.Tensor:
    """Return the rows of which :func:`states_of_rows` made states, over the same memory."""
    rows = torch.from_numpy(states)
    return rows.view(torch.bfloat16) if rows.dtype == torch.uint16 else rows
