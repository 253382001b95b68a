"""Runs a rank on the CPU kernels: the operations by which its program meets those of other ranks, and its backend.

Each rank's backend works over the same pool. All run each forward pass at the same time, with the same batch and the
same adapters in the same slots: a rank waits in it for the others. Rank 0 alone gets logits; it copies blocks before
its forward pass begins. Where a rank fails, all do: a step raises BackendLost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pillion.core_lending_table import CoreShare
from pillion.engine.backends.backend import BackendLost, StepBatch
from pillion.engine.backends.cpu.cpu_backend import CpuBackend, CpuModel
from pillion.engine.backends.cpu.cpu_operations import OperationBuilder
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.ranks.rank_memory import TURNS, Bytes, RankMember, logit_row_bytes, partial_row_bytes
from pillion.errors import Internal
from pillion.kernels.cpu.ranks.rank_sums import MeetRanks, ProjectionSquares, SumRanks
from pillion.kernels.cpu.runtime.program import Buffer, Operation, Program

# Buffers in the memory that ranks share: a rank's own partials and those of all ranks, by turn, the logits, and the
# words of the waits. A rank's own memory has what its kernels read about its waits.
PARTIAL, PARTIALS, LOGITS, WORDS, MEETING = (
    f"rank.{name}" for name in ("partial", "partials", "logits", "words", "meeting")
)


class RankMeeting:
    """Makes the sums and waits of one program of the rank ``shard``, a
    :class:`pillion.engine.backends.cpu.cpu_operations.CpuMeeting`."""

    def __init__(self, shard: ModelShard) -> None:
        self._shard, self._number = shard, 0

    def _wait(self) -> dict[str, Any]:
        """Returns the arguments of every operation that waits for other ranks. The waits of a step are numbered one
        after the other."""
        self._number += 1
        words, meeting = (Buffer(name, 1, "int64", "steps") for name in (WORDS, MEETING))
        return {"words": words, "meeting": meeting, "rank": self._shard.rank, "number": self._number}

    def sum(
        self, builder: OperationBuilder, out: Buffer, *, add: bool = False, factor: float = 1.0
    ) -> tuple[Buffer, Operation]:
        """Returns the buffer for this rank's partial rows, and the sum over all ranks."""
        wait, stride = self._wait(), partial_row_bytes(builder.config)
        turn, width = self._number % TURNS, -(-builder.config.hidden_size // 32) * 32
        partial = Buffer(f"{PARTIAL}{turn}", width, "float32", builder.rows_of, row_bytes=stride)
        values = {
            **wait,
            "partials": replace(partial, name=f"{PARTIALS}{turn}"),
            "out": out,
            "width": min(width, out.width),
            "row_stride": stride,
            "out_stride": out.stride,
            "factor": factor,
        }
        return partial, Operation(SumRanks(self._shard.size, add, builder.rows_of), values, builder.when)

    def squares(self, builder: OperationBuilder, qkv: Buffer, out: Buffer) -> list[Operation]:
        """Returns the squares of this rank's queries and keys, and the sum over all ranks. Several ranks may have the
        same KV heads: the first of them counts their keys."""
        config, shard = builder.config, self._shard
        partial, total = self.sum(builder, out)
        sharers = max(1, shard.size // builder.layout.num_kv_heads)
        spec = ProjectionSquares(config.head_dim, config.num_heads, config.num_kv_heads, shard.rank % sharers == 0)
        values = {"qkv": qkv, "out": partial, "qkv_stride": qkv.stride, "out_stride": partial.stride}
        return [Operation(spec, values), total]

    def logits(self, config: ModelConfig, logits: Buffer) -> Buffer:
        """Returns the buffer for the rank's logits, beside those of the other ranks."""
        return replace(logits, name=LOGITS, row_bytes=logit_row_bytes(config))

    def end(self) -> Operation:
        """Returns the operation that ends a step: a wait for all ranks."""
        return Operation(MeetRanks(self._shard.size), self._wait())


class CpuRankBackend(CpuBackend):
    """Implements the backend of ``member``'s share of a model."""

    def __init__(
        self,
        model: CpuModel,
        threads: int,
        affinity: Sequence[int] = (),
        share: CoreShare | None = None,
        *,
        member: RankMember,
    ) -> None:
        """Makes a :class:`CpuBackend` over the memory of all ranks."""
        assert model.shard == member.shard
        self._member = member
        # The kernels read from these words how the rank waits (pillion.kernels.cpu.ranks.rank_sums). The first word
        # changes.
        self._meeting = np.array([0, member.naps, member.nap_ns, member.memory.rank_bytes], np.int64)
        super().__init__(model, threads, affinity, share, self._common(model.config))

    def _common(self, config: ModelConfig) -> dict[str, Bytes]:
        """Returns the memory that the programs use outside of the workspace, by the names of buffers."""
        memory, shard = self._member.memory, self._member.shard
        found = {
            WORDS: memory.words,
            MEETING: self._meeting.view(np.uint8),
            LOGITS: memory.logits[shard.vocabulary(config.vocab_size).start * 4 :],
        }
        for turn in range(TURNS):
            found[f"{PARTIALS}{turn}"] = every = memory.partials(turn)
            found[f"{PARTIAL}{turn}"] = every[shard.rank * memory.rank_bytes : (shard.rank + 1) * memory.rank_bytes]
        return found

    def check_step(self, pool: torch.Tensor, batch: StepBatch) -> None:
        super().check_step(pool, batch)
        if batch.num_tokens > self._member.memory.max_tokens:
            raise Internal(f"{batch.num_tokens} tokens, the ranks have memory for {self._member.memory.max_tokens}")

    def _run_checked(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        try:
            return super()._run_checked(pool, batch)
        except BaseException:
            self._member.memory.abort()
            raise

    def _run_kernels(self, program: Program) -> None:
        """Runs the kernels. Raises BackendLost where another rank does not come, because the step's results are worth
        nothing then."""
        memory, shard = self._member.memory, self._member.shard
        # The last operation of a step is a wait, so all ranks begin the next step with the same number.
        self._meeting[0] = memory.phase(shard.rank)
        super()._run_kernels(program)
        if memory.aborted:
            raise BackendLost(f"rank {shard.rank} of {shard.size}: a rank was lost, or hangs")

    def _read_logits(self, count: int, places: npt.NDArray[np.intp] | None) -> torch.Tensor:
        if not self._member.shard.leads:
            return torch.empty(0, self.vocab_size)
        return super()._read_logits(count, places)
