"""Schedule of a simulated world, drawn from a seed: a cluster's shape, requests and faults. Sans-IO.

It is drawn before anything runs, so a part of one can run as well: :mod:`lab.simulator.shrink` minimizes failing ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from lab.simulator.hash_model import VOCAB_SIZE

BLOCK_TOKENS = 4
MAX_MODEL_LEN = 256
# Time in which requests arrive and faults begin, except for the last kills of a chain.
ACTIVE_S = 2.5
# Share of schedules with a chain of faults beside the others.
CHAIN_SHARE = 0.4


class FaultKind(Enum):
    """Kinds of faults. Those that last do so for the fault's ``for_s``."""

    KILL = "kill"
    KILL_STANDBY = "kill standby"
    PAUSE = "pause"
    DRAIN = "drain"
    RESET = "reset"
    CUT = "cut"
    HALF_CUT = "half cut"
    STALL = "stall"
    REDIS_GONE = "redis gone"
    REDIS_SILENT = "redis silent"
    REDIS_EMPTY = "redis empty"
    REDIS_READ_ONLY = "redis read-only"
    REDIS_FULL = "redis full"
    REDIS_FAIL_OVER = "redis fails over"
    EVICT = "evict"
    DISK_STALL = "disk stalls"
    DISK_FULL = "disk full"
    DISK_FLIP = "disk flips bits"


@dataclass(frozen=True, slots=True)
class SimFault:
    """A fault of a process, or between two, by name. ``at_s``: after the start of arrivals."""

    at_s: float
    kind: FaultKind
    process: str
    other: str = ""
    for_s: float = 0.0

    def __str__(self) -> str:
        between = f" {self.process}" + (f" - {self.other}" if self.other else "")
        return f"{self.kind.value}{between}" + (f" for {self.for_s:.2f} s" if self.for_s else "")


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A client's request. It disconnects after ``cancel_after`` tokens; -1: never."""

    number: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    greedy: bool
    stop_ids: tuple[int, ...]
    answers: int = 1
    timeout_s: float | None = None
    cancel_after: int = -1
    salt: str = ""
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __str__(self) -> str:
        parts = [f"request {self.number}: {len(self.prompt)} + {self.max_tokens} tokens"]
        if self.logprobs is not None or self.prompt_logprobs is not None:
            parts.append(f"log probabilities {self.logprobs} {self.prompt_logprobs}")
        if self.answers > 1:
            parts.append(f"{self.answers} answers")
        if self.timeout_s is not None:
            parts.append(f"timeout {self.timeout_s:.2f} s")
        if self.cancel_after >= 0:
            parts.append(f"leaves after {self.cancel_after}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """A cluster's components and relevant flags."""

    nodes: int = 1
    decodes: int = 2
    prefills: int = 1
    gateways: int = 1
    slots: int = 96
    step_tokens: int = 32
    max_seqs: int = 8
    chunk_tokens: int = 16
    policy: str = "auto"
    runs_ahead: bool = False
    drafter: str = ""
    step_s: float = 0.02
    token_s: float = 0.0005
    heartbeat_ms: int = 500
    timeout_ms: int = 2000
    disk_blocks: int = 0
    standbys: bool = False
    kept: bool = False

    @property
    def repeats(self) -> bool:
        """True if answers repeat, so that drafts are often accepted."""
        return bool(self.drafter)

    def processes(self) -> tuple[str, ...]:
        """Return the names of all components that can die."""
        return (*self.node_names(), *self.worker_names(), *self.gateway_names())

    def node_names(self) -> tuple[str, ...]:
        return tuple(f"kvnode-{n}" for n in range(self.nodes))

    def worker_names(self) -> tuple[str, ...]:
        decodes = [f"decode-{n}" for n in range(self.decodes)]
        return (*decodes, *(f"prefill-{n}" for n in range(self.prefills)))

    def gateway_names(self) -> tuple[str, ...]:
        return tuple(f"gateway-{n}" for n in range(self.gateways))

    def node_of(self, worker: str) -> str:
        """Return a worker's KV node; workers are assigned to nodes in turn."""
        return f"kvnode-{int(worker.rpartition('-')[2]) % self.nodes}"


@dataclass(frozen=True, slots=True)
class SimSchedule:
    """Everything that happens in a simulated world."""

    seed: int
    shape: ClusterShape
    requests: tuple[SimRequest, ...]
    faults: tuple[SimFault, ...]


def draw(seed: int) -> SimSchedule:
    random = Random(seed)
    shape = _shape(random)
    faults = tuple(sorted(_faults(random, shape), key=lambda fault: fault.at_s))
    return SimSchedule(seed, shape, tuple(_requests(random, shape)), faults)


def _shape(random: Random) -> ClusterShape:
    nodes = random.choice((1, 1, 1, 2))
    disk_blocks = random.choice((0, 0, 0, 0, 10, 60))
    heartbeat_ms, timeout_ms = random.choice(((500, 2000), (1000, 3000), (1000, 3000)))
    shape = ClusterShape(
        nodes=nodes,
        decodes=max(nodes, random.choice((1, 2, 2))),
        prefills=random.choice((0, 1, 1, 2)),
        gateways=random.choice((1, 1, 2)),
        # Small pools with disks, so that blocks are evicted and spilled.
        slots=random.choice((24, 24, 40) if disk_blocks else (24, 40, 64, 160)),
        step_tokens=random.choice((12, 32, 64)),
        max_seqs=random.choice((2, 4, 8)),
        chunk_tokens=random.choice((8, 16, 32)),
        policy=random.choice(("auto", "colocated", "disaggregated", "disaggregated", "fraction:0.5")),
        runs_ahead=random.random() < 0.5,
        drafter=random.choice(("", "", "ngram", "suffix")),
        step_s=random.choice((0.005, 0.02, 0.05, 0.4)),
        heartbeat_ms=heartbeat_ms,
        timeout_ms=timeout_ms,
        disk_blocks=disk_blocks,
    )
    # Draw for a removed option, so that seeds keep their schedules.
    random.choice((0, 1, 2))
    return replace(shape, standbys=random.random() < 0.5, kept=random.random() < 0.6)


def _requests(random: Random, shape: ClusterShape) -> list[SimRequest]:
    # Prompts share prefixes, as conversations do.
    stems = [tuple(random.randrange(VOCAB_SIZE) for _ in range(random.choice((8, 20, 33)))) for _ in range(2)]
    made: list[SimRequest] = []
    # Skip requests too large for a pool, which the gateway rejects at once; other tests cover them.
    most = (shape.slots - 1) * BLOCK_TOKENS
    for number in range(random.randint(2, 7)):
        stem = random.choice(stems)
        own = tuple(random.randrange(VOCAB_SIZE) for _ in range(random.choice((0, 1, 3, 7, 12, 30))))
        if made and random.random() < 0.25:
            # A prompt seen before, with another continuation.
            stem, own = random.choice(made).prompt, own[:3]
        prompt = (stem[: random.randint(1, len(stem))] + own if random.random() < 0.5 else stem + own)[: most - 1]
        max_tokens = random.choice((1, 2, 6, 6, 15, 15, 30, 30, 80))
        made.append(
            SimRequest(
                number=number,
                at_s=random.random() * ACTIVE_S * random.choice((0.2, 1.0)),
                prompt=prompt,
                max_tokens=min(max_tokens, most - len(prompt)),
                seed=random.randrange(2**31),
                greedy=random.random() < 0.7,
                stop_ids=tuple(random.sample(range(VOCAB_SIZE), random.choice((0, 0, 12)))),
                answers=random.choice((1, 1, 1, 1, 2, 3)),
                timeout_s=random.choice((None, None, None, None, random.random() * 3)),
                cancel_after=random.choice((-1, -1, -1, -1, -1, 0, random.randint(0, 12))),
                salt=random.choice(("", "", "", "blue", f"own {number}")),
                priority=random.choice((0, 0, 0, -10, 10)),
                logprobs=random.choice((None, None, None, None, 0, 2)),
                prompt_logprobs=random.choice((None, None, None, None, None, 0, 1)),
            )
        )
    return made


def _faults(random: Random, shape: ClusterShape) -> list[SimFault]:
    found: list[SimFault] = []
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4, 8))):
        found.append(_fault(random, shape))
    if random.random() < CHAIN_SHARE:
        found += _chain(random, shape)
    return found


def _chain(random: Random, shape: ClusterShape) -> list[SimFault]:
    """Draw a chain of faults: a process, most often a KV node, is killed once or several times in succession while a
    worker's step stalls, or a worker or Redis is paused, so that its users notice and recover late."""
    victim = random.choice((*shape.node_names() * 3, *shape.processes()))
    at_s, apart_s = random.random() * ACTIVE_S, random.choice((0.2, 1.0, 3.0)) * (0.7 + 0.6 * random.random())
    kills = [SimFault(at_s + n * apart_s, FaultKind.KILL, victim) for n in range(random.choice((1, 1, 2, 3)))]
    kind = random.choice((FaultKind.STALL, FaultKind.STALL, FaultKind.PAUSE, FaultKind.REDIS_SILENT))
    other = "redis" if kind is FaultKind.REDIS_SILENT else random.choice(shape.worker_names())
    beside_s = max(0.0, at_s + (random.random() - 0.7) * 0.3)
    for_s = random.choice((1.0, 4.0, 8.0)) * (0.7 + 0.6 * random.random())
    return [*kills, SimFault(beside_s, kind, other, for_s=for_s)]


def _fault(random: Random, shape: ClusterShape) -> SimFault:
    at_s = random.random() * ACTIVE_S
    workers, names = shape.worker_names(), shape.processes()
    kinds = (
        *(FaultKind.KILL,) * 4,
        *(FaultKind.PAUSE,) * 4,
        *(FaultKind.RESET,) * 3,
        *(FaultKind.CUT,) * 2,
        FaultKind.HALF_CUT,
        FaultKind.DRAIN,
        FaultKind.STALL,
        *(FaultKind.EVICT,) * 2,
        FaultKind.REDIS_GONE,
        FaultKind.REDIS_SILENT,
        FaultKind.REDIS_EMPTY,
        FaultKind.REDIS_READ_ONLY,
        FaultKind.REDIS_FULL,
        FaultKind.REDIS_FAIL_OVER,
        *((FaultKind.KILL_STANDBY,) if shape.standbys else ()),
        *((FaultKind.DISK_STALL, FaultKind.DISK_FULL, *(FaultKind.DISK_FLIP,) * 2) if shape.disk_blocks else ()),
    )
    kind = random.choice(kinds)
    timeout_s = shape.timeout_ms / 1000
    # Durations that matter: a moment, nearly a timeout, or much longer.
    for_s = random.choice((0.05, 0.3, timeout_s * 0.8, timeout_s * 1.1, timeout_s * 2.5)) * (
        0.7 + 0.6 * random.random()
    )
    if kind in (FaultKind.KILL, FaultKind.DRAIN):
        return SimFault(at_s, kind, random.choice((*workers, *names)))
    if kind is FaultKind.PAUSE:
        return SimFault(at_s, kind, random.choice((*workers, *names)), for_s=for_s)
    if kind is FaultKind.KILL_STANDBY:
        return SimFault(at_s, kind, random.choice((*shape.node_names(), *workers)))
    if kind is FaultKind.STALL:
        return SimFault(at_s, kind, random.choice(workers), for_s=for_s)
    if kind in (FaultKind.EVICT, FaultKind.DISK_FLIP):
        return SimFault(at_s, kind, random.choice(shape.node_names()))
    if kind in (FaultKind.DISK_STALL, FaultKind.DISK_FULL):
        return SimFault(at_s, kind, random.choice(shape.node_names()), for_s=for_s)
    if kind in (FaultKind.RESET, FaultKind.CUT, FaultKind.HALF_CUT):
        one, other = _pair(random, shape)
        return SimFault(at_s, kind, one, other, 0.0 if kind is FaultKind.RESET else for_s)
    at_once = kind in (FaultKind.REDIS_EMPTY, FaultKind.REDIS_FAIL_OVER)
    return SimFault(at_s, kind, "redis", for_s=0.0 if at_once else for_s)


def _pair(random: Random, shape: ClusterShape) -> tuple[str, str]:
    """Return two communicating processes, in either order."""
    gateway = random.choice(shape.gateway_names())
    worker, node = random.choice(shape.worker_names()), random.choice(shape.node_names())
    pair = random.choice(
        ((gateway, worker), (gateway, worker), (gateway, node), (worker, shape.node_of(worker)), ("client", gateway))
    )
    return pair if random.random() < 0.5 else (pair[1], pair[0])
