"""Makes the calls by which the ranks of one worker share a step: sums, gathers and broadcasts, by torch.distributed.

    NCCL    every rank has a GPU of its own: calls are queued on its stream, CUDA graphs capture them
    gloo    ranks share a GPU, or Triton's interpreter computes: values go through host memory, every call waits

All ranks make the same calls in the same order. The groups are objects of their own and not torch's global one. Their
members find each other by a file in memory, whose descriptor rank 0 hands out, and the sockets of both are bound to the
loopback; only tensors pass between them.

Rank 0 gives the others up after a limit, or when it is told that one has ended; BackendLost then ends the worker with
all of its ranks. The limit counts the time that this process slept, so that a worker that was paused goes on when it
wakes. The other ranks wait as long as rank 0 lives, because they end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed

from pillion.engine.backends.backend import BackendLost
from pillion.engine.backends.gpu.device_memory import event_on
from pillion.engine.models.model_shard import ModelShard
from pillion.errors import ConfigError

# All ranks must have found each other within this time.
RENDEZVOUS_TIMEOUT_S = 120.0
# Rank 0 waits at most START_TIMEOUT_S in one call until the first pool is bound, because other ranks still load weights
# and compile kernels, and at most STEP_TIMEOUT_S in a step.
START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 60.0
# A wait for a gloo call is interrupted after this time, to check the limits.
HOST_WAIT_S = 0.1
# While a device computes, the waiting thread sleeps this long at a time. Linux lets a thread sleep longer by its timer
# slack, which is 50 us by itself.
DEVICE_WAIT_S = 50e-6
TIMER_SLACK_NS = 1000
_PR_SET_TIMERSLACK = 29
# The end of an NCCL group takes at most this long.
CLOSE_TIMEOUT_S = 5.0
# Torch's own limit counts the time of a pause, so it is set to a time that never passes.
TORCH_TIMEOUT = timedelta(days=30)
LOOPBACK = "127.0.0.1"
# What NCCL reads of the environment, where nobody has set it. Ranks are on one host. Connections are made when the
# ranks meet, because the KV pool takes the memory that is left then, and a later buffer would find none.
NCCL_ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_RUNTIME_CONNECT": "0"}
# NCCL may need this much shared memory; containers have 64 MiB unless they are given more.
SHARED_MEMORY, SHARED_MEMORY_BYTES = "/dev/shm", 2**30  # noqa: S108  (no file is made there)
# Torch's type stubs lack the classes of groups.
_DIST: Any = torch.distributed


class GpuRankGroup:
    """Represents one rank's side of the group of ranks; the thread that runs steps calls it. :meth:`join` makes it.

    Attributes:
        shard: the rank and its share of the model.
        name: what errors call the process.
        capturable: whether CUDA graphs may contain the calls.
        limit_s: longest time of one wait of rank 0.
    """

    def __init__(
        self,
        shard: ModelShard,
        group: Any,
        rendezvous: int,
        device: torch.device,
        aborted: Callable[[], bool],
        name: str,
    ) -> None:
        self.shard, self.name = shard, name
        self.limit_s = START_TIMEOUT_S
        self.capturable = not isinstance(group, _DIST.ProcessGroupGloo)
        self._group, self._rendezvous = group, rendezvous
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._aborted = aborted
        self._lost = self._alone = False

    @classmethod
    def join(
        cls,
        shard: ModelShard,
        rendezvous: int,
        device: torch.device,
        *,
        own_device: bool,
        aborted: Callable[[], bool] = lambda: False,
        name: str = "",
    ) -> GpuRankGroup:
        """Meet the other ranks, which takes until the last one is there. Raises ConfigError after MEETING_TIMEOUT_S,
        and soon where a rank has ended.

        Args:
            rendezvous: the descriptor of an empty file in memory, the same for all ranks; it stays the caller's.
            device: where the rank's tensors are.
            own_device: whether no two ranks have the same GPU.
            aborted: returns whether a rank has ended; it is called in every wait.
            name: what errors call the process; "" stands for its rank.
        """
        name = name or f"rank {shard.rank} of {shard.size}"
        # torch's store opens the file by this path whenever it reads or writes, and once more when the group ends. So
        # the descriptor stays open, even where a thread still waits for the others.
        rendezvous = os.dup(rendezvous)

        def meet() -> Any:
            store = _DIST.FileStore(f"/proc/self/fd/{rendezvous}", shard.size)
            store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
            return _nccl(store, shard, device) if own_device else _gloo(store, shard)

        failed = f"{name} did not find the others"
        found, waited_s = _in_thread(meet), 0.0
        while not wait([found], HOST_WAIT_S).done:
            waited_s += HOST_WAIT_S
            if aborted():
                raise ConfigError(f"{failed}: another rank has ended")
            if waited_s > RENDEZVOUS_TIMEOUT_S:
                raise ConfigError(f"{failed} in {RENDEZVOUS_TIMEOUT_S:.0f} s")
        try:
            group = found.result()
        except RuntimeError as error:
            more = _little_shared_memory() if own_device else ""
            raise ConfigError(f"{failed}: {_first_line(error)}{more}") from None
        return cls(shard, group, rendezvous, device, aborted, name)

    def sum(self, values: torch.Tensor, *, in_order: bool = False) -> None:
        """Add up the contiguous ``values`` of all ranks, in place; every rank has the same bits then.

        In which order depends on how many values there are, and two values have only one. ``in_order``: it is that of
        the ranks, rounded once.
        """
        host = self._reachable(values)
        if in_order and self.shard.size > 2:
            every = [torch.empty_like(host) for _ in range(self.shard.size)]
            self._run(self._group.allgather, [every], [host], self._options(_DIST.distributed_c10d.AllgatherOptions))
            total = every[0].float()
            for part in every[1:]:
                total += part
            values.copy_(total)
            return
        self._run(self._group.allreduce, [host], self._options(_DIST.AllreduceOptions))
        if host is not values:
            values.copy_(host)

    def gather(self, mine: torch.Tensor, every: list[torch.Tensor]) -> None:
        """Bring the contiguous ``mine`` of each rank to rank 0, into ``every``, one tensor like ``mine`` for each
        rank; other ranks pass no list."""
        options = self._options(_DIST.GatherOptions)
        options.rootRank = 0
        host = self._reachable(mine)
        hosts = every if host is mine else [torch.empty_like(host) for _ in every]
        self._run(self._group.gather, [hosts] if hosts else [], [host], options)
        if hosts is not every:
            for target, found in zip(every, hosts, strict=True):
                target.copy_(found)

    def spread(self, values: torch.Tensor) -> None:
        """Copy rank 0's contiguous ``values`` into those of the other ranks."""
        options = self._options(_DIST.BroadcastOptions)
        options.rootRank, options.rootTensor = 0, 0
        host = self._reachable(values)
        self._run(self._group.broadcast, [host], options)
        if host is not values and not self.shard.leads:
            values.copy_(host)

    def meet(self) -> None:
        """Queue a call after which every rank has ended the work that it queued before."""
        self.sum(self._flag)

    def agree(self, fine: bool) -> bool:
        """Wait for all ranks; returns whether all of them say ``fine``."""
        self._flag.fill_(0 if fine else 1)
        self.sum(self._flag)
        if self._flag.is_cuda:
            # Reading the flag would wait without a limit.
            self.wait(event_on(self._flag.device))
        refused = bool(self._flag.item())
        self._flag.zero_()
        return not refused

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Leave out all calls within the block, in which a step computes nonsense and takes the memory that it
        needs. A rank that has none left in the middle of a real step would leave the others waiting there."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def begin_steps(self) -> None:
        """Wait for all ranks. From then on a wait may take as long as in steps."""
        self.agree(True)
        self.limit_s = STEP_TIMEOUT_S

    def wait(self, event: Any) -> None:
        """Wait for a CUDA event. Raises BackendLost if the device failed, or another rank is lost."""
        self._check_lost()
        waited_s = 0.0
        _sleep_exactly()
        try:
            while not event.query():
                time.sleep(DEVICE_WAIT_S)
                waited_s += DEVICE_WAIT_S
                self._check(waited_s)
        except RuntimeError as error:
            raise self.gone(f"the GPU failed: {error}") from error

    def close(self) -> None:
        """Leave the group, without waiting for others. Idempotent."""
        group, self._group = self._group, None
        if group is None:
            return
        # Kernels that wait for a rank that is gone would keep the device busy for ever. Torch's own end waits for the
        # other ranks, which may have ended before this one.
        if self.capturable and not wait([_in_thread(group.abort)], CLOSE_TIMEOUT_S).done:
            self._keep(group)
        elif not self._lost:
            del group
            os.close(self._rendezvous)

    def _reachable(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values themselves, or a copy in host memory if the group can only send that."""
        return values if self.capturable else values.cpu()

    def _options(self, kind: Any) -> Any:
        """Return options of a call. NCCL's run on the current stream, and not on one of its own, which would wait for
        that one and be waited for."""
        options = kind()
        options.asyncOp = not self.capturable
        return options

    def _run(self, call: Callable[..., Any], *args: Any) -> None:
        self._check_lost()
        if self._alone:
            return
        try:
            work = call(*args)
            if self.capturable:
                # The device's stream waits for the call, and this thread does not.
                if work is not None:
                    work.wait()
                return
        except RuntimeError as error:
            raise self.gone(_first_line(error)) from error
        waited_s = 0.0
        while not self._ended(work):
            waited_s += HOST_WAIT_S
            self._check(waited_s)

    def _ended(self, work: Any) -> bool:
        """Wait for a call for at most HOST_WAIT_S; returns whether it has ended."""
        ended = work.is_completed()
        try:
            work.wait(timedelta(seconds=HOST_WAIT_S))
        except RuntimeError as error:
            if ended:
                raise self.gone(_first_line(error)) from error
            return False
        return True

    def _check_lost(self) -> None:
        if self._lost:
            raise self.gone("a call before this one failed")

    def _check(self, waited_s: float) -> None:
        if self._aborted():
            raise self.gone("another rank has ended")
        if self.shard.leads and waited_s > self.limit_s:
            raise self.gone(f"no answer from the others in {self.limit_s:.0f} s")

    def gone(self, reason: str) -> BackendLost:
        """Return the group up, for ``reason``; returns the error to raise."""
        if not self._lost:
            self._lost = True
            # The end of a gloo group waits for running calls, which may wait for a rank that hangs.
            self._keep(self._group)
        return BackendLost(f"{self.name}: {reason}")

    @staticmethod
    def _keep(group: Any) -> None:
        """Make the group object stay until the process ends, even when Python drops everything else."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _gloo(store: Any, shard: ModelShard) -> Any:
    options = _DIST.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    group = _DIST.ProcessGroupGloo(store, shard.rank, shard.size, options)
    group.set_timeout(TORCH_TIMEOUT)
    return group


def _nccl(store: Any, shard: ModelShard, device: torch.device) -> Any:
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = _DIST.ProcessGroupNCCL.Options()
    options._timeout = TORCH_TIMEOUT
    group = _DIST.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    # Ranks meet in the first call, which waits for all of them, and which no graph may contain.
    with torch.cuda.device(device):
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
    return group


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Return the result of ``work`` in a thread of its own, which does not keep the process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (whoever waits for the result raises it)
            future.set_exception(error)

    Thread(target=run, name="pillion-rank-group", daemon=True).start()
    return future


def _sleep_exactly() -> None:
    """Let this thread sleep as long as it says, but for TIMER_SLACK_NS; where that cannot be set, it sleeps longer."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)


def _little_shared_memory() -> str:
    """Return words for an error of NCCL where the machine, or the container, has little shared memory."""
    shared = os.statvfs(SHARED_MEMORY)
    size = shared.f_blocks * shared.f_frsize
    if size >= SHARED_MEMORY_BYTES:
        return ""
    return f" ({SHARED_MEMORY} has {size >> 20} MiB, which may be too little: a container takes --shm-size 1g)"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
