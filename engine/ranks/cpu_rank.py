"""Backend of a rank on the CPU kernels, with its shard of the model.

The ranks' backends share the pool. All run each forward pass simultaneously, with the same batch and the same adapter
slots, and wait for each other within it. Only rank 0 gets logits, and copies blocks, before its forward pass. If a rank
fails, all fail: the step raises BackendLost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.backends.backend import BackendLost
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_model import CpuModel
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.ranks.rank_collective import COLLECTIVE, LOGITS, PARTIAL, PARTIALS, WORDS
from pillion.engine.ranks.rank_memory import TURNS, Bytes, RankMember
from pillion.errors import Internal
from pillion.host.core_lending_table import CoreShare
from pillion.kernels.cpu.runtime.program import Program
from pillion.kernels.step import StepBatch


class CpuRankBackend(CpuBackend):
    """Backend of ``member``'s shard of a model."""

    def __init__(
        self,
        model: CpuModel,
        threads: int,
        affinity: Sequence[int] = (),
        share: CoreShare | None = None,
        *,
        member: RankMember,
    ) -> None:
        """Make a :class:`CpuBackend` over the memory of all ranks."""
        assert model.shard == member.shard
        self._member = member
        # Wait parameters for the kernels (pillion.kernels.cpu.ranks.rank_sums); the first word is set in each step.
        self._collective = np.array([0, member.naps, member.nap_ns, member.memory.rank_bytes], np.int64)
        super().__init__(model, threads, affinity, share, self._common(model.config))

    def _common(self, config: ModelConfig) -> dict[str, Bytes]:
        """Return the memory of the programs' buffers outside of the workspace, by buffer name."""
        memory, shard = self._member.memory, self._member.shard
        buffers = {
            WORDS: memory.words,
            COLLECTIVE: self._collective.view(np.uint8),
            LOGITS: memory.logits[shard.vocabulary(config.vocab_size).start * 4 :],
        }
        for turn in range(TURNS):
            partials, first = memory.partials(turn), shard.rank * memory.rank_bytes
            buffers[f"{PARTIALS}{turn}"] = partials
            buffers[f"{PARTIAL}{turn}"] = partials[first : first + memory.rank_bytes]
        return buffers

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
        """Run the kernels. Raises BackendLost if another rank does not arrive, since the results are then invalid."""
        memory, shard = self._member.memory, self._member.shard
        # A step ends with a barrier, so all ranks begin at the same phase.
        self._collective[0] = memory.phase(shard.rank)
        super()._run_kernels(program)
        if memory.aborted:
            raise BackendLost(f"rank {shard.rank} of {shard.size}: a rank was lost, or hangs")

    def _read_logits(self, count: int, places: npt.NDArray[np.intp] | None) -> torch.Tensor:
        if not self._member.shard.leads:
            return torch.empty(0, self.vocab_size)
        return super()._read_logits(count, places)
