"""Plays the faults of a schedule on a simulated cluster, and ends those that last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random

from lab.simulator.disks import SimDisk
from lab.simulator.lives import Life
from lab.simulator.network import Network
from lab.simulator.redis_client import WayToRedis
from lab.simulator.redis_model import RedisModel
from lab.simulator.schedule import FaultKind, SimFault
from lab.simulator.virtual_loop import Process, VirtualLoop


class FaultPlayer:
    """Starts and ends the faults of a schedule. ``kill`` ends a component by name."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        redis: RedisModel,
        way: WayToRedis,
        lives: Mapping[str, Life],
        disks: Mapping[str, SimDisk],
        random: Random,
        kill: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._network = network
        self._redis = redis
        self._way = way
        self._lives = lives
        self._disks = disks
        self._random = random
        self._kill = kill
        self._note = note
        self._undoing: list[asyncio.Task[None]] = []

    async def run(self, faults: tuple[SimFault, ...]) -> None:
        """Play all faults in order and wait until none lasts."""
        began_s = self._loop.time()
        for fault in faults:
            await asyncio.sleep(max(0.0, began_s + fault.at_s - self._loop.time()))
            self._note(f"fault: {fault}")
            undo = self._play(fault)
            if undo is not None:
                self._undoing.append(asyncio.create_task(self._undo(fault, undo)))
        await asyncio.gather(*self._undoing)

    async def _undo(self, fault: SimFault, undo: Callable[[], None]) -> None:
        await asyncio.sleep(fault.for_s)
        self._note(f"over: {fault}")
        undo()

    def _play(self, fault: SimFault) -> Callable[[], None] | None:
        """Start a fault; return the function that ends it."""
        kind = fault.kind
        if kind in (FaultKind.DISK_STALL, FaultKind.DISK_FULL, FaultKind.DISK_FLIP):
            return self._play_on_disk(self._disks[fault.process], fault)
        if fault.process in self._lives and not fault.other:
            return self._play_on(self._lives[fault.process], fault)
        if kind is FaultKind.RESET:
            self._network.reset(fault.process, fault.other)
            return None
        if kind in (FaultKind.CUT, FaultKind.HALF_CUT):
            directions = [(fault.process, fault.other), (fault.other, fault.process)]
            directions = directions[: 2 if kind is FaultKind.CUT else 1]
            self._network.cut(directions)
            return lambda: self._network.heal(directions)
        return self._play_on_redis(kind)

    def _play_on(self, life: Life, fault: SimFault) -> Callable[[], None] | None:
        process = life.process
        if fault.kind is FaultKind.KILL:
            self._kill(life.name)
        elif fault.kind is FaultKind.KILL_STANDBY and life.standby not in (None, process):
            assert life.standby is not None
            self._loop.kill(life.standby)
        elif fault.kind is FaultKind.PAUSE and process is not None:
            self._loop.pause(process)
            return lambda: self._wake(life, process, fault.for_s)
        elif fault.kind is FaultKind.DRAIN and life.stop is not None and process is not None:
            self._loop.post(process, life.stop.set)
        elif fault.kind is FaultKind.STALL and life.costs is not None:
            life.costs.stalls.append(fault.for_s)
            # Ends by itself; the player waits for it, since the cluster is idle only afterwards.
            return lambda: None
        elif fault.kind is FaultKind.EVICT and life.runs and process is not None:
            self._loop.post(process, self._evict, life)
        return None

    def _wake(self, life: Life, process: Process, slept_s: float) -> None:
        if life.process is process and life.backend is not None:
            life.backend.slept(slept_s)
        self._loop.resume(process)

    def _evict(self, life: Life) -> None:
        """Evict every block that may be evicted (I1)."""
        pool = life.component.pool
        # In the production policy's order, which has children before parents.
        for block in list(pool.ledger.tree.policy):
            pool.ledger.evict_block(block)
        pool.changed()

    def _play_on_disk(self, disk: SimDisk, fault: SimFault) -> Callable[[], None] | None:
        if fault.kind is FaultKind.DISK_STALL:
            disk.stalled_until_s = max(disk.stalled_until_s, self._loop.time() + fault.for_s)
            return None
        if fault.kind is FaultKind.DISK_FULL:
            disk.full = True
            return lambda: setattr(disk, "full", False)
        self._note(f"a bit of {disk.flip(self._random)} blocks was flipped")
        return None

    def _play_on_redis(self, kind: FaultKind) -> Callable[[], None] | None:
        way, redis = self._way, self._redis
        if kind is FaultKind.REDIS_GONE:
            way.gone = True
            return lambda: setattr(way, "gone", False)
        if kind is FaultKind.REDIS_SILENT:
            way.silence()
            return way.go_on
        if kind in (FaultKind.REDIS_READ_ONLY, FaultKind.REDIS_FULL):
            redis.refusing = "replica" if kind is FaultKind.REDIS_READ_ONLY else "full"
            return lambda: setattr(redis, "refusing", "")
        if kind is FaultKind.REDIS_FAIL_OVER:
            redis.fail_over()
            return None
        redis.empty()
        return None
