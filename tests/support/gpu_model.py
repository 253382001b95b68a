"""Manual driver of the GPU backend, as :mod:`tests.support.torch_model` of torch."""

from __future__ import annotations

from tests.support.gpu import DEVICE  # isort: skip  (before the kernels)

from collections.abc import Callable
from pathlib import Path

import torch

from pillion.config import ModelFlags
from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.gpu.gpu_backend import GpuBackend, GpuLimits
from pillion.engine.backends.gpu.gpu_loading import check_limits, check_operations, gpu_layout
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.backends.gpu.gpu_weights import GetMemory, WeightMemory, load_gpu_weights
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.gpu_ranks.rank_group import GpuRankGroup
from pillion.engine.gpu_states.rank_states import rank_layout
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_shard import ModelShard, whole_model
from pillion.kvstore.memory.head_shares import shares_of
from tests.support.families import FAMILIES, make_model
from tests.support.torch_model import BackendDriver

MAX_TOKENS, MAX_SEQS, MAX_SAMPLED = 48, 8, 256


def own_memory(device: torch.device) -> GetMemory:
    """Return a function that allocates memory for this process alone."""

    def get(key: str, size_bytes: int) -> WeightMemory:
        return WeightMemory(torch.empty(size_bytes, dtype=torch.uint8, device=device), True, lambda: None)

    return get


class FakeDevicePool:
    """Device memory in place of a mapped pool."""

    divided = False

    def __init__(self, size_bytes: int) -> None:
        self.tensor = torch.full((size_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.address, self.size_bytes, self.device_index = self.tensor.data_ptr(), size_bytes, 0


class FakeDividedPool:
    """Device memory in place of a pool of several shards."""

    def __init__(self, layout: KVLayout, num_slots: int, count: int) -> None:
        self.shares = shares_of(layout.num_kv_heads, count)
        head_bytes = layout.block_bytes // layout.num_kv_heads
        self.shards = [FakeDevicePool(num_slots * head_bytes * len(share)) for share in self.shares]

    def shard(self, index: int) -> FakeDevicePool:
        return self.shards[index]


def gpu_backend(
    prepared: PreparedModel,
    block_size: int = 16,
    *,
    fp8: bool = False,
    eager: bool = False,
    invariant: bool = False,
    in_fp8: bool = False,
    join: bool = True,
    ranks: GpuRankGroup | None = None,
    shard: ModelShard | None = None,
    divided: bool = False,
    make: Callable[..., GpuBackend] = GpuBackend,
) -> GpuBackend:
    """Return a backend with its own weights. ``shard``: the part that it computes, by default its rank's share, or all.
    ``join``: join MLPs beside experts to their stacks, as without adapters of these."""
    config = load_config(prepared.folder)
    shard = shard or (whole_model(config) if ranks is None else ranks.shard)
    weights = load_gpu_weights(
        prepared.folder,
        config,
        fingerprint=prepared.fingerprint,
        dtype=prepared.dtype,
        shard=shard,
        memory=own_memory(DEVICE),
        in_fp8=in_fp8,
        join=join,
    )
    layout = rank_layout(gpu_layout(prepared, block_size, "fp8" if fp8 else "auto"), config, shard, divided=divided)
    limits = GpuLimits(
        max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_samples=MAX_SEQS, max_model_len=prepared.max_model_len
    )
    sizes = prepared.max_model_len, MAX_TOKENS, MAX_SAMPLED
    model = GpuModel(weights, *sizes, max_samples=MAX_SEQS, ranks=ranks, shard=shard, invariant=invariant)
    return make(model, layout, limits, enforce_eager=eager)


def make_family(folder: Path, family: str, **sizes: int) -> tuple[Path, ModelFlags]:
    """Return a family's model, as :func:`make_model`, in sizes that the GPU kernels support; ``sizes`` are those that
    the family leaves open."""
    folder, flags = make_model(folder, {**sizes, **FAMILIES[family]})
    check_operations(load_config(folder))
    check_limits(DEVICE, gpu_layout(prepare(flags), 16))
    return folder, flags


class GpuDriver(BackendDriver):
    """One backend, one pool of NaN, any number of texts."""

    def __init__(
        self,
        prepared: PreparedModel,
        block_size: int = 16,
        num_slots: int = 64,
        seed: int = 0,
        backend: GpuBackend | None = None,
        shards: int = 0,
    ) -> None:
        """Driver; ``shards``: number of shards of a divided pool, 0 for one piece."""
        self._shards = shards
        super().__init__(prepared, block_size, num_slots, seed, backend or gpu_backend(prepared, block_size))

    def bind(self, num_slots: int) -> None:
        """Bind device memory of bytes 0xff, which reads as NaN."""
        layout = self.backend.layout
        if self._shards:
            self.memory = FakeDividedPool(layout, num_slots, self._shards)
        else:
            self.memory = FakeDevicePool(num_slots * layout.block_bytes)
        self.backend.bind_pool(self.memory, num_slots)
        self.backend.warm_up(MAX_TOKENS)
