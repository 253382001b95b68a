"""A loaded model: the backend that runs it, and its properties that a worker needs."""

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
    # Tests on a GPU machine run without the packages of these modules.
    from pillion.engine.ranks.rank_processes import RankProcesses
    from pillion.kvstore.client.attachment import Attachment, MapDevice


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the backend that runs it.

    ``operators``: the kernels' name in logs and metrics. ``core_share``: the worker's own share of the cores in its
    lending table; 0 without a table, or if it borrows no cores. ``ranks``: the worker's other processes, or None.
    ``expected_cost``: the cost of a step computed from the device's rates, None if they are unknown. ``pair_tokens``:
    the cost of a query-key pair in tokens, computed from the model's shape, 0 if unknown. A model without
    ``chooses_tokens`` computes vectors only; ``head`` computes a classifier's label logits from them. A model with
    ``whole_texts`` computes each text in one step and caches none. ``map_device`` maps the pool of a model on GPUs.
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
        """Return a picklable reader of adapters for the backend, of ``targets`` and ranks up to ``max_rank``."""
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
        """Return the 32 bytes with which a request's root hash begins (I2)."""
        layout = self.backend.layout
        return namespace_base(
            fingerprint=self.prepared.fingerprint,
            dtype=layout.dtype,
            layout=layout.version,
            block_size=layout.block_size,
        )


# Loads a model, given a worker's flags and number of threads. Runs in a thread; raises ConfigError.
BackendFactory = Callable[[WorkerFlags, int], LoadedModel]
