"""Layers of a worker's stages, and the mapping of processes to stages and ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Place of one process among a worker's ``stages``, each of ``ranks`` processes."""

    stage: int
    rank: int
    stages: int
    ranks: int

    @classmethod
    def of(cls, process: int, stages: int, ranks: int) -> StagePlace:
        """Return the place of a process; those of the first stage come first."""
        return cls(*divmod(process, ranks), stages, ranks)

    @property
    def process(self) -> int:
        return self.stage * self.ranks + self.rank

    @property
    def name(self) -> str:
        """Name of the process in messages."""
        return f"stage {self.stage}" + (f" rank {self.rank}" if self.ranks > 1 else "")

    def shard(self, config: ModelConfig) -> ModelShard:
        """Return the process's shard. Raises ConfigError for a model that ranks or stages cannot divide."""
        return replace(
            ModelShard.of(config, self.rank, self.ranks),
            layers=layers_of_stage(config.num_layers, self.stage, self.stages),
        )


def layers_of_stage(layers: int, stage: int, stages: int) -> range:
    """Return the layers of a stage. Shares differ by at most one layer; larger ones come last, because the last layer
    of a prefill step ends with its KV. Raises ConfigError for more stages than layers."""
    if stages > layers:
        raise ConfigError(f"--pipeline-parallel-size {stages} is too large for {layers} layers")
    return range(stage * layers // stages, (stage + 1) * layers // stages)
