"""Collectives of the ranks of one worker: sums, gathers and broadcasts, by torch.distributed.

    NCCL    each rank has its own GPU: calls are queued on its stream, and CUDA graphs capture them
    gloo    ranks share a GPU, or Triton's interpreter computes: values go through host memory, every call blocks

All ranks make the same calls in the same order. Groups are independent of torch's global process group. Ranks meet
through a memfd that rank 0 passes to the others; all sockets are bound to the loopback, and carry only tensors.

Rank 0 raises BackendLost after a time limit, or when another rank has exited, which ends the worker with all of its
ranks. The limit counts only time that this process spent in its own sleeps, so a worker that was paused continues when
resumed. Other ranks wait without a limit, since they end with rank 0.
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

RENDEZVOUS_TIMEOUT_S = 120.0
# Max wait of rank 0 in a call: at the start, when other ranks load and compile, and in steps.
START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 60.0
# Interval at which a waiting thread checks the other ranks.
HOST_WAIT_S = 0.1
# Polling interval of a thread that waits for the device; Linux may add the timer slack, by default 50 us.
DEVICE_WAIT_S = 50e-6
TIMER_SLACK_NS = 1000
CLOSE_TIMEOUT_S = 5.0
# Effectively none, because torch's timeouts include time in which the process was paused.
TORCH_TIMEOUT = timedelta(days=30)
# Defaults of NCCL's environment: ranks are on one machine, and connect when they join, because later the KV pool leaves
# no memory for NCCL's buffers.
NCCL_ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_RUNTIME_CONNECT": "0"}
_DIST: Any = torch.distributed


class GpuRankGroup:
    """One rank's membership in the group, for its step thread; created by :meth:`join`.

    Attributes:
        shard: the rank and its shard of the model.
        name: name of the process in errors.
        capturable: True if CUDA graphs can contain the calls.
        limit_s: max wait of rank 0 in a call, in seconds.
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
        self._lost = self._no_collectives = False

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
        """Join the other ranks; block until all have joined. Raises ConfigError after RENDEZVOUS_TIMEOUT_S, or when a
        rank has exited.

        Args:
            rendezvous: fd of an empty memfd, the same for all ranks; the caller closes it.
            device: device of the rank's tensors.
            own_device: True if no two ranks share a GPU.
            aborted: returns whether a rank has exited; polled in every wait.
            name: name of the process in errors; "" for its rank.
        """
        name = name or f"rank {shard.rank} of {shard.size}"
        # Stays open, because torch's store reopens the file by its path at each use and when the group ends.
        rendezvous = os.dup(rendezvous)

        def meet() -> Any:
            store = _DIST.FileStore(f"/proc/self/fd/{rendezvous}", shard.size)
            store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
            return _nccl(store, shard, device) if own_device else _gloo(store, shard)

        failed = f"{name} did not find the others"
        joined, waited_s = _in_thread(meet), 0.0
        while not wait([joined], HOST_WAIT_S).done:
            waited_s += HOST_WAIT_S
            if aborted():
                raise ConfigError(f"{failed}: another rank has ended")
            if waited_s > RENDEZVOUS_TIMEOUT_S:
                raise ConfigError(f"{failed} in {RENDEZVOUS_TIMEOUT_S:.0f} s")
        try:
            group = joined.result()
        except RuntimeError as error:
            hint = _shared_memory_hint() if own_device else ""
            raise ConfigError(f"{failed}: {_first_line(error)}{hint}") from None
        return cls(shard, group, rendezvous, device, aborted, name)

    def sum(self, values: torch.Tensor, *, in_order: bool = False) -> None:
        """All-reduce contiguous ``values`` in place, with the same bits on every rank. ``in_order``: add in rank order
        and round once; otherwise the order of addition depends on the number of values."""
        host = self._reachable(values)
        if in_order and self.shard.size > 2:
            parts = [torch.empty_like(host) for _ in range(self.shard.size)]
            self._run(self._group.allgather, [parts], [host], self._options(_DIST.distributed_c10d.AllgatherOptions))
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            values.copy_(total)
            return
        self._run(self._group.allreduce, [host], self._options(_DIST.AllreduceOptions))
        if host is not values:
            values.copy_(host)

    def gather(self, values: torch.Tensor, out: list[torch.Tensor]) -> None:
        """Gather each rank's contiguous ``values`` into ``out`` on rank 0, a tensor like ``values`` per rank; other
        ranks pass []."""
        options = self._options(_DIST.GatherOptions)
        options.rootRank = 0
        host = self._reachable(values)
        hosts = out if host is values else [torch.empty_like(host) for _ in out]
        self._run(self._group.gather, [hosts] if hosts else [], [host], options)
        if hosts is not out:
            for target, source in zip(out, hosts, strict=True):
                target.copy_(source)

    def broadcast(self, values: torch.Tensor) -> None:
        """Broadcast rank 0's contiguous ``values`` to the other ranks."""
        options = self._options(_DIST.BroadcastOptions)
        options.rootRank, options.rootTensor = 0, 0
        host = self._reachable(values)
        self._run(self._group.broadcast, [host], options)
        if host is not values and not self.shard.leads:
            values.copy_(host)

    def barrier(self) -> None:
        """Queue a barrier; it blocks only without NCCL."""
        self.sum(self._flag)

    def agree(self, ok: bool) -> bool:
        """Wait for all ranks; return whether all passed True."""
        self._flag.fill_(0 if ok else 1)
        self.sum(self._flag)
        if self._flag.is_cuda:
            # Otherwise reading the flag would block without a limit.
            self.wait(event_on(self._flag.device))
        refused = bool(self._flag.item())
        self._flag.zero_()
        return not refused

    @contextlib.contextmanager
    def no_collectives(self) -> Iterator[None]:
        """Context in which all calls are skipped. A step run in it computes garbage, but allocates the memory that it
        needs, so that an OOM does not leave other ranks blocked."""
        self._no_collectives = True
        try:
            yield
        finally:
            self._no_collectives = False

    def begin_steps(self) -> None:
        """Wait for all ranks, and reduce the limit of waits to STEP_TIMEOUT_S."""
        self.agree(True)
        self.limit_s = STEP_TIMEOUT_S

    def wait(self, event: Any) -> None:
        """Wait for a CUDA event. Raises BackendLost if the device or a rank fails."""
        self._check_lost()
        waited_s = 0.0
        _sleep_exactly()
        try:
            while not event.query():
                time.sleep(DEVICE_WAIT_S)
                waited_s += DEVICE_WAIT_S
                self._check(waited_s)
        except RuntimeError as error:
            raise self.lost(f"the GPU failed: {error}") from error

    def close(self) -> None:
        """Leave the group without waiting for others. Idempotent."""
        group, self._group = self._group, None
        if group is None:
            return
        # Abort, because kernels that wait for a dead rank never finish, and torch's destructor would wait for other
        # ranks.
        if self.capturable and not wait([_in_thread(group.abort)], CLOSE_TIMEOUT_S).done:
            self._keep(group)
        elif not self._lost:
            del group
            os.close(self._rendezvous)

    def _reachable(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, or for gloo a copy in host memory."""
        return values if self.capturable else values.cpu()

    def _options(self, kind: Any) -> Any:
        """Return a call's options. With asyncOp=False NCCL uses the current stream."""
        options = kind()
        options.asyncOp = not self.capturable
        return options

    def _run(self, call: Callable[..., Any], *args: Any) -> None:
        """Make a collective call: queue it with NCCL, wait for it with gloo. Raises BackendLost."""
        self._check_lost()
        if self._no_collectives:
            return
        try:
            work = call(*args)
            if self.capturable:
                if work is not None:
                    work.wait()
                return
        except RuntimeError as error:
            raise self.lost(_first_line(error)) from error
        waited_s = 0.0
        while not self._ended(work):
            waited_s += HOST_WAIT_S
            self._check(waited_s)

    def _ended(self, work: Any) -> bool:
        """Wait up to HOST_WAIT_S for a call; return whether it has finished."""
        ended = work.is_completed()
        try:
            work.wait(timedelta(seconds=HOST_WAIT_S))
        except RuntimeError as error:
            if ended:
                raise self.lost(_first_line(error)) from error
            return False
        return True

    def _check_lost(self) -> None:
        if self._lost:
            raise self.lost("a call before this one failed")

    def _check(self, waited_s: float) -> None:
        """Raise BackendLost if a rank has exited, or rank 0 has waited too long."""
        if self._aborted():
            raise self.lost("another rank has ended")
        if self.shard.leads and waited_s > self.limit_s:
            raise self.lost(f"no answer from the others in {self.limit_s:.0f} s")

    def lost(self, reason: str) -> BackendLost:
        """Mark the group as lost and return the error to raise."""
        if not self._lost:
            self._lost = True
            # gloo's destructor waits for calls in progress, maybe on a hung rank.
            self._keep(self._group)
        return BackendLost(f"{self.name}: {reason}")

    @staticmethod
    def _keep(group: Any) -> None:
        """Leak the group object, so that its destructor never runs."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _gloo(store: Any, shard: ModelShard) -> Any:
    options = _DIST.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = _DIST.ProcessGroupGloo(store, shard.rank, shard.size, options)
    group.set_timeout(TORCH_TIMEOUT)
    return group


def _nccl(store: Any, shard: ModelShard, device: torch.device) -> Any:
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = _DIST.ProcessGroupNCCL.Options()
    options._timeout = TORCH_TIMEOUT
    group = _DIST.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    # The first call connects the ranks; it blocks, and a graph cannot capture it.
    with torch.cuda.device(device):
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
    return group


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run ``work`` in a daemon thread and return the future of its result."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (whoever waits for the result raises it)
            future.set_exception(error)

    Thread(target=run, name="pillion-rank-group", daemon=True).start()
    return future


def _sleep_exactly() -> None:
    """Reduce this thread's timer slack to TIMER_SLACK_NS, if possible."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, TIMER_SLACK_NS, 0, 0, 0)


def _shared_memory_hint() -> str:
    """Return a hint for NCCL's errors if shared memory is below 1 GiB, which it may need; containers have 64 MiB by
    default."""
    shared = os.statvfs("/dev/shm")  # noqa: S108  (no file is made there)
    size = shared.f_blocks * shared.f_frsize
    if size >= 2**30:
        return ""
    return f" (/dev/shm has {size >> 20} MiB, which may be too little: a container takes --shm-size 1g)"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
