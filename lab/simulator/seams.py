"""Patches that replace the machine by the simulation, wherever production code uses it, while a world runs.

    clocks               time.monotonic and time.time are the virtual clock
    chance               secrets and random are seeded
    calls                in-process addresses lead over the simulated network
    memory, attach       the simulated machine's, including its keeper of pools
    disks                calls of ``os`` take time and fail
    threads              those of disks and of a gateway's tokenizers are simulated; one runs at a time
    the step thread      a task (:mod:`lab.simulator.step_driver`)
    Redis                redis-py's client is the model's

All else of a component is production code. Names are patched in this process while a world runs, so worlds run one
after another, and nothing else beside them.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from lab.simulator.disks import DiskCalls
from lab.simulator.machine import AttachPoint, Machine, SimKeeper, SimSegment
from lab.simulator.network import Network, SimChannel, SimServer, use_network
from lab.simulator.redis_model import BEGIN_US
from lab.simulator.step_driver import VirtualStepLoop
from lab.simulator.virtual_loop import PROCESS
from pillion.client.connection import GatewayConnection
from pillion.engine.scheduling.step_plan import Outcome
from pillion.engine.worker import worker, worker_epoch
from pillion.engine.worker.worker_epoch import WorkerEpoch
from pillion.gateway import gateway
from pillion.gateway.request.request_runner import RequestRunner
from pillion.gateway.tokens import tokenizer
from pillion.kvstore import assemble
from pillion.kvstore.index import redis_link
from pillion.kvstore.node import kv_node
from pillion.kvstore.pool_survival import surviving_memory, surviving_pool
from pillion.kvstore.tiers.disk_tier import disk, disk_files
from pillion.net import rpc


@contextlib.contextmanager
def installed(
    machine: Machine,
    network: Network,
    redis: Any,
    runners: list[Any],
    told: Callable[[int], None],
    seed: int,
) -> Iterator[None]:
    """Run the body of a ``with`` statement with the simulation in place of the machine.

    ``redis`` makes a client. Every request that a gateway starts is added to ``runners``, with its process as
    ``owner``. ``told`` is called with a worker's epoch, in its process, when it emits tokens.
    """
    loop, chance = machine.loop, random.Random(seed)

    def attach_server(path: str, memory_fds: Any, admit: Any, ended: Any, *_: Any, **__: Any) -> AttachPoint:
        return AttachPoint(machine, path, memory_fds, admit, ended)

    def runner(*args: Any) -> Any:
        made: Any = RequestRunner(*args)
        made.owner = PROCESS.get()
        runners.append(made)
        return made

    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "time", lambda: BEGIN_US / 1e6 + loop.time()),
        (time, "time_ns", lambda: BEGIN_US * 1000 + round(loop.time() * 1e9)),
        (secrets, "randbits", chance.getrandbits),
        (secrets, "randbelow", chance.randrange),
        (secrets, "token_bytes", lambda size=32: chance.randbytes(size)),
        (secrets, "token_hex", lambda size=32: chance.randbytes(size).hex()),
        (random, "uniform", chance.uniform),
        (random, "sample", chance.sample),
        (rpc, "InProcessChannel", SimChannel),
        (rpc, "InProcessServer", SimServer),
        (assemble, "open_domain", machine.open_domain),
        *_kept_memory(machine),
        (kv_node, "AttachServer", attach_server),
        (disk, "ThreadPoolExecutor", machine.thread_pool),
        (tokenizer, "ThreadPoolExecutor", machine.thread_pool),
        (disk_files, "os", DiskCalls(machine.disks.values(), chance)),
        (worker, "attach", machine.attach),
        (worker_epoch, "StepLoop", VirtualStepLoop),
        (WorkerEpoch, "_on_outcome", _tells(told)),
        (redis_link, "connect", lambda place: redis()),
        (gateway, "RequestRunner", runner),
        (GatewayConnection, "open_async", lambda self, number=0: SimChannel(self.targets[number])),
    ]
    SimSegment.machine = machine
    use_network(network)
    try:
        with contextlib.ExitStack() as patches:
            for place, name, stand_in in replaced:
                # Raises AttributeError with a name that production code no longer has.
                patches.enter_context(mock.patch.object(place, name, stand_in))
            yield
    finally:
        del SimSegment.machine
        use_network(None)


def _kept_memory(machine: Machine) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of the keeper and the files of pools that outlive their nodes."""
    yield surviving_memory, "open_keeper", lambda path: SimKeeper(machine.kept)
    yield surviving_memory, "OwnedSegment", SimSegment
    yield surviving_pool, "OwnedSegment", SimSegment
    yield surviving_pool, "table_words", SimSegment.words
    yield surviving_pool.SurvivingPool, "_name_owner", lambda self, *, needed: None


def _tells(told: Callable[[int], None]) -> Callable[[WorkerEpoch, Outcome], None]:
    """Wrap an epoch's method for outcomes to report those with tokens first."""
    hand_on = WorkerEpoch._on_outcome

    def on_outcome(self: WorkerEpoch, outcome: Outcome) -> None:
        if outcome.updates and not self.over:
            told(self.number)
        hand_on(self, outcome)

    return on_outcome
