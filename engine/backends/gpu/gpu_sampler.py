"""Sampling on the GPU, with the same results as :mod:`pillion.engine.sampling.sampler` on the host (I6).

    within the step   logits --> choose --> sampled (on the device, read by the next step's embedding) --copy--> host
    after it          masks of grammars --pinned, as bits--> device
                        '--> logits --unedited, rows that report log probabilities--> host
                               |--rows of a prompt--> scores --> host
                               '--edits--> choose --> sampled --copy--> host

A step without masks and edits samples within its CUDA graph: its record contains the rows to sample. Other steps sample
afterwards, as do steps launched without rows; their records contain no rows to sample.

A late mask does not delay the step: the token sampled without it is dropped. Log probabilities of the few rows that
report them are computed on the host, by its sampler's code; those of prompts, which are many, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pillion.engine.backends.backend import BackendLost
from pillion.engine.backends.gpu.device_memory import event_on, to_device, to_host
from pillion.engine.backends.gpu.gpu_step import HOST_RECORDS
from pillion.engine.sampling.cuts import whole_groups
from pillion.engine.sampling.logprobs import LogprobReport
from pillion.engine.sampling.masks import possible_bans
from pillion.engine.sampling.scores import entries, max_alternatives, score
from pillion.kernels.gpu.sampling.gpu_sampling import choose
from pillion.kernels.gpu.sampling.sampling_device import SamplerScratch
from pillion.kernels.gpu.sampling.sampling_edits import apply_edits, keep_raw
from pillion.kernels.gpu.sampling.sampling_masks import apply_masks
from pillion.kernels.gpu.sampling.sampling_record import EditPacker, pack_rows
from pillion.kernels.step import MASK_LATE, NO_IDS, Int64, RowEdit, RowMasks, Sampled, SamplingRows
from pillion.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """The tokens of a step, being copied to the host; :meth:`wait` does not wait for later launches.

    Attributes:
        tokens: sampled tokens.
        raw: unedited logits of rows that report log probabilities, if any.
        done: CUDA event at the end of the copies of ``tokens``, ``raw`` and ``scores``; None off CUDA.
        scores: result of :func:`pillion.engine.sampling.scores.score` for prompts, if any.
        late: rows whose mask was late.
    """

    tokens: torch.Tensor
    raw: torch.Tensor | None
    rows: SamplingRows
    done: Any
    scores: torch.Tensor | None = None
    late: Int64 = field(default_factory=lambda: NO_IDS)

    def wait(self) -> Sampled:
        """Wait for the step's tokens; return them and their log probabilities by row. Raises BackendLost if the GPU
        failed."""
        if self.done is not None:
            try:
                self.done.synchronize()
            except RuntimeError as error:
                # A kernel failed, and so will every later call on the device.
                raise BackendLost(f"the GPU failed: {error}") from error
        tokens: Int64 = self.tokens.numpy().astype(np.int64)
        tokens[self.late] = MASK_LATE
        scored = () if self.scores is None or self.rows.scored is None else entries(self.scores, self.rows.scored)
        reported = () if self.raw is None else _reported(self.raw, self.rows, tokens)
        return Sampled(tuple(tokens.tolist()), reported, scored)


class GpuSampler:
    """Sampler of a backend. ``sampled``: int32 tensor for the tokens of each launch, by row."""

    def __init__(self, sampled: torch.Tensor, vocab_size: int, max_rows: int) -> None:
        """``max_rows``: max rows per kernel launch; a step with more rows needs several."""
        self._sampled = sampled
        # A multiple of 16 bytes of int32, so that the rows of every launch are aligned alike, and no kernel is compiled
        # for another alignment.
        self._max_rows = -(-max_rows // 4) * 4
        self._scratch = SamplerScratch(self._max_rows, vocab_size, sampled.device)
        self._edits = EditPacker(vocab_size)
        self._device = sampled.device
        self._pinned = sampled.is_cuda
        # Host buffers, used in rotation like records, because allocating pinned memory per step is slow.
        self._hosts = [torch.empty_like(sampled, device="cpu", pin_memory=self._pinned) for _ in range(HOST_RECORDS)]
        self._turn = 0

    def choose(self, logits: torch.Tensor, record: torch.Tensor) -> None:
        """Sample tokens of logits [N, V] float32 with the parameters ``record`` [N, RECORD_FIELDS], except rows that it
        excludes. Allocates nothing, so that a graph can capture it."""
        for begin in range(0, len(logits), self._max_rows):
            part = slice(begin, min(begin + self._max_rows, len(logits)))
            choose(logits[part], record[part], self._sampled[part], self._scratch)

    def launch(self, logits: torch.Tensor, rows: SamplingRows, *, sampled: bool) -> GpuChoice:
        """Start to sample a token for each of the first R rows of logits [R + Q, V] float32, which are edited in place,
        unless the step itself ``sampled`` them, and to score prompts by the last Q rows."""
        count = len(rows)
        with torch.inference_mode():
            logits, scores = logits[:count], self._score(logits[count:], rows)
            if not count:
                return GpuChoice(torch.empty(0, dtype=torch.int32), None, rows, self._event(), scores)
            late, edits = NO_IDS, rows.edits
            if rows.masks is not None:
                late, edits = self._mask(logits, rows.masks, edits)
            raw = self._keep_raw(logits, rows)
            if edits:
                apply_edits(logits, to_device(self._edits.pack(edits), self._device))
            if not sampled:
                self.choose(logits, to_device(pack_rows(rows), self._device))
            tokens = self._hosts[self._turn][:count].copy_(self._sampled[:count], non_blocking=True)
            self._turn = (self._turn + 1) % HOST_RECORDS
            return GpuChoice(tokens, raw, rows, self._event(), scores, late)

    def _mask(
        self, logits: torch.Tensor, masks: RowMasks, edits: tuple[RowEdit, ...]
    ) -> tuple[Int64, tuple[RowEdit, ...]]:
        """Start to mask rows of logits. Return the rows whose mask is late, and the edits without impossible bans."""
        bits, ready = masks.take()
        late, rows = masks.rows[~ready], masks.rows
        if len(late):
            bits, rows = bits[ready], rows[ready]
        apply_masks(
            logits,
            to_device(np.ascontiguousarray(bits).view(np.int32), self._device),
            to_device(rows.astype(np.int32), self._device),
        )
        return late, possible_bans(edits, rows, bits)

    def _score(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor | None:
        """Start to score prompts by their logits [Q, V]; return the scores on the host, None if there are none."""
        if rows.scored is None:
            return None
        tokens = to_device(rows.scored.token_ids, self._device)
        return to_host(score(logits, tokens, max_alternatives(rows.scored, logits.shape[1])))

    def _keep_raw(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor | None:
        """Start to copy the logits of rows that report log probabilities to the host, before they are edited."""
        reporting = np.flatnonzero(rows.logprobs >= 0)
        if not len(reporting):
            return None
        kept = torch.empty((len(reporting), logits.shape[1]), dtype=torch.float32, device=logits.device)
        keep_raw(logits, to_device(reporting, self._device), kept)
        return to_host(kept)

    def _event(self) -> Any:
        return event_on(self._sampled.device) if self._pinned else None


def _reported(raw: torch.Tensor, rows: SamplingRows, tokens: Int64) -> tuple[TokenLogprob | None, ...]:
    """Return the log probabilities of each row, None without a report. ``raw``: unedited logits of reporting rows."""
    reporting = np.flatnonzero(rows.logprobs >= 0)
    entries_by_row: list[TokenLogprob | None] = [None] * len(rows)
    with np.errstate(all="ignore"):
        report = LogprobReport(whole_groups(raw), raw.shape[1], rows.logprobs[reporting])
        for row, entry in zip(reporting.tolist(), report.of(tokens[reporting]), strict=True):
            entries_by_row[row] = entry
    return tuple(entries_by_row)
