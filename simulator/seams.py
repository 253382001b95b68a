"""Where the production code meets the machine, and what stands there while a world runs.

    clocks               time.monotonic and time.time are the virtual clock
    chance               secrets and random are seeded
    calls                in-process addresses lead over the simulated network
    memory, attach       the simulated machine's
    the step thread      a task (:mod:`pillion.simulator.step_driver`)
    Redis                redis-py's client is the model's

Everything else of a component is production code as it is. The names are replaced in this process for the time of one
world, so worlds run one after another, and nothing else may run beside them.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from pillion.client.connection import GatewayConnection
from pillion.engine.worker import worker, worker_epoch
from pillion.gateway import gateway
from pillion.gateway.request.runner import Generation
from pillion.kvstore.index import redis_link
from pillion.kvstore.memory import node_memory
from pillion.kvstore.node import kv_node
from pillion.net import in_process
from pillion.simulator.machine import AttachPoint, Machine
from pillion.simulator.network import Network, SimChannel, SimServer, use_network
from pillion.simulator.redis_model import BEGIN_US
from pillion.simulator.step_driver import VirtualStepLoop
from pillion.simulator.virtual_loop import PROCESS


@contextlib.contextmanager
def installed(machine: Machine, network: Network, redis: Any, generations: list[Any], seed: int) -> Iterator[None]:
    """Runs the block with the simulation in the place of the machine.

    ``redis`` makes a client; every request that a gateway starts is added to ``generations``, with its process as
    ``owner``.
    """
    loop, chance = machine.loop, random.Random(seed)

    def attach_server(path: str, memory_fds: Any, admit: Any, ended: Any, *_: Any, **__: Any) -> AttachPoint:
        return AttachPoint(machine, path, memory_fds, admit, ended)

    async def explained(self: Any, error: Any, *_: Any) -> Any:
        return error

    def generation(*args: Any) -> Any:
        made: Any = Generation(*args)
        made.owner = PROCESS.get()
        generations.append(made)
        return made

    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "time", lambda: BEGIN_US / 1e6 + loop.time()),
        (secrets, "randbits", chance.getrandbits),
        (secrets, "randbelow", chance.randrange),
        (secrets, "token_bytes", lambda size=32: chance.randbytes(size)),
        (secrets, "token_hex", lambda size=32: chance.randbytes(size).hex()),
        (random, "uniform", chance.uniform),
        (random, "random", chance.random),
        (random, "sample", chance.sample),
        (in_process, "InProcessChannel", SimChannel),
        (in_process, "InProcessServer", SimServer),
        (node_memory, "open_domain", machine.open_domain),
        (kv_node, "AttachServer", attach_server),
        (worker, "attach", machine.attach),
        (worker_epoch, "StepLoop", VirtualStepLoop),
        (redis_link, "connect", lambda place: redis()),
        (gateway, "Generation", generation),
        (GatewayConnection, "open_async", lambda self, number=0: SimChannel(self.targets[number])),
        (GatewayConnection, "explained_async", explained),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(place, name, stand_in))
        use_network(network)
        stack.callback(use_network, None)
        yield
