"""Base class of backends that run steps on the calling thread, over a pool in host memory."""

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
    """A step that ran completely at its launch."""

    sampled: Sampled

    def choose(self, rows: SamplingRows) -> None:
        raise Internal("choose: this step was launched with rows")

    def wait(self) -> Sampled:
        return self.sampled


class HostBackend(ABC):
    """Base class of :class:`pillion.engine.backends.backend.Backend`s on the host; subclasses implement ``_run``.

    Forward passes and copies can also be called separately. Logits are valid until the next forward pass, which may
    reuse their memory. Life cycle: constructed -> bind_pool -> forward, forward, ... -> close. warm_up may be called at
    any time before close, since it uses a separate pool.
    """

    max_steps_in_flight = 1
    gives_vectors = False
    adapters: BackendAdapters | None = None

    def __init__(self, layout: KVLayout, vocab_size: int) -> None:
        self.layout = layout
        self.vocab_size = vocab_size
        # Seconds that borrowed cores saved in the last forward pass.
        self.borrowed_s = 0.0
        # Largest logits of each row of the last forward pass, if its kernels find them.
        self.largest: LargestLogits | None = None
        self._pool: torch.Tensor | None = None
        # Layers whose inputs a step stores, in the column order of ``Sampled.states``.
        self.aux_hidden_state_layers: tuple[int, ...] = ()

    @property
    def here(self) -> HostBackend:
        """The backend of this process; it differs from ``self`` in a worker of several ranks."""
        return self

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        """Allocate the adapter slots. Raises ConfigError, unless a subclass supports adapters."""
        raise ConfigError("--enable-lora: this backend does not support adapters")

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Make each step return these layers' inputs of all its rows (``Sampled.states``). Called at most once, before
        ``bind_adapters`` and ``bind_pool``."""
        self.aux_hidden_state_layers = tuple(layers)

    def _read_states(self, num_tokens: int) -> States:
        """Return a copy of the layer inputs that the last forward pass stored, [num_tokens, layers * hidden]."""
        raise Internal("this backend returns no states")

    def _read_vectors(self, batch: StepBatch) -> Float32:
        """Return a copy of the last forward pass's hidden states, after the last norm, of the last ``batch.pooled``
        sample rows: float32 [pooled, hidden]."""
        raise Internal("this backend returns no vectors")

    def _pooled(self, batch: StepBatch, logits: torch.Tensor) -> tuple[Float32, ...]:
        """Return a copy of each pooled row's result: its hidden state, or the logits of its ids in
        ``batch.pooled_ids``. ``logits``: of the rows with ids, in order."""
        vectors = iter(self._read_vectors(batch) if batch.pooled else ())
        rows = iter(logits)
        return tuple(next(rows)[list(ids)].numpy() if ids else next(vectors) for ids in batch.pooled_ids)

    @abstractmethod
    def _run(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Run a forward pass over ``pool``, uint8 [slots, block_bytes]; return the result of :meth:`forward`."""

    def check_step(self, pool: torch.Tensor, batch: StepBatch) -> None:  # noqa: B027  (most refuse nothing)
        """Raise Internal for a batch that :meth:`_run` would reject."""

    def bind_pool(self, memory: PoolPlace, num_slots: int) -> None:
        """Use ``memory`` as the KV pool. Raises ConfigError for memory that is too small or read-only."""
        view, needed = checked_memory(memory, num_slots, self.layout)
        self._pool = torch.frombuffer(view, dtype=torch.uint8, count=needed).view(num_slots, -1)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's KV. Return float32 logits [R, vocab_size] of ``sample_rows``, in order, without the last
        ``batch.pooled`` ones, which need only hidden states."""
        return self._run(self._bound_pool(), batch)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slots, sources[i] to targets[i], in order. Targets must be leased to this worker. Raises Internal
        for lists of different length and for slots out of range."""
        pool = self._bound_pool()
        for source, target in checked_copies(sources, targets, len(pool)):
            pool[target].copy_(pool[source])

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> FinishedStep:
        """Run a whole step: copy blocks, run the forward pass and sample."""
        if rows is None:
            raise Internal("launch: this backend needs the rows of a step")
        if copies:
            self.copy_blocks(*zip(*copies, strict=True))
        logits = self.forward(batch)
        num_sampled = logits.shape[0] - sum(map(bool, batch.pooled_ids))
        sampled = sample(logits[:num_sampled], rows, self.largest)
        if batch.pooled_ids:
            sampled = replace(sampled, pooled=self._pooled(batch, logits[num_sampled:]))
        if self.aux_hidden_state_layers:
            sampled = replace(sampled, states=self._read_states(batch.num_tokens))
        return FinishedStep(replace(sampled, borrowed_s=self.borrowed_s) if self.borrowed_s else sampled)

    def warm_up(self, max_tokens: int) -> None:
        """Read all weights and grow buffers to a step of ``max_tokens`` tokens, over a separate pool."""
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
    """View host rows as an array of Sampled.states: float32, or bfloat16 as uint16 with the same bits."""
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()


def rows_of_states(states: States) -> torch.Tensor:
    """Inverse of :func:`states_of_rows`: return a tensor over the same memory."""
    rows = torch.from_numpy(states)
    return rows.view(torch.bfloat16) if rows.dtype == torch.uint16 else rows
