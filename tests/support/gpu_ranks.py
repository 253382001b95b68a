"""GPU backends of several ranks: rank 0 in the test's process, each other one in a separate process.

Without a GPU, Triton's interpreter runs in each process; with one, all ranks share it. All-reduce is by gloo.
"""

from __future__ import annotations

from tests.support.gpu_model import FakeDevicePool, FakeDividedPool, gpu_backend  # isort: skip  (before the kernels)

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.multiprocessing

from pillion.engine.adapters.adapter_weights import AdapterWeights
from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.backends.gpu.gpu_backend import GpuBackend, GpuInFlightStep
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.gpu_ranks.rank_group import GpuRankGroup
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_shard import ModelShard
from pillion.kernels.step import SamplingRows, StepBatch
from tests.support.gpu import DEVICE

# The interpreter needs a second or two per step, far more on a loaded machine.
ANSWER_S = 120.0


def joined(
    prepared: PreparedModel, rank: int, size: int, rendezvous: int, *, whole_experts: bool = False
) -> GpuRankGroup:
    shard = replace(ModelShard.of(load_config(prepared.folder), rank, size), whole_experts=whole_experts)
    return GpuRankGroup.join(shard, rendezvous, DEVICE, own_device=False)


class _Rank:
    """Run another rank's process: execute calls of its backend in order."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.backend: GpuBackend
        self._pool: Any = None
        self._packed: dict[int, PackedAdapter] = {}

    def make(self, prepared: PreparedModel, rendezvous: str, options: dict[str, Any]) -> None:
        descriptor, whole_experts = os.open(rendezvous, os.O_RDWR), options.pop("whole_experts", False)
        group = joined(prepared, self._rank, self._size, descriptor, whole_experts=whole_experts)
        self.backend = gpu_backend(prepared, ranks=group, **options)
        os.close(descriptor)

    def bind_pool(self, tensors: Sequence[torch.Tensor], divided: bool, num_slots: int) -> None:
        shards = []
        for tensor in tensors:
            shards.append(FakeDevicePool(0))
            shards[-1].tensor, shards[-1].address, shards[-1].size_bytes = tensor, tensor.data_ptr(), len(tensor)
        self._pool = shards[0]
        if divided:
            self._pool = FakeDividedPool(self.backend.layout, 0, len(tensors))
            self._pool.shards = shards
        self.backend.bind_pool(self._pool, num_slots)

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]]) -> None:
        assert self.backend.launch(batch, copies, None).wait().token_ids == ()

    def forward(self, batch: StepBatch) -> None:
        assert self.backend.forward(batch).shape == (0, self.backend.vocab_size)

    def warm_up(self, max_tokens: int) -> None:
        self.backend.warm_up(max_tokens)

    def allocate_workspace(self) -> None:
        self.backend.allocate_workspace()

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        self.backend.bind_adapters(max_adapters, max_rank, targets)

    def place(self, slot: int, weights: AdapterWeights) -> None:
        self.backend.adapters.place(slot, self.backend.adapters.pack(weights))

    def close(self) -> None:
        self.backend.close()

    def die(self) -> None:
        os._exit(1)


def _serve(rank: int, size: int, calls: Any) -> None:
    torch.set_num_threads(1)
    mine = _Rank(rank, size)
    while True:
        name, args = calls.recv()
        try:
            getattr(mine, name)(*args)
            calls.send("")
        except BaseException as error:  # (the test shows it)
            calls.send(f"rank {rank}: {error!r}")


class RankTeam:
    """The processes of ranks 1 and above, one backend at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = torch.multiprocessing.get_context("spawn")
        self._calls = []
        self.processes = []
        for rank in range(1, size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._calls.append(mine)
            self.processes.append(process)

    @contextlib.contextmanager
    def others(self, name: str, *args: Any) -> Iterator[None]:
        """Run the block's calls on the other ranks as well; raise their errors."""
        for calls in self._calls:
            calls.send((name, args))
        yield
        for calls in self._calls:
            assert calls.poll(ANSWER_S), f"no answer to {name}"
            failed = calls.recv()
            assert not failed, failed

    def tell(self, name: str, *args: Any) -> None:
        """Call the other ranks without waiting."""
        for calls in self._calls:
            calls.send((name, args))

    def backend(self, prepared: PreparedModel, **options: Any) -> TeamBackend:
        """Create a backend in all ranks. ``whole_experts``: each rank has whole experts instead of parts of each."""
        rendezvous = os.memfd_create("rendezvous")
        try:
            with self.others("make", prepared, f"/proc/{os.getpid()}/fd/{rendezvous}", options):
                whole = {"whole_experts": options.pop("whole_experts", False)}
                own = gpu_backend(prepared, ranks=joined(prepared, 0, self.size, rendezvous, **whole), **options)
        finally:
            os.close(rendezvous)
        return TeamBackend(self, own)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class TeamBackend:
    """Rank 0's backend; calls are made in all ranks."""

    def __init__(self, team: RankTeam, own: GpuBackend) -> None:
        self.team, self.own = team, own
        self.layout, self.vocab_size = own.layout, own.vocab_size
        self.max_steps_in_flight = own.max_steps_in_flight
        self.copy_blocks = own.copy_blocks

    def bind_pool(self, memory: FakeDevicePool | FakeDividedPool, num_slots: int) -> None:
        """Put the pool into memory that all ranks map."""
        divided = isinstance(memory, FakeDividedPool)
        shards = memory.shards if isinstance(memory, FakeDividedPool) else [memory]
        for shard in shards:
            shard.tensor.share_memory_()
            shard.address = shard.tensor.data_ptr()
        tensors = [shard.tensor for shard in shards]
        self._all("bind_pool", tensors, divided, num_slots, own=partial(self.own.bind_pool, memory, num_slots))

    def forward(self, batch: StepBatch) -> torch.Tensor:
        return self._all("forward", batch, own=partial(self.own.forward, batch))

    def launch(self, batch: StepBatch, copies: Sequence[tuple[int, int]], rows: SamplingRows | None) -> GpuInFlightStep:
        return self._all("launch", batch, copies, own=partial(self.own.launch, batch, copies, rows))

    def warm_up(self, max_tokens: int) -> None:
        self._all("warm_up", max_tokens, own=partial(self.own.warm_up, max_tokens))

    def allocate_workspace(self) -> None:
        self._all("allocate_workspace", own=self.own.allocate_workspace)

    def bind_adapters(self, max_adapters: int, max_rank: int, targets: Sequence[str] = ()) -> None:
        self._all(
            "bind_adapters",
            max_adapters,
            max_rank,
            targets,
            own=partial(self.own.bind_adapters, max_adapters, max_rank, targets),
        )

    @property
    def adapters(self) -> TeamBackend:
        return self

    def pack(self, weights: AdapterWeights) -> AdapterWeights:
        return weights

    def place(self, slot: int, weights: AdapterWeights) -> None:
        def own() -> None:
            self.own.adapters.place(slot, self.own.adapters.pack(weights))

        self._all("place", slot, weights, own=own)

    def close(self) -> None:
        self._all("close", own=self.own.close)

    def _all(self, name: str, *args: Any, own: Callable[[], Any]) -> Any:
        with self.team.others(name, *args):
            return own()
