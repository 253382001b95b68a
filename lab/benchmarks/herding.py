"""Several gateways over the same workers, in simulated time: what each must know of the others' work to choose well.

The world is that of :mod:`lab.fleets`. Gateways get the requests in turn, and differ in what they know:

    heartbeats       each counts its own work; that of others is in the workers' heartbeats, once a second
    fast_heartbeats  the same, with ten heartbeats a second
    since            own work since a worker's heartbeat counts beside what that reported
    two_choices      power of two choices: each request sees two random workers of a kind
    admission        a worker that has more before the request than was expected refuses it, and the request is planned
                     again as after any loss
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lab.benchmarks.report import RESULTS, save, show_table
from lab.benchmarks.split_load import add_load_flags, arrivals, figures
from lab.fleets.fleet_request import FleetRequest
from lab.fleets.sim_gateway import Loads, SimGateway
from lab.fleets.sim_worker import SimWorker, WorkerJob
from lab.fleets.world import MakeGateway, lab_fleet, simulate
from pillion.kvstore.index.shared_loads import UnderWay
from pillion.loadgen.figures import percentile
from pillion.wire.registry import ComponentRecord

HEARTBEAT_S = 1.0
FAST_HEARTBEAT_S = 0.1
# A worker refuses a request where so many more tokens stand before it than was expected, and so often at most.
SURPRISE_TOKENS = 64
MAX_REFUSALS = 3


class SinceGateway(SimGateway):
    """Adds its own work since a worker's heartbeat to what that heartbeat reported, instead of the greater of both."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        # By component: its last record, and this gateway's streams and tokens there when that came.
        self._then: dict[str, tuple[ComponentRecord, UnderWay]] = {}

    def loads(self, components: Sequence[ComponentRecord]) -> Loads:
        amounts: dict[str, int] = {}
        tokens: dict[str, int] = {}
        for one in components:
            name, own = one.component_id, self.load.of(one.component_id)
            if one.role == "kvnode":
                continue
            newest = self.site.workers[name].record
            if name not in self._then or self._then[name][0] is not newest:
                self._then[name] = newest, own
            before = self._then[name][1]
            tokens[name] = own.tokens + max(0, one.queued_tokens - before.tokens)
            streams = own.amount + max(0, one.running_requests + one.waiting_requests - before.amount)
            amounts[name] = tokens[name] if one.role == "prefill" else streams
        return amounts, tokens


class TwoChoicesGateway(SimGateway):
    """Plans each request with two random workers of a kind (Mitzenmacher, 2001)."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self._draw = random.Random(self.number)

    def components(self, prompt_tokens: int, hits: Mapping[str, int], spread: int) -> list[ComponentRecord]:
        found = super().components(prompt_tokens, hits, spread)
        kinds = [[one for one in found if one.role == role] for role in ("prefill", "decode")]
        nodes = [one for one in found if one.role == "kvnode"]
        return [*nodes, *(one for kind in kinds for one in self._draw.sample(kind, min(2, len(kind))))]


class AdmissionGateway(SimGateway):
    """Its workers refuse what would wait longer than was expected, and say how much they have."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        # What refusals told, by worker; and how often each request was refused.
        self._fresh: dict[str, ComponentRecord] = {}
        self._refusals: Counter[int] = Counter()

    def components(self, prompt_tokens: int, hits: Mapping[str, int], spread: int) -> list[ComponentRecord]:
        found = super().components(prompt_tokens, hits, spread)
        return [self._fresh.pop(one.component_id, one) for one in found]

    def takes(self, flow: FleetRequest, worker: SimWorker, job: WorkerJob) -> bool:
        number, name, there = flow.request.number, worker.record.component_id, worker.fresh_record()
        # The request itself is counted on its way.
        expected = max(worker.record.queued_tokens, self.load.of(name).tokens - flow.lacking_tokens(name))
        surprised = there.queued_tokens > expected + SURPRISE_TOKENS
        if not surprised or flow.begun or self._refusals[number] == MAX_REFUSALS:
            return True
        self._refusals[number] += 1
        self._fresh[name] = there
        return False


@dataclass(slots=True)
class Gossip:
    """What all gateways have under way, as they read it of each other every ``period_s`` seconds."""

    period_s: float

    def gateway(self, *words: Any) -> SimGateway:
        """Makes one of the gateways."""
        return GossipGateway(self.period_s, *words)


class GossipGateway(SimGateway):
    """Shows what it has under way, and reads the others' work, every so often."""

    def __init__(self, period_s: float, *words: Any) -> None:
        super().__init__(*words)
        self._period_s = period_s
        self._read: dict[str, UnderWay] = {}
        self.clock.after(period_s * self.number / self.site_gateways, self._exchange)

    def loads(self, components: Sequence[ComponentRecord]) -> Loads:
        names = [one.component_id for one in components if one.role != "kvnode"]
        sums = {name: (self.load.of(name), self._read.get(name, UnderWay())) for name in names}
        return (
            {name: own.amount + other.amount for name, (own, other) in sums.items()},
            {name: own.tokens + other.tokens for name, (own, other) in sums.items()},
        )

    def _exchange(self) -> None:
        for name in self.site.workers:
            self.site.talk.tell(self.number, name, self.load)
        self._read = {name: self.site.talk.others(self.number, name) for name in self.site.workers}
        self.clock.after(self._period_s, self._exchange)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What gateways know. ``gateways`` 0: as many as there are."""

    make: MakeGateway = SimGateway
    gateways: int = 0
    heartbeat_s: float = HEARTBEAT_S
    sharing: bool = False


def makers() -> dict[str, Knowledge]:
    """Returns each kind of knowledge by its name."""
    found = {
        "one": Knowledge(gateways=1),
        "heartbeats": Knowledge(),
        "fast_heartbeats": Knowledge(heartbeat_s=FAST_HEARTBEAT_S),
        "since": Knowledge(SinceGateway),
        "two_choices": Knowledge(TwoChoicesGateway),
        "admission": Knowledge(AdmissionGateway),
    }
    for milliseconds in (1000, 250, 100, 50, 20):
        found[f"gossip_{milliseconds}"] = Knowledge(Gossip(milliseconds / 1000).gateway)
    found["sketch"] = Knowledge(sharing=True)
    return found


def sweep(args: argparse.Namespace, cost_s: tuple[float, ...]) -> list[dict[str, Any]]:
    """Simulates each rate, seed and kind of knowledge; all of a seed get the same arrivals."""
    rows = []
    prefills = args.workers // 2
    for rate in args.rates:
        for seed in range(args.seed, args.seed + args.seeds):
            requests = arrivals(args, rate, seed)
            for name in args.knowledge or makers():
                known = makers()[name]
                fleet = lab_fleet(
                    prefills,
                    args.workers - prefills,
                    cost_s,
                    cost_s,
                    args.target_itl_ms,
                    split_policy=args.policy,
                    gateways=known.gateways or args.gateways,
                    heartbeat_s=known.heartbeat_s,
                    sharing=known.sharing,
                )
                records, _ = simulate(fleet, requests, known.make)
                found = figures(args, records)
                ttft_ms = [record.ttft_s * 1000 for record in records]
                rows.append({"rate": rate, "seed": seed, "knowledge": name, "good_share": found["good_share"]})
                rows[-1] |= {"ttft_p50_ms": percentile(ttft_ms, 50), "ttft_p99_ms": percentile(ttft_ms, 99)}
                print(rows[-1], flush=True)
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the medians over the seeds, by rate and knowledge, with the difference to one gateway, seed by seed."""
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
