"""A step's arrays as one vector of integers, which one copy brings to the device.

    StepBatch --fill--> pinned host record --one asynchronous copy--> device record, whose views kernels read

The record on the device has a fixed address, so a CUDA graph that was captured over it runs any later step. Host
records take turns: one is written again only after the step that it was copied for has finished. Steps are padded to
the graph's size with rows that write nothing: they have no slot (-1), token 0, row 0 of the rotary tables, no part in
the attention's plan, and no experts, which is why a step's true numbers of rows are in its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from pillion.kernels.gpu.attention.gpu_attention_plan import ITEM_WORDS, GpuAttentionPlan
from pillion.kernels.gpu.sampling.sampling_record import FIELD_OF, NO_ROW, RECORD_FIELDS, write_rows
from pillion.kernels.step import Int32, SamplingRows, StepBatch

# Two steps may be in flight, whose records may still be read while the third one is written.
HOST_RECORDS = 3
# Each of the two numbers of rows has so many words, so that kernels find both at addresses of 16 bytes.
_COUNT_WORDS = 4


def _in_items(words: int) -> int:
    """Return how many words the items of attention have that ``words`` fit into."""
    return -(-words // ITEM_WORDS) * ITEM_WORDS


@dataclass(frozen=True, slots=True)
class StepShape:
    """Says what a launch depends on beside the record.

    Attributes:
        tokens, samples: padded numbers of tokens and of sampled rows.
        chunks, adapters: whether there are chunks, and rows with adapters.
        vectors: of how many sampled rows, the last ones, vectors are wanted in place of logits. Such steps have no
            graph.
    """

    tokens: int
    samples: int
    chunks: bool
    adapters: bool = False
    vectors: int = 0


class GpuStepRecord:
    """The arrays of one step over a bound pool, its record. The attributes are views of the record on the device.

    Attributes:
        token_ids, rope_rows, rows: int32 [max_tokens]; the tokens, their rows in the rotary tables, and their rows in
            the pool: slot * block_size + offset, or -1.
        sample_rows: int32 [max_tokens], numbers of the rows whose logits are sampled.
        num_rows, num_samples: int32 [1], how many rows and sampled rows the step has without padding.
        sampling: int32 [max_samples, RECORD_FIELDS], how the first sampled rows choose their tokens within the step.
        attention: int32, for each part of the process's KV heads, the plan of
            :class:`pillion.kernels.gpu.attention.paged_attention.PagedAttention`.
    """

    def __init__(
        self,
        max_tokens: int,
        max_samples: int,
        block_size: int,
        attention_words: Sequence[int],
        device: torch.device,
    ) -> None:
        """Make the record. ``attention_words`` is the greatest length of the plan of each part."""
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._counts_at = slice(4 * max_tokens, 4 * max_tokens + 2 * _COUNT_WORDS)
        begin = self._counts_at.stop
        self._sampling_at = slice(begin, begin + RECORD_FIELDS * max_samples)
        # Plans begin at multiples of an item's words, so that items lie in one cache line each, and no part needs a
        # kernel of its own for numbers that begin elsewhere.
        ends = accumulate((_in_items(count) for count in attention_words), initial=_in_items(self._sampling_at.stop))
        *self._plans_at, words = ends
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(HOST_RECORDS)]
        self._arrays: list[npt.NDArray[np.int32]] = [host.numpy() for host in self._hosts]
        self._turn = 0
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        parts = self._device[: 4 * max_tokens].view(4, max_tokens)
        self.token_ids, self.rope_rows, self.rows, self.sample_rows = parts.unbind(0)
        counts = self._device[self._counts_at].view(2, _COUNT_WORDS)
        self.num_rows, self.num_samples = counts[0, :1], counts[1, :1]
        self.sampling = self._device[self._sampling_at].view(max_samples, RECORD_FIELDS)
        self.attention = [
            self._device[begin : begin + count] for begin, count in zip(self._plans_at, attention_words, strict=True)
        ]

    def send(
        self,
        batch: StepBatch,
        sample_rows: Int32,
        shape: StepShape,
        plans: Sequence[GpuAttentionPlan | None],
        sampling: SamplingRows | None,
    ) -> None:
        """Begin the copy of a step on the current stream. ``plans`` are the attention's plans of ``batch``, None for a
        part that is only written; ``sampling`` has the first of the sampled rows, None where the step chooses no
        tokens."""
        turn = self._turn
        self._turn = (turn + 1) % HOST_RECORDS
        record, most = self._arrays[turn], self._max_tokens
        lengths = np.diff(batch.query_starts)
        owners = np.repeat(np.arange(batch.num_seqs), lengths)
        blocks, offsets = np.divmod(batch.positions, self._block_size)
        rows = batch.block_tables[owners, blocks] * np.int64(self._block_size) + offsets
        for place, values, padding, padded in (
            (0, batch.token_ids, 0, shape.tokens),
            (1, batch.table_rows, 0, shape.tokens),
            (2, rows, -1, shape.tokens),
            (3, sample_rows, 0, shape.samples),
        ):
            begin, end = place * most, place * most + len(values)
            record[begin:end] = values
            record[end : begin + padded] = padding
        record[self._counts_at][::_COUNT_WORDS] = batch.num_tokens, len(sample_rows)
        write_rows(record[self._sampling_at].reshape(-1, RECORD_FIELDS)[: shape.samples], sampling)
        used = self._sampling_at.stop
        for begin, plan in zip(self._plans_at, plans, strict=True):
            if plan is not None:
                used = begin + len(plan.record)
                record[begin:used] = plan.record
        self._device[:used].copy_(self._hosts[turn][:used], non_blocking=True)

    def clear(self) -> None:
        """Make the record an empty step: kernels that run over it write nothing to the pool."""
        self._device.zero_()
        self.rows.fill_(-1)
        self.sampling.view(torch.float32)[:, FIELD_OF["temperature"]] = NO_ROW
