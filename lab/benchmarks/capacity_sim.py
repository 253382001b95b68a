"""Capacity in simulated time: the loads and objectives of :mod:`lab.benchmarks.capacity` on the production scheduler.

    python -m lab.benchmarks.capacity_sim --loads turns chat --machines avx512 --seeds 2

One worker owns both cores; a step costs what its machine's model predicts, and the scheduler fits its own model as in
production. Prompts hit the KV blocks of earlier ones in an unlimited pool. A gateway forwards slightly more requests
than the worker has slots. Tokenizers, HTTP and the load driver are left out.

The peer is vLLM's plain scheduling: prompts in order of arrival, 256 sequences, and steps of --peer-tokens beside
decodes, with Pillion's costs ("plain"), which compares schedulers alone, and with its own ("vllm"). The plain steps of
the bounds have its own costs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lab.benchmarks.capacity import OBJECTIVES, CapacitySearch, OpenLoad, loads, run_figures
from lab.benchmarks.report import save, show
from lab.fleets.clock import Clock
from lab.fleets.sim_worker import SimWorker, WorkerJob, WorkerSettings
from lab.fleets.world import CALL_S, NOISE
from pillion.config import AUTO, StepFlags
from pillion.engine.scheduling.step_cost import AUTO_TARGET_STEPS
from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.admission.turns import shared_slots
from pillion.loadgen.figures import Record, Run
from pillion.loadgen.load import LoadSession
from pillion.loadgen.slo import parse_slo
from pillion.wire.registry import ComponentRecord

BLOCK_SIZE = 16
BUDGET_TOKENS, PEER_TOKENS, PEER_SEQS = 256, 2048, 256
PLAIN_STREAMS, PLAIN_CONTEXT = 8, 112
# Seconds per step, token, sequence, KV token read and query-key pair on both cores. avx512: fitted by workers of
# `simulation_error` at 31f4af5c (AMD EPYC, Zen 4), over the speed of two cores. avx2: float32, products about twice as
# slow (`cpu_service_avx2`). amx: prompts and decodes at three times the rate of avx512, the same fixed part.
AVX512 = StepModel(6.6e-3, 1.22e-3, 4.0e-4, 6.1e-7, 4.5e-7).at_speed(1.9)
MACHINES = {
    "avx512": AVX512,
    "avx2": StepModel(2 * AVX512.step_s, 2 * AVX512.token_s, *AVX512[2:]),
    "amx": StepModel(AVX512.step_s, AVX512.token_s / 3, *AVX512[2:4], AVX512.pair_s / 3),
}
# vLLM's costs over Pillion's: 2.2 for plain steps of 8 streams, 1.8 for prompt tokens (A, 22 and 28).
PEER_COSTS = (5.0, 1.8, 1.0, 1.0, 1.8)


@dataclass(frozen=True, slots=True)
class Contender:
    """A server to simulate. ``first_come``: serves prompts in order of arrival."""

    name: str
    cost: StepModel
    step_tokens: int = BUDGET_TOKENS
    seqs: int = StepFlags.max_num_seqs
    target_ms: float | str = AUTO
    first_come: bool = False

    def worker(self, clock: Clock, number: int) -> SimWorker:
        auto = self.target_ms == AUTO
        record = ComponentRecord(
            component_id=self.name,
            role="decode",
            address="x",
            block_size_tokens=BLOCK_SIZE,
            max_step_tokens=self.step_tokens,
            target_itl_ms=0.0 if auto else float(self.target_ms),
            target_itl_steps=AUTO_TARGET_STEPS if auto else 0.0,
        )
        settings = WorkerSettings(
            cost_s=tuple(self.cost),
            block_size=BLOCK_SIZE,
            max_num_seqs=self.seqs,
            noise=NOISE,
            heartbeat_s=1.0,
            call_s=CALL_S,
            first_come=self.first_come,
        )
        return SimWorker(clock, record, settings, number)


@dataclass(slots=True)
class PrefixCache:
    """An unlimited pool: the chained hashes of all blocks."""

    known: set[int] = field(default_factory=set)

    @staticmethod
    def chain(tokens: Sequence[Any]) -> list[int]:
        """Return the hashes of the whole blocks."""
        ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
        each = (hash(tuple(tokens[end - BLOCK_SIZE : end])) for end in ends)
        return list(itertools.accumulate(each, lambda before, own: hash((before, own))))

    def hits(self, tokens: Sequence[Any]) -> int:
        """Return the number of leading cached blocks, leaving at least one token to compute."""
        chain = self.chain(tokens[:-1])
        return next((number for number, one in enumerate(chain) if one not in self.known), len(chain))


class CapacityRun:
    """One run of arriving sessions at a contender. ``records``: answered turns."""

    def __init__(self, contender: Contender, sessions: Sequence[LoadSession], seed: int) -> None:
        self.records: list[Record] = []
        self._clock = Clock()
        self._worker = contender.worker(self._clock, seed)
        self._slots = contender.seqs if contender.first_come else shared_slots([self._worker.record], ())
        self._cache = PrefixCache()
        # Jobs waiting for a slot, with their prompts.
        self._held: deque[tuple[WorkerJob, list[Any]]] = deque()
        self._running = 0
        for number, session in enumerate(sessions):
            history = session.system.split()
            self._clock.at(session.at_s, partial(self._arrive, number, session, 0, history))

    def run(self) -> Run:
        """Simulate until every turn is answered."""
        while not self._clock.idle:
            self._clock.run(self._clock.now + 60.0)
        records = tuple(sorted(self.records, key=lambda record: record.due_s))
        return Run(records, max(record.ended_s for record in records), 0.0, ())

    def _arrive(self, number: int, session: LoadSession, place: int, history: list[Any]) -> None:
        turn, due_s, clock = session.turns[place], self._clock.now, self._clock
        prompt = [*history, *(turn.ids or turn.text.split())]
        times: list[float] = []

        def tokens(at: Sequence[float], gaps: object) -> None:
            if not times:
                self._cache.known.update(PrefixCache.chain(prompt))
            times.extend(at)

        def end(ending: object) -> None:
            record = Record(
                number=number,
                session=number,
                turn=place,
                due_s=due_s,
                held_s=0.0,
                sent_s=due_s,
                ended_s=clock.now,
                messages=tuple((at, 1) for at in times),
                prompt_tokens=len(prompt),
                output_tokens=len(times),
            )
            self.records.append(record)
            said = [*prompt, *((number, place, token) for token in range(len(times)))]
            self._cache.known.update(PrefixCache.chain(said))
            self._running -= 1
            if place + 1 < len(session.turns):
                think_s = session.turns[place + 1].think_s
                clock.after(think_s, partial(self._arrive, number, session, place + 1, said))
            self._grant()

        job = WorkerJob(len(prompt), 0, turn.output_tokens, on_tokens=tokens, on_end=end)
        self._held.append((job, prompt))
        self._grant()

    def _grant(self) -> None:
        while self._held and self._running < self._slots:
            job, prompt = self._held.popleft()
            job.computed_blocks = self._cache.hits(prompt)
            self._running += 1
            self._clock.after(CALL_S, partial(self._worker.add, job))


def contenders(machine: str, peer_tokens: Sequence[int]) -> list[Contender]:
    """Return the compared servers of a machine; the last is a peer with its own costs."""
    cost = MACHINES[machine]
    own = StepModel._make(factor * each for factor, each in zip(PEER_COSTS, cost, strict=True))
    found = [Contender("auto", cost), Contender("600", cost, seqs=PEER_SEQS, target_ms=600.0)]
    for name, model in (("plain", cost), ("vllm", own)):
        found += [Contender(f"{name} {size}", model, size, PEER_SEQS, 0.0, first_come=True) for size in peer_tokens]
    return found


def capacities(contender: Contender, load: str, seed: int, bounds_ms: dict[str, float], args: Any) -> CapacitySearch:
    """Search a contender's highest rates under a load."""
    make = loads(args.scale)[load]
    [ttft] = parse_slo(f"ttft={args.ttft}")
    found = CapacitySearch(bounds_ms, args.start)
    while (rate := found.next()) is not None:
        sessions = OpenLoad(load, rate, args.seconds, make).sessions(seed)
        found.runs[rate] = run_figures(CapacityRun(contender, sessions, seed).run(), ttft, bounds_ms)
    return found


def main() -> None:
    """Simulate, print, write results/capacity_sim.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=list(loads(1.0)), default=list(loads(1.0)))
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=8.0, help="lengths of the data sets are divided by it")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the arrivals of each run")
    parser.add_argument("--start", type=float, default=4.0, help="the first rate")
    parser.add_argument("--ttft", default="2.0+0.004*n", help="bound of the time to the first token, in seconds")
    parser.add_argument("--peer-tokens", type=int, nargs="+", default=[256, PEER_TOKENS])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for machine, load in itertools.product(args.machines, args.loads):
        servers = contenders(machine, args.peer_tokens)
        plain_s = servers[-1].cost.plain_s(PLAIN_STREAMS, PLAIN_STREAMS * PLAIN_CONTEXT)
        bounds_ms = {name: steps * plain_s * 1000 for name, steps in OBJECTIVES.items()}
        for server in servers:
            found = [capacities(server, load, seed, bounds_ms, args).capacities() for seed in range(args.seeds)]
            means = {name: statistics.mean(one[name] for one in found) for name in OBJECTIVES}
            rows.append({"machine": machine, "load": load, "server": server.name, **means})
            print(rows[-1], flush=True)
    show("requests/s within each objective, means over the seeds", rows)
    save("capacity_sim", {"rows": rows, "machines": {name: list(cost) for name, cost in MACHINES.items()}})


if __name__ == "__main__":
    main()
