"""Several gateways over the same workers, in simulated time: what each must know of the others' work to choose well.

The world is that of :mod:`benchmarks.split_world`. Gateways get the requests in turn, and differ in what they know:

    heartbeats       each counts its own work; that of others is in the workers' heartbeats, once a second
    fast_heartbeats  the same, with ten heartbeats a second
    since            own work since a worker's heartbeat counts beside what that reported
    two_choices      power of two choices: each request sees two random workers of a kind
    admission        a worker that has more before the request than was expected refuses it; it is planned again
    gossip_MS        gateways tell each other what they have under way, every so many milliseconds
    sketch           each writes what it has under way into Redis when it changes, and reads the others' before a plan

``one`` is a single gateway with all requests. The share of good requests is the median over the seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import Counter
from typing import Any

from rich.table import Table

from benchmarks.report import RESULTS, save, show_table
from benchmarks.split_load import Request, add_load_flags, arrivals, figures
from benchmarks.split_world import (
    CALL_S,
    HEARTBEAT_S,
    Clock,
    Flow,
    MakeGateway,
    SimCluster,
    SimGateway,
    SimWorker,
    simulate,
)
from pillion.loadgen.figures import percentile
from pillion.wire.registry import ComponentRecord

# Work that is done is told to the other gateways after so long at most; what is sent, at once.
REPORT_S = 0.1
FAST_HEARTBEAT_S = 0.1
# A worker refuses a request where so many more tokens stand before it than was expected, and so often at most.
SURPRISE_TOKENS = 64
MAX_REFUSALS = 3


class SinceGateway(SimGateway):
    """Adds its own work since a worker's heartbeat to what that heartbeat reported, instead of the greater of both."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        # By component: its last record, and this gateway's streams and tokens there when that came.
        self._then: dict[str, tuple[ComponentRecord, int, int]] = {}

    def loads(self) -> tuple[Counter[str], Counter[str]]:
        streams, tokens = Counter(self._streams), Counter(self._tokens)
        load: Counter[str] = Counter()
        for name, worker in self._workers.items():
            record = worker.record
            if self._then.get(name, (None,))[0] is not record:
                self._then[name] = record, self._streams[name], self._tokens[name]
            _, own_streams, own_tokens = self._then[name]
            tokens[name] += max(0, record.queued_tokens - own_tokens)
            streams[name] += max(0, record.running_requests + record.waiting_requests - own_streams)
            load[name] = tokens[name] if record.role == "prefill" else streams[name]
        return load, tokens


class TwoChoicesGateway(SimGateway):
    """Plans each request with two random workers of a kind (Mitzenmacher, 2001)."""

    def __init__(self, clock: Clock, policy: str, workers: list[SimWorker], number: int, gateways: int) -> None:
        super().__init__(clock, policy, workers, number, gateways)
        self._draw = random.Random(number)

    def components(self) -> list[ComponentRecord]:
        found = super().components()
        kinds = [[one for one in found if one.role == role] for role in ("prefill", "decode")]
        return [one for kind in kinds for one in self._draw.sample(kind, min(2, len(kind)))]


class AdmissionGateway(SimGateway):
    """Its workers refuse what would wait longer than was expected, and say how much they have."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        # What refusals told; by request, how many tokens were expected before it, and how often it was refused.
        self._fresh: dict[str, ComponentRecord] = {}
        self._expected: dict[int, int] = {}
        self._refusals: Counter[int] = Counter()

    def components(self) -> list[ComponentRecord]:
        records = []
        for name, worker in self._workers.items():
            newest = max(self._fresh.get(name, worker.record), worker.record, key=lambda one: one.heartbeat_age_ms)
            records.append(self._aged(newest))
        return records

    def _send(self, flow: Flow) -> None:
        first = self._first(flow)
        self._expected[flow.request.number] = max(first.queued_tokens, self._tokens[first.component_id])
        super()._send(flow)

    def _offer(self, worker: SimWorker, flow: Flow) -> None:
        plan, number, there = flow.plan, flow.request.number, worker.fresh_record()
        surprised = there.queued_tokens > self._expected[number] + SURPRISE_TOKENS
        first = worker.record.component_id == self._first(flow).component_id
        if not first or not surprised or self._refusals[number] == MAX_REFUSALS:
            super()._offer(worker, flow)
            return
        self._refusals[number] += 1
        self._fresh[there.component_id] = there
        self._count(plan.decode, -1, plan.split_tokens - plan.prompt_tokens)
        if plan.prefill is not None and plan.chunks:
            self._count(plan.prefill, 0, -sum(plan.chunks))
        self.flows.remove(flow)
        self._clock.after(2 * CALL_S, lambda: self._plan(flow.request, flow.arrived_s))

    @staticmethod
    def _first(flow: Flow) -> ComponentRecord:
        plan = flow.plan
        return plan.prefill if plan.prefill is not None and plan.chunks else plan.decode


class Sketch:
    """What all gateways have under way, as they read it of each other: streams and tokens by component."""

    def __init__(self, period_s: float = 0.0) -> None:
        self.period_s = period_s
        self.shown: dict[int, tuple[Counter[str], Counter[str]]] = {}

    def gateway(self, *words: Any) -> SimGateway:
        """Make one of the gateways."""
        return SketchGateway(self, *words)


class SketchGateway(SimGateway):
    """Shows what it has under way, and adds what the others show to it before each plan.

    With a period, it shows and reads that often; without, it shows what it sends at once, what is done a moment later,
    and reads for each plan.
    """

    def __init__(
        self, sketch: Sketch, clock: Clock, policy: str, workers: list[SimWorker], number: int, gateways: int
    ) -> None:
        super().__init__(clock, policy, workers, number, gateways)
        self._sketch = sketch
        self._number = number
        self._others: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._due = False
        if sketch.period_s:
            clock.after(sketch.period_s * number / gateways, self._exchange)

    def arrive(self, request: Request) -> None:
        arrived_s = self._clock.now
        if self._sketch.period_s:
            self._plan(request, arrived_s)
            return
        self._clock.after(CALL_S / 2, self._read)
        self._clock.after(CALL_S, lambda: self._plan(request, arrived_s))

    def loads(self) -> tuple[Counter[str], Counter[str]]:
        load, tokens = super().loads()
        streams, queued = self._others
        queues = Counter({name: count for name, count in queued.items() if name.startswith("prefill")})
        decodes = Counter({name: count for name, count in streams.items() if name.startswith("decode")})
        return load + decodes + queues, tokens + queued

    def _count(self, worker: ComponentRecord, streams: int, tokens: int) -> None:
        super()._count(worker, streams, tokens)
        if self._sketch.period_s:
            return
        if streams > 0 or tokens > 0:
            self._clock.after(CALL_S / 2, self._show)
        elif not self._due:
            self._due = True
            self._clock.after(REPORT_S, self._show)

    def _show(self) -> None:
        self._due = False
        self._sketch.shown[self._number] = +self._streams, +self._tokens

    def _read(self) -> None:
        shown = [state for number, state in self._sketch.shown.items() if number != self._number]
        self._others = sum((state[0] for state in shown), Counter()), sum((state[1] for state in shown), Counter())

    def _exchange(self) -> None:
        self._show()
        self._read()
        self._clock.after(self._sketch.period_s, self._exchange)


def makers() -> dict[str, tuple[int, float, MakeGateway]]:
    """Return for each kind of knowledge the share of gateways, the workers' heartbeat, and what makes a gateway."""
    found: dict[str, tuple[int, float, MakeGateway]] = {
        "one": (1, HEARTBEAT_S, SimGateway),
        "heartbeats": (0, HEARTBEAT_S, SimGateway),
        "fast_heartbeats": (0, FAST_HEARTBEAT_S, SimGateway),
        "since": (0, HEARTBEAT_S, SinceGateway),
        "two_choices": (0, HEARTBEAT_S, TwoChoicesGateway),
        "admission": (0, HEARTBEAT_S, AdmissionGateway),
    }
    for milliseconds in (1000, 250, 100, 50, 20):
        found[f"gossip_{milliseconds}"] = (0, HEARTBEAT_S, Sketch(milliseconds / 1000).gateway)
    found["sketch"] = (0, HEARTBEAT_S, Sketch().gateway)
    return found


def sweep(args: argparse.Namespace, cost_s: tuple[float, ...]) -> list[dict[str, Any]]:
    """Simulate each rate, seed and kind of knowledge; all of a seed get the same arrivals."""
    rows = []
    prefills = args.workers // 2
    for rate in args.rates:
        for seed in range(args.seed, args.seed + args.seeds):
            requests = arrivals(args, rate, seed)
            for name in args.knowledge or makers():
                count, heartbeat_s, make = makers()[name]
                cluster = SimCluster(
                    prefills, args.workers - prefills, cost_s, cost_s, args.target_itl_ms, heartbeat_s=heartbeat_s
                )
                records, _ = simulate(cluster, args.policy, requests, count or args.gateways, make)
                found = figures(args, records)
                ttft_ms = [record.ttft_s * 1000 for record in records]
                rows.append({"rate": rate, "seed": seed, "knowledge": name, "good_share": found["good_share"]})
                rows[-1] |= {"ttft_p50_ms": percentile(ttft_ms, 50), "ttft_p99_ms": percentile(ttft_ms, 99)}
                print(rows[-1], flush=True)
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians over the seeds, by rate and knowledge, with the difference to one gateway, seed by seed."""
    found = []
    for rate, name in dict.fromkeys((row["rate"], row["knowledge"]) for row in rows):
        mine = {row["seed"]: row for row in rows if (row["rate"], row["knowledge"]) == (rate, name)}
        one = {row["seed"]: row for row in rows if (row["rate"], row["knowledge"]) == (rate, "one")}
        medians = {
            figure: statistics.median(row[figure] for row in mine.values())
            for figure in ("good_share", "ttft_p50_ms", "ttft_p99_ms")
        }
        lost = [one[seed]["good_share"] - mine[seed]["good_share"] for seed in mine if seed in one]
        found.append({"rate": rate, "knowledge": name} | medians | {"lost": statistics.mean(lost) if lost else None})
    return found


def main() -> None:
    """Simulate, print, write results/herding.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="half of them prefill")
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 5.6], help="arrivals a second")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from --seed on")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--knowledge", nargs="*", choices=list(makers()))
    parser.add_argument("--target-itl-ms", type=float, default=100.0)
    add_load_flags(parser)
    parser.set_defaults(seed=301)
    args = parser.parse_args()
    cost_s = tuple(json.loads((RESULTS / "split_fit.json").read_text())["step_cost_s"])
    rows = sweep(args, cost_s)
    table = Table("arrivals/s", "knowledge", "good", "less than one gateway", "TTFT p50 ms", "TTFT p99 ms")
    medians = compared(rows)
    for row in medians:
        lost = "" if row["lost"] is None else f"{row['lost']:.3f}"
        table.add_row(f"{row['rate']:g}", row["knowledge"], f"{row['good_share']:.3f}", lost,
                      f"{row['ttft_p50_ms']:.0f}", f"{row['ttft_p99_ms']:.0f}")  # fmt: skip
    show_table(table)
    save("herding", {"load": vars(args), "step_cost_s": cost_s, "rows": rows, "medians": medians})


if __name__ == "__main__":
    main()
