"""A step's arrays as one vector of integers, copied to the device at once.

    StepBatch --fill--> pinned host record --one asynchronous copy--> device record, read by kernels through views

The device record has a fixed address, so a CUDA graph captured over it runs any later step. Host records are used in
rotation, each again only after its step has finished. Steps are padded to the graph's size with rows that write
nothing: slot -1, token 0, row 0 of the rotary tables, and absent from the attention plan. They also get no experts, for
which the record contains the unpadded numbers of rows.
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

# Two for steps in flight, which are still being read, and one to write.
HOST_RECORDS = 3
# Words reserved per number of rows, so that both are aligned to 16 bytes.
_COUNT_WORDS = 4


def _in_items(words: int) -> int:
    """Return ``words`` rounded up to whole attention items."""
    return -(-words // ITEM_WORDS) * ITEM_WORDS


@dataclass(frozen=True, slots=True)
class StepShape:
    """The parameters of a launch that are not in the record.

    Attributes:
        tokens, samples: padded numbers of tokens and of sampled rows.
        chunks, adapters: True if there may be chunks of prompts, and rows with adapters.
        vectors: number of the last sampled rows that need hidden states instead of logits. Steps with any have no
            graph.
    """

    tokens: int
    samples: int
    chunks: bool
    adapters: bool = False
    vectors: int = 0


class GpuStepRecord:
    """The record of a step over a bound pool. Attributes are views of the record on the device.

    Attributes:
        token_ids, rope_rows, rows: int32 [max_tokens]; tokens, their rows in the rotary tables, and their rows in the
            pool: slot * block_size + offset, or -1.
        sample_rows: int32 [max_tokens], rows with logits or hidden states.
        num_rows, num_samples: int32 [1], numbers of rows and of sampled rows without padding.
        sampling: int32 [max_samples, RECORD_FIELDS], parameters of the rows that the step itself samples.
        attention: int32, a plan per part of the process's KV heads
            (:class:`pillion.kernels.gpu.attention.gpu_attention_plan.GpuAttentionPlan`).
    """

    def __init__(
        self,
        max_tokens: int,
        max_samples: int,
        block_size: int,
        attention_words: Sequence[int],
        device: torch.device,
    ) -> None:
        """Allocate the record. ``attention_words``: max length of each part's attention plan."""
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._counts_at = slice(4 * max_tokens, 4 * max_tokens + 2 * _COUNT_WORDS)
        begin = self._counts_at.stop
        self._sampling_at = slice(begin, begin + RECORD_FIELDS * max_samples)
        # Plans are aligned to items: so items do not cross cache lines, and all plans have the same alignment, for
        # which Triton specializes kernels.
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
        """Queue the copy of a step on the current stream. ``sample_rows``: the distinct sample rows; ``plans``:
        attention plan per part, None for a part that is only written; ``sampling``: parameters of the rows that the
        step itself samples, None if it samples none."""
        turn = self._turn
        self._turn = (turn + 1) % HOST_RECORDS
        record, max_tokens = self._arrays[turn], self._max_tokens
        lengths = np.diff(batch.query_starts)
        sequences = np.repeat(np.arange(batch.num_seqs), lengths)
        blocks, offsets = np.divmod(batch.positions, self._block_size)
        rows = batch.block_tables[sequences, blocks] * np.int64(self._block_size) + offsets
        for column, values, padding, padded in (
            (0, batch.token_ids, 0, shape.tokens),
            (1, batch.table_rows, 0, shape.tokens),
            (2, rows, -1, shape.tokens),
            (3, sample_rows, 0, shape.samples),
        ):
            begin = column * max_tokens
            end = begin + len(values)
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
        """Make the record an empty step, which writes nothing to the pool."""
        self._device.zero_()
        self.rows.fill_(-1)
        self.sampling.view(torch.float32)[:, FIELD_OF["temperature"]] = NO_ROW
