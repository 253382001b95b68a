"""Operations that synchronize one rank's CPU program with the other ranks': all-reduces of partial rows, and waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.ranks.rank_memory import TURNS, logit_row_bytes, partial_row_bytes
from pillion.kernels.cpu.ranks.rank_sums import MeetRanks, ProjectionSquares, SumRanks
from pillion.kernels.cpu.runtime.program import Buffer, Operation

# Buffers in shared memory: a rank's partials and those of all ranks, by turn, the logits, and the words of the waits;
# and in the rank's own memory, its wait parameters.
PARTIAL, PARTIALS, LOGITS, WORDS, COLLECTIVE = (
    f"rank.{name}" for name in ("partial", "partials", "logits", "words", "collective")
)


class RankCollective:
    """Makes the all-reduces and waits of one rank's program. Its methods must be called in program order.

    ``config`` is the shape of the rank's layers, ``num_kv_heads`` the number of KV heads of the whole model.
    """

    def __init__(self, shard: ModelShard, config: ModelConfig, num_kv_heads: int) -> None:
        self._shard, self._config, self._num_kv_heads = shard, config, num_kv_heads
        self._number = 0

    def _wait(self) -> dict[str, Any]:
        """Return the arguments of an operation that waits for other ranks. A step's waits are numbered in order."""
        self._number += 1
        words, collective = (Buffer(name, 1, "int64", "steps") for name in (WORDS, COLLECTIVE))
        return {"words": words, "collective": collective, "rank": self._shard.rank, "number": self._number}

    def sum(
        self, out: Buffer, rows_of: str, when: str, *, add: bool = False, factor: float = 1.0
    ) -> tuple[Buffer, Operation]:
        """Return the shared-memory buffer for this rank's partial rows, and the all-reduce that writes ``factor`` *
        (their sum over ranks) to ``out``, or adds it with ``add``. ``rows_of`` and ``when``: those of the operation
        that computes the partial rows."""
        wait, stride = self._wait(), partial_row_bytes(self._config)
        turn, width = self._number % TURNS, -(-self._config.hidden_size // 32) * 32
        partial = Buffer(f"{PARTIAL}{turn}", width, "float32", rows_of, row_bytes=stride)
        values = {
            **wait,
            "partials": replace(partial, name=f"{PARTIALS}{turn}"),
            "out": out,
            "width": min(width, out.width),
            "row_stride": stride,
            "factor": factor,
        }
        return partial, Operation(SumRanks(self._shard.size, add, rows_of), values, when)

    def squares(self, qkv: Buffer, out: Buffer, rows_of: str, when: str) -> list[Operation]:
        """Return the operations that sum the squares of this rank's queries and keys, and all-reduce the sums into
        ``out``. Of several ranks with the same KV heads, only the first counts the keys."""
        config, shard = self._config, self._shard
        partial, total = self.sum(out, rows_of, when)
        sharers = max(1, shard.size // self._num_kv_heads)
        spec = ProjectionSquares(config.head_dim, config.num_heads, config.num_kv_heads, shard.rank % sharers == 0)
        values = {"qkv": qkv, "out": partial}
        return [Operation(spec, values), total]

    def logits(self, config: ModelConfig, logits: Buffer) -> Buffer:
        """Return the shared-memory buffer for the rank's logits, adjacent to those of the other ranks."""
        return replace(logits, name=LOGITS, row_bytes=logit_row_bytes(config))

    def end(self) -> Operation:
        """Return the barrier that ends a step."""
        return Operation(MeetRanks(self._shard.size), self._wait())
