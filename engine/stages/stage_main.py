"""Process of a stage, or of a rank of one, which executes the first process's messages until the connection ends."""

from __future__ import annotations

import sys
from typing import Any, cast

from pillion.config import WorkerFlags
from pillion.engine.backends.devices import resolve_device
from pillion.engine.ranks.rank_main import LoadedShare, Rank, run_rank
from pillion.engine.ranks.rank_messages import step_from_bytes
from pillion.engine.stages.staged_backend import WORKED, StageBackend
from pillion.kvstore.memory.domain import CPU


class StageRank(Rank):
    """A stage's side of both connections to the first process."""

    def _on_step(self, payload: bytearray, descriptors: list[int]) -> bytes:
        backend = cast("StageBackend", self._backend)
        backend.forward(step_from_bytes(payload)[0])
        return WORKED.pack(*backend.worked)


def load(order: dict[str, Any], *descriptors: int) -> LoadedShare:
    """Load a process's share by the first one's order, on the device of its flags. Raises ConfigError."""
    flags = WorkerFlags(**order["flags"])
    if resolve_device(flags) == CPU:
        from pillion.engine.stages.stage_loading import load_stage

        return LoadedShare(*load_stage(flags, order, *descriptors))
    from pillion.engine.gpu_stages.gpu_stage_loading import load_gpu_stage
    from pillion.kvstore.gpu.mapped_memory import map_pool

    return LoadedShare(*load_gpu_stage(flags, order, *descriptors), map_pool)


if __name__ == "__main__":
    run_rank(sys.argv[1:], load, StageRank)
