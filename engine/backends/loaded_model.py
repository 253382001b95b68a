"""A loaded model: its backend, and properties that a worker needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pillion.config import WorkerFlags
from pillion.engine.adapters.adapter_forms import AdapterForm
from pillion.engine.adapters.adapter_reader import AdapterReader
from pillion.engine.backends.backend import Backend, bound_adapters
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.vector_head import Labeller
from pillion.engine.scheduling.step_model import StepModel
from pillion.kvstore.hashing import namespace_base

if TYPE_CHECKING:
    # GPU machines for tests lack packages that these modules import.
    from pillion.engine.ranks.rank_processes import RankProcesses
    from pillion.kvstore.client.attachment import Attachment, MapDevice


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the backend that runs it.

    Attributes:
        operators: name of the kernels in logs and metrics.
        core_share: fraction of its lending table's cores that the worker owns; 0 without a table.
        ranks: the worker's other processes, or None.
        expected_cost: cost of a step estimated from the device's rates; None if these are unknown.
        pair_tokens: cost of a query-key pair relative to a token's, by the model's shape; 0 if unknown.
        chooses_tokens: False for a model without an LM head, which only computes vectors of texts.
        head: computes the label logits of a classifier from a text's vector; None for other models.
        whole_texts: True if each text is computed in one step, without a KV cache.
        map_device: maps the pool of a model on GPUs; None on the CPU.
    """

    prepared: PreparedModel
    backend: Backend
    operators: str = "torch"
    core_share: float = 0.0
    ranks: RankProcesses | None = None
    expected_cost: StepModel | None = None
    pair_tokens: float = 0.0
    chooses_tokens: bool = True
    head: Labeller | None = None
    whole_texts: bool = False
    map_device: MapDevice | None = None

    def bind_pool(self, attachment: Attachment) -> None:
        """Make every process of the worker map the pool and use it."""
        if self.ranks is not None:
            if not isinstance(attachment.pool, memoryview):
                attachment.name_processes(self.ranks.pids())
            self.ranks.map_pool(*attachment.handed_over())
        self.backend.bind_pool(attachment.pool, attachment.num_slots)

    def adapter_reader(self, max_rank: int, targets: tuple[str, ...] = ()) -> AdapterReader:
        """Return a picklable reader of adapters for the backend, with ranks up to ``max_rank``, limited to ``targets``
        unless these are empty."""
        from pillion.engine.checkpoints.weights import output_orders

        folder = self.prepared.folder
        return AdapterReader(
            str(folder),
            self.prepared.dtype,
            max_rank,
            {name: order.tolist() for name, order in output_orders(load_config(folder)).items()},
            cast("AdapterForm", bound_adapters(self.backend.adapters).form()),
            targets,
        )

    def namespace(self) -> bytes:
        """Return the 32-byte namespace that seeds the root hashes of requests (I2)."""
        layout = self.backend.layout
        return namespace_base(
            fingerprint=self.prepared.fingerprint,
            dtype=layout.dtype,
            layout=layout.version,
            block_size=layout.block_size,
        )


# Loads the model of a worker's flags, with a number of CPU threads. Blocks; raises ConfigError.
BackendFactory = Callable[[WorkerFlags, int], LoadedModel]
