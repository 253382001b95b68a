"""A step's arrays as one vector of integers, copied to the device at once.

    StepBatch --fill--> pinned host record --one asynchronous copy--> device record, read by kernels through views

The device record has a fixed address, so a CUDA graph captured over it runs any later step. Host records are reused in
turn, each only after the step that it was copied for has finished. Steps are padded to the graph's size with rows that
write nothing: slot -1, token 0, row 0 of the rotary tables, absent from the attention plan, and without experts, which
is why the record contains the unpadded numbers of rows.
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
# Words per number of rows, so that kernels load both from addresses aligned to 16 bytes.
_COUNT_WORDS = 4


def _in_items(words: int) -> int:
    """Round ``words`` up to whole items of attention."""
    return -(-words // ITEM_WORDS) * ITEM_WORDS


@dataclass(frozen=True, slots=True)
class StepShape:
    """The parameters of a launch that are not in the record.

    Attributes:
        tokens, samples: padded numbers of tokens and of sampled rows.
        chunks, adapters: whether there are chunks, and rows with adapters.
        vectors: number of sampled rows, the last ones, of which vectors are needed instead of logits. Such steps have
            no graph.
    """

    tokens: int
    samples: int
    chunks: bool
    adapters: bool = False
    vectors: int = 0


class GpuStepRecord:
    """The record of one step over a bound pool. The attributes are views of the record on the device.

    Attributes:
        token_ids, rope_rows, rows: int32 [max_tokens]; the tokens, their rows in the rotary tables, and their rows in
            the pool: slot * block_size + offset, or -1.
        sample_rows: int32 [max_tokens], the rows whose logits are sampled.
        num_rows, num_samples: int32 [1], the step's numbers of rows and sampled rows without padding.
        sampling: int32 [max_samples, RECORD_FIELDS], the sampling records of rows sampled within the step.
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
        """Allocate the record. ``attention_words``: the max length of the plan of each part."""
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._counts_at = slice(4 * max_tokens, 4 * max_tokens + 2 * _COUNT_WORDS)
        begin = self._counts_at.stop
        self._sampling_at = slice(begin, begin + RECORD_FIELDS * max_samples)
        # Plans are aligned to items, so that items do not cross cache lines, and all parts have the same alignment,
        # which Triton specializes kernels for.
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
        """Start to copy a step on the current stream. ``plans``: the attention plans of ``batch``, None for a part that
        is only written; ``sampling``: the first of the sampled rows, None if the step samples no tokens."""
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
