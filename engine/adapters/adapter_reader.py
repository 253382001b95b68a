"""Reader of an adapter's matrices, in the output order of the decoder's fused layers. Imports no torch."""

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
    """Jobs of reading and packing the adapters of one model, for :class:`AdapterProcess`.

    Attributes:
        model_folder: folder of the base model.
        dtype: the model's type, to which matrices are cast.
        max_rank: max rank; 0 allows any.
        targets: names of linear layers that adapters may change; empty allows all.
        orders: by name of a fused layer ("qkv", "linear.in"), the checkpoint's output of each output, if reordered.
        form: packed form of the worker's backend.
    """

    model_folder: str
    dtype: str
    max_rank: int
    orders: Mapping[str, Sequence[int]]
    form: AdapterForm
    targets: tuple[str, ...] = ()

    def packed(self, folder: str, digest: str) -> tuple[list[Any], Bytes]:
        """Return the adapter in a folder as packed by ``form``. Raises ConfigError for an adapter that does not fit the
        model or the form, and for content that does not match ``digest``."""
        files = AdapterFiles(Path(folder))
        model = load_config(Path(self.model_folder))
        read = read_adapter(files, model, self.dtype, digest, self.max_rank, self.orders, self.targets)
        return self.form.pack(read)


def read_adapter(
    files: AdapterFiles,
    model: ModelConfig,
    dtype: str,
    digest: str,
    max_rank: int = 0,
    orders: Mapping[str, Sequence[int]] = MappingProxyType({}),
    targets: Sequence[str] = (),
) -> Layers:
    """Read an adapter; arguments as in :class:`AdapterReader`. Raises ConfigError if it does not fit the model, or if
    the content does not match ``digest``."""
    pairs = files.pairs(model, max_rank, targets)
    numbers = files.checked_numbers(digest, pairs)
    own_orders = {name: np.array(order) for name, order in orders.items()}
    layers: dict[str, list[PairBits]] = defaultdict(list)
    of_experts: dict[tuple[str, int], list[PairBits]] = defaultdict(list)
    for pair in pairs:
        first, projection = pair.projection.first_output, pair.projection
        own_dtype = "float32" if projection.exact else dtype
        a = files.bits(pair.a, numbers.pop(pair.a), own_dtype)
        b = _second(files, pair, numbers.pop(pair.b), own_dtype)
        if projection.stacked:
            a, b = _by_expert(pair, a, b)
        order = own_orders.get(projection.layer.split(".", 2)[2])
        if order is not None:
            # Projections stay in place within the fused layer; each is reordered internally.
            own = order[first : first + projection.outputs] - first
            b = b[..., own, :]
        if projection.expert is None:
            layers[projection.layer].append(PairBits(first, a, b))
        else:
            of_experts[projection.layer, first].append(PairBits(first, a, b))
    for (name, first), each in of_experts.items():
        layers[name].append(_together(first, each))
    return layers


def _by_expert(pair: AdapterPair, a: Bits, b: Bits) -> tuple[Bits, Bits]:
    """Return a parameter's matrices by expert: A [experts, rank, inputs] and B [experts, outputs, rank].

    PEFT stores A as [experts * rank, inputs], expert-major, and B as [outputs, rank * experts], rank-major.
    """
    experts = pair.projection.experts
    first = a.reshape(experts, pair.rank, -1)
    second = b.reshape(len(b), pair.rank, experts).transpose(2, 0, 1)
    return (second.swapaxes(1, 2), first.swapaxes(1, 2)) if pair.swapped else (first, second)


def _together(first_output: int, each: Sequence[PairBits]) -> PairBits:
    """Stack the pairs of all experts, in order, zero-padded to the largest rank."""
    rank = max(len(pair.a) for pair in each)
    a = [np.pad(pair.a, ((0, rank - len(pair.a)), (0, 0))) for pair in each]
    b = [np.pad(pair.b, ((0, 0), (0, rank - len(pair.a)))) for pair in each]
    return PairBits(first_output, np.stack(a), np.stack(b))


def _second(files: AdapterFiles, pair: AdapterPair, data: Bytes, dtype: str) -> Bits:
    """Return a LoRA pair's B matrix from its bytes ``data``, multiplied by alpha/rank and its per-output factors,
    rounded once."""
    factors = pair.projection.factors
    if not factors:
        return files.bits(pair.b, data, dtype, pair.scale)
    counts, own = zip(*factors, strict=True)
    scales = np.float32(pair.scale) * np.repeat(np.array(own, np.float32), counts)
    return rounded_bits(files.numbers(pair.b, data) * scales[:, None], dtype)
