"""Says which layers of a model adapters may change, whether an adapter fits them, and which rows of a step have one.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from pillion.engine.adapters.adapter_targets import FLAG, targeted_outputs
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import LayerTensor, Role, tensors_of
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError, Internal
from pillion.kernels.step import Int32, StepBatch

if TYPE_CHECKING:
    from pillion.engine.adapters.adapter_weights import AdapterWeights


def row_slots(batch: StepBatch, max_adapters: int) -> Int32:
    """Gives [T] the slot of each row's adapter. Raises Internal for slots that a backend of ``max_adapters`` lacks."""
    slots = batch.adapters
    assert slots is not None
    if len(slots) != batch.num_seqs or slots.min() < -1 or slots.max() >= max_adapters:
        raise Internal(f"a step of {batch.num_seqs} sequences names adapter slots {slots.tolist()}")
    return np.repeat(slots, np.diff(batch.query_starts)).astype(np.int32, copy=False)


def adapted_runs(slots: Int32, most_rows: int) -> tuple[Int32, Int32]:
    """Gives the numbers of the rows that have an adapter, ordered by slot, and the runs of rows that share a slot, at
    most ``most_rows`` each.

    ``slots`` are [T], those of all rows. Runs are int32 [n, 3]: a slot, the first of its rows in that order, and how
    many.
    """
    rows = np.argsort(slots, kind="stable").astype(np.int32)[np.count_nonzero(slots < 0) :]
    ordered = slots[rows]
    firsts = np.flatnonzero((np.arange(len(rows)) - np.searchsorted(ordered, ordered)) % most_rows == 0)
    counts = np.diff(np.append(firsts, len(rows)))
    return rows, np.ascontiguousarray(np.stack([ordered[firsts], firsts, counts], 1), np.int32)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Describes a fused layer that adapters may change, or those of all ``experts``; 0 for a layer that all rows pass.
    ``exact`` says that its rows and its matrices are float32 in every type of the model. ``ends`` are the ends of the
    projections that have a pair of matrices each."""

    outputs: int
    inputs: int
    experts: int
    exact: bool
    ends: tuple[int, ...]


def check_adapter(weights: AdapterWeights, shapes: Mapping[str, LayerShape], max_rank: int) -> None:
    """Raises ConfigError where a model whose fused layers have ``shapes``, by name, cannot take an adapter, or the
    adapter's rank is above ``max_rank``."""
    if not 0 < weights.rank <= max_rank:
        raise ConfigError(f"adapter {weights.digest[:12]} has rank {weights.rank}; --max-lora-rank is {max_rank}")
    for name, pairs in weights.layers.items():
        if name not in shapes:
            why = f"which this model does not have, or {FLAG} leaves out"
            raise ConfigError(f"adapter {weights.digest[:12]} changes {name}, {why}")
        outputs, inputs = shapes[name].outputs, shapes[name].inputs
        experts = (shapes[name].experts,) if shapes[name].experts else ()
        after = 0
        for pair in pairs:
            (*each, rank, pair_inputs), (*same, pair_outputs, same_rank) = pair.a.shape, pair.b.shape
            fits = (*each,) == (*same,) == experts and 0 < rank == same_rank <= weights.rank and pair_inputs == inputs
            if not fits or not after <= pair.first_output < pair.first_output + pair_outputs <= outputs:
                raise ConfigError(
                    f"adapter {weights.digest[:12]} does not fit {name}, which has {outputs} outputs and {inputs}"
                    f" inputs: A is {list(pair.a.shape)}, B {list(pair.b.shape)} from output {pair.first_output} on"
                )
            after = pair.first_output + pair_outputs


def adapter_shapes(config: ModelConfig, targets: Sequence[str] = ()) -> dict[str, LayerShape]:
    """Returns the shape of each fused layer that adapters may change, those of experts, their routers and the gates
    beside them included. ``targets`` are names of linear layers (adapter_targets.py): a fused layer that has none of
    them is left out. Raises ConfigError for a name that means no linear layer."""
    targeted, found = targeted_outputs(config, targets) if targets else None, {}
    for index, layer in enumerate(layers_of(config)):
        for tensor in tensors_of(layer):
            if tensor.role in (Role.MATRIX, Role.EXACT_MATRIX):
                name, (outputs, inputs) = f"layers.{index}.{tensor.name}", tensor.shape
                if targeted is None or name in targeted:
                    exact = tensor.role is Role.EXACT_MATRIX
                    found[name] = LayerShape(outputs, inputs, tensor.experts, exact, _ends(tensor))
    return found


def _ends(tensor: LayerTensor) -> tuple[int, ...]:
    """Returns where each projection of a fused layer ends among its outputs. The projections are the tensors of the
    checkpoint format that splits the layer into the most tensors."""
    pieces = max((tensor.pieces_of(names) for names in tensor.checkpoint_names), key=len, default=[slice(None)])
    if len(pieces) == 1 and tensor.name.rpartition(".")[2] in ("qkv", "gate_up"):
        pieces = [slice(number, number + 1) for number in range(len(tensor.rows))]
    return tuple(accumulate(sum(entries.size for entries in tensor.rows[part]) for part in pieces))
