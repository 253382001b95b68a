"""Workers that only slept: their work moves on, and they return without loading anything, or are killed (I4).

Workers that return share a cluster, which fences them after some silence and kills nobody. A cluster that kills fenced
workers is another one: a worker that is to come back must not be killed first, however slow the machine is. Decode
workers of the first are two processes each, which sleep, return and end together.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from lab.testbed.cluster import ServedCluster, alive, served, words_of
from lab.testbed.conditions import result_of, wait_for
from lab.testbed.defaults import CLUSTER
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client
from pillion.types import Delta
from tests.support.cpu_model import needs_kernels

pytestmark = pytest.mark.cluster

# Small prefill steps make a long prompt last.
FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--kv-pool-bytes", "32MiB", "--chunk-size", "64")
FLAGS += ("--max-num-batched-prefill-tokens", "16", "--prefill-workers", "2", "--decode-workers", "2")
# A busy machine must not cause silence this long.
FLAGS += ("--heartbeat-ms", "100", "--heartbeat-timeout-ms", "20000")
# Seconds until a fenced worker is killed.
PATIENT_S, HASTY_S = 600.0, 4.0
RANKED = ("--tensor-parallel-size", "2", "--prefill-tensor-parallel-size", "1")
WORKERS = ("decode-0", "decode-1", "prefill-0", "prefill-1")
# Step at which a worker is paused: amid a long prompt, and amid an answer (at most one token per step).
HELD_AT_CHUNK, HELD_AT_TOKEN = 10, 30
ANSWER_TOKENS = 200
# Too short for a prefill worker; many steps of one.
SHORT_PROMPT_TOKENS, LONG_PROMPT_TOKENS = 50, 1000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ServedCluster]:
    model = str(save_model(tmp_path_factory.mktemp("model") / "tiny"))
    flags = (*FLAGS, *request.param)
    kill_s = PATIENT_S if request.param else HASTY_S
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(
            pathlib.Path(folder), model, *flags, faults=True, defaults={CLUSTER: {"fence_kill_after_s": kill_s}}
        ) as running,
    ):
        yield running


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[Client]:
    with Client(cluster.target) as made:
        wait_for(
            "all workers", lambda: {component.component_id for component in made.status().components} >= set(WORKERS)
        )
        yield made


def stream_of(client: Client, ids: list[int], max_tokens: int, salt: str) -> Iterator[Delta]:
    return client.generate(ids, temperature=0.0, ignore_eos=True, max_tokens=max_tokens, cache_salt=salt)


def tokens_of(deltas: Iterator[Delta]) -> list[int]:
    return list(itertools.chain.from_iterable(delta.token_ids for delta in deltas))


def processes(cluster: ServedCluster) -> dict[str, psutil.Process]:
    """Return the processes of the running workers by name."""
    found = {}
    for process in cluster.processes():
        words = words_of(process)
        found |= {name: process for name in WORKERS if f"--component-id={name}" in words}
    return found


def at_rest(cluster: ServedCluster) -> bool:
    """Return whether nothing is held and no worker is fenced, after proving integrity."""
    status = cluster.node_status()
    held = status.tickets, status.pinned_blocks, status.reserved_blocks, status.leased_blocks
    return held == (0, 0, 0, 0) and (status.quarantined_blocks, tuple(status.fenced_components)) == (0, ())


def serves(client: Client, component_id: str, salts: Iterator[str]) -> bool:
    """Return whether a worker serves one of two concurrent requests; idle workers get one each, where the second one
    comes while the first is under way."""
    streams = [stream_of(client, byte_prompt(7, 100), ANSWER_TOKENS, next(salts)) for _ in range(2)]
    with ThreadPoolExecutor(len(streams)) as pool:
        timings = [deltas[-1].timings for deltas in pool.map(list, streams)]
    return any(
        timing is not None and component_id in (timing.decode_worker, timing.prefill_worker) for timing in timings
    )


@pytest.fixture
def salts(request: pytest.FixtureRequest) -> Iterator[str]:
    return (f"{request.node.name} {number}" for number in itertools.count())


@contextlib.contextmanager
def paused(cluster: ServedCluster) -> Iterator[str]:
    """Stop the worker that is held with all its ranks (SIGSTOP) while the block runs; yields its name."""
    held = psutil.Process(cluster.struck())
    every = [held, *held.children()]
    for one in every:
        one.send_signal(signal.SIGSTOP)
    try:
        yield next(name for name, process in processes(cluster).items() if process == held)
    finally:
        for one in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGCONT)


def fenced(cluster: ServedCluster, component_id: str) -> bool:
    return component_id in cluster.node_status().fenced_components


def returned(cluster: ServedCluster, client: Client, component_id: str, salts: Iterator[str]) -> None:
    """Wait until a worker is no longer fenced, is in the registry, and serves."""
    wait_for("it to drain", lambda: not fenced(cluster, component_id))
    wait_for(
        "the registry to show it",
        lambda: component_id in {component.component_id for component in client.status().components},
    )
    wait_for("it to serve again", lambda: serves(client, component_id, salts))
    wait_for("all slots back", lambda: at_rest(cluster))


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize("cluster", [pytest.param(RANKED, id="two processes each")], indirect=True)
def test_streams_move_off_paused_workers_which_rejoin_later(
    cluster: ServedCluster, client: Client, salts: Iterator[str]
) -> None:
    """A prefill worker amid a prompt and a decode worker amid an answer, simultaneously: others take over."""
    short, long = byte_prompt(1, SHORT_PROMPT_TOKENS), byte_prompt(2, LONG_PROMPT_TOKENS)
    expected = [tokens_of(stream_of(client, ids, ANSWER_TOKENS, next(salts))) for ids in (short, long)]
    wait_for("all slots back", lambda: at_rest(cluster))
    before = processes(cluster)
    with ThreadPoolExecutor(2) as pool:
        cluster.arm(HELD_AT_CHUNK, signal.SIGSTOP, point="prefill, before a launch")
        reading_long = pool.submit(list, stream_of(client, long, ANSWER_TOKENS, next(salts)))
        with paused(cluster) as prefill:
            cluster.arm(HELD_AT_TOKEN, signal.SIGSTOP)
            reading_short = pool.submit(list, stream_of(client, short, ANSWER_TOKENS, next(salts)))
            with paused(cluster) as decode:
                for victim in (prefill, decode):
                    wait_for(f"the fence of {victim}", lambda victim=victim: fenced(cluster, victim))
                assert cluster.node_status().tickets > 0
                got = result_of("the answer by way of the other decode worker", reading_short)
                deltas = result_of("the answer by way of the other prefill worker", reading_long)
    assert [tokens_of(iter(got)), tokens_of(iter(deltas))] == expected
    moved, prefilled = got[-1].timings, deltas[-1].timings
    assert moved is not None
    # Either request may have waited at both victims: a replayed prompt of some 80 tokens is worth a prefill worker, and
    # the paused one is a candidate until its own fence is seen; a long prompt may wait at the paused decode worker.
    assert moved.replays in (1, 2)
    assert moved.decode_worker != decode
    assert prefilled is not None
    assert prefilled.replays in (1, 2)
    assert prefilled.prefill_worker != prefill
    assert prefilled.cached_tokens == 0, "cached before the first attempt, that is"
    for victim in (prefill, decode):
        returned(cluster, client, victim, salts)
    assert processes(cluster) == before, "the same processes, nothing was started again"


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize("cluster", [pytest.param(RANKED, id="two processes each")], indirect=True)
def test_a_worker_that_loses_a_process_exits_and_is_restarted(
    cluster: ServedCluster, client: Client, salts: Iterator[str]
) -> None:
    """How the others end, and that none outlives the first: tests/engine/ranks/test_rank_processes.py."""
    ids = byte_prompt(3, SHORT_PROMPT_TOKENS)
    expected = tokens_of(stream_of(client, ids, ANSWER_TOKENS, next(salts)))
    wait_for("all slots back", lambda: at_rest(cluster))
    before = processes(cluster)
    cluster.arm(HELD_AT_TOKEN, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, stream_of(client, ids, ANSWER_TOKENS, next(salts)))
        with paused(cluster) as victim:
            children = (one for one in before[victim].children() if "rank_main" in " ".join(one.cmdline()))
            every = [before[victim], *children]
            assert len(every) == 2
            shown = {one.component_id: one for one in client.status().components}
            assert shown[victim].tensor_parallel_size == 2
            every[1].kill()
        got = result_of("the answer by way of the other decode worker", reading)
    assert tokens_of(iter(got)) == expected
    timings = got[-1].timings
    assert timings is not None
    assert (timings.replays, timings.decode_worker == victim) == (1, False)
    wait_for("both processes to end", lambda: not any(alive(one) for one in every))
    wait_for("the one after it", lambda: processes(cluster).get(victim, every[0]) != every[0])
    returned(cluster, client, victim, salts)


@pytest.mark.long
@pytest.mark.parametrize("cluster", [pytest.param((), id="killed when fenced")], indirect=True)
def test_workers_that_stay_paused_are_killed_and_restarted(
    cluster: ServedCluster, client: Client, salts: Iterator[str]
) -> None:
    before, victims = processes(cluster), {"decode-1", "prefill-0"}
    for victim in victims:
        before[victim].send_signal(signal.SIGSTOP)
    for victim in victims:
        wait_for("its death", lambda victim=victim: not alive(before[victim]))
    wait_for("those after them", lambda: victims <= processes(cluster).keys())
    for victim in victims:
        returned(cluster, client, victim, salts)
    after = processes(cluster)
    assert {name for name in WORKERS if after[name] != before[name]} == victims
    log = cluster.log.read_text()
    for victim in victims:
        assert f"{victim} has been fenced for " in log
        assert f"{victim} was ended by SIGKILL" in log
