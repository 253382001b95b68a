"""Reader of an adapter's matrices, converted to the decoder's fused layers. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pillion.engine.adapters.adapter_files import AdapterFiles, AdapterPair, rounded_bits
from pillion.engine.adapters.adapter_forms import AdapterForm, Bits, Bytes, Layers, PairBits
from pillion.engine.adapters.adapter_store import AdapterJobs
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class AdapterReader(AdapterJobs):
    """Jobs that read and pack adapters of one model, for :class:`AdapterProcess`.

    Attributes:
        model_folder: folder of the base model.
        dtype: the model's dtype, "float32" or "bfloat16", to which matrices are cast.
        max_rank: max rank; 0 allows any.
        targets: names of linear layers that adapters may change; empty allows all.
        orders: by name of a fused layer ("qkv", "linear.in") whose outputs the decoder reorders, the index of each
            output in the checkpoint's order.
        form: packed form of the worker's backend.
    """

    model_folder: str
    dtype: str
    max_rank: int
    orders: Mapping[str, Sequence[int]]
    form: AdapterForm
    targets: tuple[str, ...] = ()

    def packed(self, folder: str, digest: str) -> tuple[list[Any], Bytes]:
        """Return the adapter in a folder, packed by ``form``. Raises ConfigError if it does not fit the model or the
        form, or does not match ``digest``."""
        files = AdapterFiles(Path(folder))
        model = load_config(Path(self.model_folder))
        layers = read_adapter(files, model, self.dtype, digest, self.max_rank, self.orders, self.targets)
        return self.form.pack(layers)


def read_adapter(
    files: AdapterFiles,
    model: ModelConfig,
    dtype: str,
    digest: str,
    max_rank: int = 0,
    orders: Mapping[str, Sequence[int]] = MappingProxyType({}),
    targets: Sequence[str] = (),
) -> Layers:
    """Read an adapter's matrices by fused layer; arguments as in :class:`AdapterReader`. Raises ConfigError if it does
    not fit the model, or does not match ``digest``."""
    pairs = files.pairs(model, max_rank, targets)
    data = files.checked_data(digest, pairs)
    order_arrays = {name: np.array(order) for name, order in orders.items()}
    layers: dict[str, list[PairBits]] = defaultdict(list)
    by_expert: dict[tuple[str, int], list[PairBits]] = defaultdict(list)
    for pair in pairs:
        first, projection = pair.projection.first_output, pair.projection
        pair_dtype = "float32" if projection.exact else dtype
        a = files.bits(pair.a, data.pop(pair.a), pair_dtype)
        b = _scaled_b(files, pair, data.pop(pair.b), pair_dtype)
        if projection.stacked:
            a, b = _split_experts(pair, a, b)
        order = order_arrays.get(projection.layer.split(".", 2)[2])
        if order is not None:
            # Projections stay in place within the fused layer; each is reordered internally.
            b = b[..., order[first : first + projection.outputs] - first, :]
        if projection.expert is None:
            layers[projection.layer].append(PairBits(first, a, b))
        else:
            by_expert[projection.layer, first].append(PairBits(first, a, b))
    for (name, first), expert_pairs in by_expert.items():
        layers[name].append(_stack_experts(first, expert_pairs))
    return layers


def _split_experts(pair: AdapterPair, a: Bits, b: Bits) -> tuple[Bits, Bits]:
    """Return A [experts, rank, inputs] and B [experts, outputs, rank] of a parameter of stacked experts.

    PEFT stores A as [experts * rank, inputs], expert-major, and B as [outputs, rank * experts], rank-major.
    """
    experts = pair.projection.experts
    a = a.reshape(experts, pair.rank, -1)
    b = b.reshape(len(b), pair.rank, experts).transpose(2, 0, 1)
    return (b.swapaxes(1, 2), a.swapaxes(1, 2)) if pair.swapped else (a, b)


def _stack_experts(first_output: int, pairs: Sequence[PairBits]) -> PairBits:
    """Stack the pairs of all experts, in order, zero-padded to the largest rank."""
    rank = max(len(pair.a) for pair in pairs)
    a = [np.pad(pair.a, ((0, rank - len(pair.a)), (0, 0))) for pair in pairs]
    b = [np.pad(pair.b, ((0, 0), (0, rank - len(pair.a)))) for pair in pairs]
    return PairBits(first_output, np.stack(a), np.stack(b))


def _scaled_b(files: AdapterFiles, pair: AdapterPair, data: Bytes, dtype: str) -> Bits:
    """Return a pair's matrix B from its bytes ``data``, multiplied by the adapter's scale and the model's factors per
    output, rounded once."""
    if not pair.projection.factors:
        return files.bits(pair.b, data, dtype, pair.scale)
    counts, factors = zip(*pair.projection.factors, strict=True)
    scales = np.float32(pair.scale) * np.repeat(np.array(factors, np.float32), counts)
    return rounded_bits(files.numbers(pair.b, data) * scales[:, None], dtype)
