"""Layers of a model that adapters may change, the check that an adapter fits them, and a step's rows with adapters.

MLA's up-projection W has a matrix per head and runs as two products, and so does its pair (A, B):

    queries --keys--> latents      q W + (q B) A    with the head's rows of W and B that produce keys
    latents --values--> values     W x + B (A x)    with the head's rows of W and B that produce values

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
    """Return the adapter slot of each row of a batch, int32 [T], -1 for none. Raises Internal for an unknown slot."""
    slots = batch.adapters
    assert slots is not None
    if len(slots) != batch.num_seqs or slots.min() < -1 or slots.max() >= max_adapters:
        raise Internal(f"a step of {batch.num_seqs} sequences has adapter slots {slots.tolist()}")
    return np.repeat(slots, np.diff(batch.query_starts)).astype(np.int32, copy=False)


def adapted_runs(slots: Int32, max_rows: int) -> tuple[Int32, Int32]:
    """Return the rows with an adapter, by slot, and their division into runs.

    Args:
        slots: [T], each row's adapter slot; -1 for none.
        max_rows: max rows per run.

    Returns:
        Row indices sorted by slot, int32 [N], and runs of equal slot, int32 [runs, 3]: slot, first index into the
        sorted rows, and number of rows.
    """
    rows = np.argsort(slots, kind="stable").astype(np.int32)[np.count_nonzero(slots < 0) :]
    sorted_slots = slots[rows]
    firsts = np.flatnonzero((np.arange(len(rows)) - np.searchsorted(sorted_slots, sorted_slots)) % max_rows == 0)
    counts = np.diff(np.append(firsts, len(rows)))
    return rows, np.ascontiguousarray(np.stack([sorted_slots[firsts], firsts, counts], 1), np.int32)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of a fused layer that adapters may change, or of one product of it.

    Attributes:
        experts: number of stacked experts; 0 for a dense layer.
        exact: True if rows and matrices are float32 for any dtype of the model.
        ends: end of each projection's outputs; a pair belongs to one projection.
        by_head: a head's outputs for keys and for values, in a layer with a matrix per head; else None.
        heads: number of matrices in a layer or product with a matrix per head; else 0.
    """

    outputs: int
    inputs: int
    experts: int
    exact: bool
    ends: tuple[int, ...]
    by_head: tuple[int, int] | None = None
    heads: int = 0


def product_shapes(shapes: Mapping[str, LayerShape]) -> dict[str, LayerShape]:
    """Return the shape of each fused layer's product, by name. A layer with a matrix per head has two, NAME.keys and
    NAME.values, with the shapes of one head."""
    products = {}
    for name, shape in shapes.items():
        if shape.by_head is None:
            products[name] = shape
            continue
        keys, values = shape.by_head
        for part, outputs, inputs in (("keys", shape.inputs, keys), ("values", values, shape.inputs)):
            products[f"{name}.{part}"] = LayerShape(outputs, inputs, 0, shape.exact, (outputs,), heads=shape.heads)
    return products


def product_pairs(
    layers: Mapping[str, Sequence[Pair]], by_heads: Mapping[str, Sequence[int]]
) -> dict[str, Sequence[Pair]]:
    """Return the pairs of each product, by the names of :func:`product_shapes`. ``by_heads``:
    :attr:`LayerShape.by_head` by name of each layer with a matrix per head."""
    products = dict(layers)
    for name in by_heads.keys() & layers.keys():
        split = [by_head(pair, *by_heads[name]) for pair in products.pop(name)]
        products[f"{name}.keys"], products[f"{name}.values"] = zip(*split, strict=True)
    return products


def by_head(pair: Pair, keys: int, values: int) -> tuple[Pair, Pair]:
    """Split the pair of a layer with a matrix per head into those of its two products, as views.

    ``keys`` and ``values`` are one head's numbers of outputs. The first pair maps queries to latents, a [heads, rank,
    keys] and b [latents, rank]; the second maps latents to values, a [rank, latents] and b [heads, values, rank].
    """
    heads = pair.b.reshape(-1, keys + values, pair.b.shape[-1])
    return (
        replace(pair, a=heads[:, :keys].swapaxes(1, 2), b=pair.a.swapaxes(0, 1)),
        replace(pair, b=heads[:, keys:]),
    )


def check_adapter(weights: AdapterWeights, shapes: Mapping[str, LayerShape], max_rank: int) -> None:
    """Raise ConfigError if an adapter does not fit a model whose fused layers have these ``shapes``, or exceeds
    ``max_rank``."""
    if not 0 < weights.rank <= max_rank:
        raise ConfigError(f"adapter {weights.digest[:12]} has rank {weights.rank}; --max-lora-rank is {max_rank}")
    for name, pairs in weights.layers.items():
        if name not in shapes:
            why = f"which this model does not have, or {FLAG} excludes"
            raise ConfigError(f"adapter {weights.digest[:12]} changes {name}, {why}")
        outputs, inputs = shapes[name].outputs, shapes[name].inputs
        experts = (shapes[name].experts,) if shapes[name].experts else ()
        end = 0
        for pair in pairs:
            (*a_experts, rank, a_inputs), (*b_experts, b_outputs, b_rank) = pair.a.shape, pair.b.shape
            fits = (*a_experts,) == (*b_experts,) == experts and 0 < rank == b_rank <= weights.rank
            in_order = end <= pair.first_output < pair.first_output + b_outputs <= outputs
            if not (fits and a_inputs == inputs and in_order):
                raise ConfigError(
                    f"adapter {weights.digest[:12]} does not fit {name}, which has {outputs} outputs and {inputs}"
                    f" inputs: A is {list(pair.a.shape)}, B {list(pair.b.shape)} from output {pair.first_output} on"
                )
            end = pair.first_output + b_outputs


def adapter_shapes(config: ModelConfig, targets: Sequence[str] = ()) -> dict[str, LayerShape]:
    """Return the shape of each fused layer that adapters may change, by name, including experts, routers and gates:
    those with one of the linear layers ``targets`` (adapter_targets.py), or all if that is empty. Raises ConfigError
    for an unknown target."""
    targeted, shapes = targeted_outputs(config, targets) if targets else None, {}
    for index, layer in enumerate(layers_of(config)):
        for tensor in tensors_of(layer):
            if tensor.role in MATRICES:
                name, (outputs, inputs) = f"layers.{index}.{tensor.name}", tensor.shape
                if targeted is None or name in targeted:
                    exact = tensor.role is Role.EXACT_MATRIX
                    shapes[name] = LayerShape(outputs, inputs, tensor.experts, exact, _ends(tensor))
                    if tensor.role is Role.HEAD_MATRICES:
                        assert config.latents is not None
                        keys_and_values = config.latents.qk_nope_head_dim, config.latents.v_head_dim
                        heads = outputs // sum(keys_and_values)
                        shapes[name] = replace(shapes[name], by_head=keys_and_values, heads=heads)
    return shapes


def _ends(tensor: LayerTensor) -> tuple[int, ...]:
    """Return the end of each projection's outputs in a fused layer. Projections are the tensors of the checkpoint
    format that splits the layer most."""
    pieces = max((tensor.pieces_of(names) for names in tensor.checkpoint_names), key=len, default=[slice(None)])
    if len(pieces) == 1 and tensor.name.rpartition(".")[2] in ("qkv", "gate_up"):
        pieces = [slice(number, number + 1) for number in range(len(tensor.rows))]
    return tuple(accumulate(sum(entries.size for entries in tensor.rows[part]) for part in pieces))
