"""Layers of a model that adapters may change, the check that an adapter fits them, and a step's rows with adapters.

A layer with a matrix per head (MLA) runs as two products, and so does its pair (A, B):

    queries --keys--> latents      q W + (q B) A    with the head's rows of W and B that make keys
    latents --values--> values     W x + B (A x)    with those that make values

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pillion.engine.adapters.adapter_targets import FLAG, targeted_outputs
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import MATRICES, LayerTensor, Role, tensors_of
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError, Internal
from pillion.kernels.step import Int32, StepBatch

if TYPE_CHECKING:
    from pillion.engine.adapters.adapter_forms import PairBits
    from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank

Pair = TypeVar("Pair", "PairBits", "LowRank")


def row_slots(batch: StepBatch, max_adapters: int) -> Int32:
    """Return the adapter slot of each row, [T]. Raises Internal for slots outside of ``max_adapters``."""
    slots = batch.adapters
    assert slots is not None
    if len(slots) != batch.num_seqs or slots.min() < -1 or slots.max() >= max_adapters:
        raise Internal(f"a step of {batch.num_seqs} sequences has adapter slots {slots.tolist()}")
    return np.repeat(slots, np.diff(batch.query_starts)).astype(np.int32, copy=False)


def adapted_runs(slots: Int32, most_rows: int) -> tuple[Int32, Int32]:
    """Return the indices of rows with an adapter, ordered by slot, and runs of up to ``most_rows`` of them that share a
    slot: int32 [n, 3] of slot, first row in that order, and count. ``slots`` is [T], for all rows."""
    rows = np.argsort(slots, kind="stable").astype(np.int32)[np.count_nonzero(slots < 0) :]
    ordered = slots[rows]
    firsts = np.flatnonzero((np.arange(len(rows)) - np.searchsorted(ordered, ordered)) % most_rows == 0)
    counts = np.diff(np.append(firsts, len(rows)))
    return rows, np.ascontiguousarray(np.stack([ordered[firsts], firsts, counts], 1), np.int32)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of a fused layer that adapters may change, or of ``experts`` stacked ones; 0 for a dense layer.

    ``exact``: rows and matrices are float32 whatever the model's type. ``ends``: ends of the projections with a pair
    each. ``by_head``: a head's outputs that make keys and those that make values, for ``heads`` matrices per head; None
    in the shape of a product."""

    outputs: int
    inputs: int
    experts: int
    exact: bool
    ends: tuple[int, ...]
    by_head: tuple[int, int] | None = None
    heads: int = 0


def product_shapes(shapes: Mapping[str, LayerShape]) -> dict[str, LayerShape]:
    """Return the shape of each product. A layer with a matrix per head has two, NAME.keys and NAME.values, with the
    shapes of one head."""
    found = {}
    for name, shape in shapes.items():
        if shape.by_head is None:
            found[name] = shape
            continue
        keys, values = shape.by_head
        for part, outputs, inputs in (("keys", shape.inputs, keys), ("values", values, shape.inputs)):
            found[f"{name}.{part}"] = LayerShape(outputs, inputs, 0, shape.exact, (outputs,), heads=shape.heads)
    return found


def product_pairs(
    layers: Mapping[str, Sequence[Pair]], by_heads: Mapping[str, Sequence[int]]
) -> dict[str, Sequence[Pair]]:
    """Return the pairs of each product, by the names of :func:`product_shapes`. ``by_heads``:
    :attr:`LayerShape.by_head` of layers with a matrix per head."""
    found = dict(layers)
    for name in by_heads.keys() & layers.keys():
        both = [by_head(pair, *by_heads[name]) for pair in found.pop(name)]
        found[f"{name}.keys"], found[f"{name}.values"] = zip(*both, strict=True)
    return found


def by_head(pair: Pair, keys: int, values: int) -> tuple[Pair, Pair]:
    """Split the pair of a layer with a matrix per head: for queries, a [heads, rank, keys] and b [latents, rank], and
    for sums of latents, a [rank, latents] and b [heads, values, rank]. ``keys`` and ``values`` are outputs of one head.
    Copies nothing."""
    heads = pair.b.reshape(-1, keys + values, pair.b.shape[-1])
    return (
        replace(pair, a=heads[:, :keys].swapaxes(1, 2), b=pair.a.swapaxes(0, 1)),
        replace(pair, b=heads[:, keys:]),
    )


def check_adapter(weights: AdapterWeights, shapes: Mapping[str, LayerShape], max_rank: int) -> None:
    """Raise ConfigError if an adapter does not fit a model with fused layers of ``shapes``, by name, or exceeds
    ``max_rank``."""
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
    """Return the shape of each fused layer that adapters may change, including experts, routers and gates. ``targets``
    are names of linear layers (adapter_targets.py); fused layers without any are omitted. Raises ConfigError for an
    unknown name."""
    targeted, found = targeted_outputs(config, targets) if targets else None, {}
    for index, layer in enumerate(layers_of(config)):
        for tensor in tensors_of(layer):
            if tensor.role in MATRICES:
                name, (outputs, inputs) = f"layers.{index}.{tensor.name}", tensor.shape
                if targeted is None or name in targeted:
                    exact = tensor.role is Role.EXACT_MATRIX
                    found[name] = LayerShape(outputs, inputs, tensor.experts, exact, _ends(tensor))
                    if tensor.role is Role.HEAD_MATRICES:
                        assert config.latents is not None
                        both = config.latents.qk_nope_head_dim, config.latents.v_head_dim
                        found[name] = replace(found[name], by_head=both, heads=outputs // sum(both))
    return found


def _ends(tensor: LayerTensor) -> tuple[int, ...]:
    """Return the end of each projection among the outputs of a fused layer. Projections are the tensors of the
    checkpoint format that splits the layer most."""
    pieces = max((tensor.pieces_of(names) for names in tensor.checkpoint_names), key=len, default=[slice(None)])
    if len(pieces) == 1 and tensor.name.rpartition(".")[2] in ("qkv", "gate_up"):
        pieces = [slice(number, number + 1) for number in range(len(tensor.rows))]
    return tuple(accumulate(sum(entries.size for entries in tensor.rows[part]) for part in pieces))
