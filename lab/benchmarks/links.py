"""`python -m lab.benchmarks.links`: whether `auto` takes the quicker way to a prefix, a fetch or a computation.

Three hosts (network namespaces; it needs root): an edge with Redis and a gateway, and two with a KV node each. Prompts
are computed on the first one, whose worker then ends, and are asked for again at the second one's worker. For each kind
of link between the two, and each length, the time to the first token is measured three times over: where the blocks are
always fetched, where they never are, and where `auto` decides, after a few requests from which it learns. A ratio above
1.1 says that it chose the slower way, or that deciding took long.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lab.benchmarks.closed_loop import TOKEN_RANGE
from lab.benchmarks.report import save, show_table
from lab.testbed.cluster import READY_TIMEOUT_S
from lab.testbed.hosts import Hosts, hosts
from lab.testbed.networks import HostNetwork, missing, network
from lab.testbed.wire import PERFECT, LinkRule
from pillion import Client

MODEL = "demo"
SOURCE, READER = "kv-a", "kv-b"
MAX_MODEL_LEN_TOKENS = 2048
GIGABIT = 125e6
LINKS = {
    "0.2 ms, 1 Gbit": LinkRule(0.0001, GIGABIT),
    "20 ms, 100 Mbit": LinkRule(0.01, GIGABIT / 10),
    "20 ms, 25 Mbit": LinkRule(0.01, GIGABIT / 40),
}
# How a way of answering is forced: the gateway's policy, and whether the node may fetch.
FETCHED, COMPUTED, AUTO = "fetched", "computed", "auto"
WAYS = {FETCHED: ("colocated", "1GiB"), COMPUTED: ("colocated", "0"), AUTO: ("auto", "1GiB")}


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The prompts of one link and way: those that are measured, and those before from which a gateway learns."""

    link: str
    way: str
    length: int
    learned: tuple[tuple[int, ...], ...]
    measured: tuple[tuple[int, ...], ...]


def loads_of(args: argparse.Namespace) -> list[LinkLoad]:
    """Returns all loads, whose prompts have no common beginning."""
    draw = random.Random(args.seed)

    def prompts(count: int, length: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(draw.randrange(*TOKEN_RANGE) for _ in range(length)) for _ in range(count))

    return [
        LinkLoad(link, way, length, prompts(args.learn if way == AUTO else 1, length), prompts(args.repeats, length))
        for way in WAYS
        for link in LINKS
        for length in args.tokens
    ]


def first_token_s(client: Client, prompt: Sequence[int]) -> tuple[float, int]:
    """Returns how long a prompt's first token takes, and how many of its tokens were cached."""
    begin = time.perf_counter()
    deltas = client.generate(list(prompt), max_tokens=1, temperature=0.0, timeout_s=READY_TIMEOUT_S)
    first = next(iter(deltas))
    took_s = time.perf_counter() - begin
    *_, last = (first, *deltas)
    return took_s, 0 if last.timings is None else last.timings.cached_tokens


def write_prompts(cluster: Hosts, loads: Sequence[LinkLoad], pool: str) -> None:
    """Computes all prompts on the first host, whose node keeps their blocks, and stops the worker that computed
    them."""
    cluster.node(SOURCE, "--kv-pool-bytes", pool, "--kv-transport", "grpc")
    writer = cluster.worker("decode", SOURCE)
    target = cluster.gateway("--split-policy", "colocated", name="gateway-writer")
    cluster.sees(target, writer, gateway="gateway-writer")
    with Client(target) as client:
        for load in loads:
            for prompt in (*load.learned, *load.measured):
                first_token_s(client, prompt)
    cluster.stop(writer)
    cluster.stop("gateway-writer")


@contextmanager
def reader(cluster: Hosts, way: str) -> Iterator[Client]:
    """Runs the second host, and a gateway that is held to one way of answering, until the block ends."""
    policy, most = WAYS[way]
    gateway = f"gateway-{way}"
    cluster.node(READER, "--kv-pool-bytes", "512MiB", "--kv-transport", "grpc", "--max-fetch-bytes", most)
    worker = cluster.worker("decode", READER)
    target = cluster.gateway("--split-policy", policy, name=gateway)
    cluster.sees(target, worker, gateway=gateway)
    with Client(target) as client:
        yield client
    for name in (gateway, worker, READER):
        cluster.stop(name)


def run(args: argparse.Namespace, net: HostNetwork, cluster: Hosts) -> list[dict[str, Any]]:
    """Measures every load, with a node, a worker and a gateway of their own for each way of answering."""
    loads, rows = loads_of(args), []
    write_prompts(cluster, loads, args.pool)
    for way in WAYS:
        with reader(cluster, way) as client:
            for load in (one for one in loads if one.way == way):
                net.link(SOURCE, READER, LINKS[load.link])
                for prompt in load.learned:
                    first_token_s(client, prompt)
                took = [first_token_s(client, prompt) for prompt in load.measured]
                net.link(SOURCE, READER, PERFECT)
                seconds = sorted(one for one, _ in took)
                rows.append(
                    {
                        "link": load.link,
                        "tokens": load.length,
                        "way": way,
                        "first_token_ms": statistics.median(seconds) * 1000,
                        "least_ms": seconds[0] * 1000,
                        "most_ms": seconds[-1] * 1000,
                        "fetched_share": sum(cached > 0 for _, cached in took) / len(took),
                    }
                )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints each link and length with the three ways side by side."""
    table = Table(title="Time to the first token of a prompt that another host has, ms: median (least to most)")
    for name in ("link", "tokens", *WAYS, "auto / the quicker", "auto fetched"):
        table.add_column(name, justify="left" if name == "link" else "right")
    found = {(row["link"], row["tokens"], row["way"]): row for row in rows}
    for link, length in dict.fromkeys((row["link"], row["tokens"]) for row in rows):
        ways = {way: found[link, length, way] for way in WAYS}
        figures = (
            f"{one['first_token_ms']:.0f} ({one['least_ms']:.0f} to {one['most_ms']:.0f})" for one in ways.values()
        )
        quicker = min(ways[FETCHED]["first_token_ms"], ways[COMPUTED]["first_token_ms"])
        ratio, share = ways[AUTO]["first_token_ms"] / quicker, ways[AUTO]["fetched_share"]
        table.add_row(link, str(length), *figures, f"{ratio:.2f}", f"{share:.0%}")
    show_table(table)


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024], help="of a prompt")
    parser.add_argument("--repeats", type=int, default=7, help="prompts of each link, length and way")
    parser.add_argument("--learn", type=int, default=5, help="requests before them from which `auto` learns")
    parser.add_argument("--pool", default="4GiB", help="of the first node, which keeps all prompts")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if missing():
        parser.error(missing())
    flags = ("--model", MODEL, "--max-model-len", str(MAX_MODEL_LEN_TOKENS))
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        network("edge", SOURCE, READER) as net,
        hosts(pathlib.Path(folder), *flags, network=net) as cluster,
    ):
        rows = run(args, net, cluster)
    show(rows)
    print(f"written to {save('links', {'options': vars(args), 'rows': rows})}")


if __name__ == "__main__":
    main()
