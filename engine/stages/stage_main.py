"""Runs the process of a stage, or of a rank of one: it does what the first process says, until the connection ends."""

from __future__ import annotations

import sys
from typing import cast

from pillion.engine.ranks.rank_main import Rank, run_rank
from pillion.engine.ranks.rank_messages import step_from_bytes
from pillion.engine.stages.stage_loading import load_stage
from pillion.engine.stages.staged_backend import WORKED, StageBackend


class StageRank(Rank):
    """Represents a stage's side of both connections to the first process."""

    def _on_step(self, payload: bytearray, descriptors: list[int]) -> bytes:
        backend = cast("StageBackend", self._backend)
        backend.forward(step_from_bytes(payload)[0])
        return WORKED.pack(*backend.worked)


if __name__ == "__main__":
    run_rank(sys.argv[1:], load_stage, StageRank)
