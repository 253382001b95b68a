"""The real processes under load, cancels and kills: streams go on, and nothing leaks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from lab.testbed.cluster import STOP_TIMEOUT_S, ServedCluster, alive, served, words_of
from lab.testbed.conditions import WITHIN_S, result_of, wait_for
from lab.testbed.nested_forks import FORKED
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client, Delta
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.errors import InvalidRequest, NotFound, PillionError
from pillion.host.core_lending_table import CoreLendingTable
from pillion.host.cores import usable_cores
from pillion.supervisor.component_process import STOP_GRACE_S
from pillion.supervisor.standbys import fork_server
from pillion.types import TokenLogprob
from pillion.v1.kvnode_pb2 import NodeStatus
from tests.faults.leftovers import NewTracebacks
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels

pytestmark = pytest.mark.cluster

# Paused step, of both workers together: each stream has 200 tokens, at most one per step.
HELD_AT_STEP, MOVED_TOKENS = 40, 200
# Pause of steps, longer than the stop's grace plus the machine's lag.
STEP_HELD_S = STOP_GRACE_S + 10
# Each step of a prefill worker computes one chunk.
STEPS = ("--chunk-size", "64", "--max-num-batched-prefill-tokens", "64")
FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--kv-pool-bytes", "32MiB", *STEPS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def cluster(model: str) -> Iterator[ServedCluster]:
    """Whatever the tests do to its components, no log has a traceback of it."""
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), model, *FLAGS, faults=True) as running,
    ):
        yield running
        assert NewTracebacks().look(running.log.read_text()) == []


def answer(client: Client, ids: list[int], max_tokens: int, salt: str = "") -> tuple[int, ...]:
    stream = client.generate(ids, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, cache_salt=salt)
    return tuple(itertools.chain.from_iterable(delta.token_ids for delta in stream))


def end(cluster: ServedCluster, number: signal.Signals) -> None:
    """Stop a cluster by a signal to its supervisor alone; check that nothing is left behind."""
    assert len(cluster.processes()) >= 6
    cluster.stop(number)
    check_end(cluster, number)


def check_end(cluster: ServedCluster, number: signal.Signals) -> None:
    wait_for("all processes to end", lambda: not any(alive(p) for p in cluster.ever_seen.values()))
    if number != signal.SIGKILL:
        assert cluster.left_behind() == []
        assert cluster.process.poll() in (0, 130, 143)


def test_concurrent_streams_equal_single_ones(cluster: ServedCluster) -> None:
    prompts = [byte_prompt(seed, 5 + 37 * seed) for seed in range(12)]
    with Client(cluster.target) as client:
        alone = [answer(client, ids, 20, "alone") for ids in prompts]
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            together = list(pool.map(lambda ids: answer(client, ids, 20, "together"), prompts))
    assert together == alone
    wait_for("all slots back", cluster.idle)


def test_the_fork_server_of_a_cluster_for_tests_is_a_fork_itself(cluster: ServedCluster) -> None:
    [server] = [process for process in cluster.processes() if fork_server.PROGRAM in words_of(process)[:3]]
    assert server.ppid() == cluster.process.pid
    assert FORKED in cluster.log.read_text()


def test_reflection_and_health_need_no_files(cluster: ServedCluster) -> None:
    with grpc.insecure_channel(cluster.target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"pillion.v1.Gateway", "grpc.health.v1.Health"} <= set(database.get_services())
        service = DescriptorPool(database).FindServiceByName("pillion.v1.Gateway")
        names = [method.name for method in service.methods]
        assert names == [
            "Generate",
            "ListModels",
            "LoadAdapter",
            "UnloadAdapter",
            "WarmPrefix",
            "ListPrefixes",
            "DropPrefix",
            "Embed",
            "Score",
            "GetStatus",
        ]
        for name in ("", "pillion.v1.Gateway"):
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name), timeout=WITHIN_S
            )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_second_turn_hits_generated_text_too(cluster: ServedCluster) -> None:
    ids = byte_prompt(77, 100)
    with Client(cluster.target) as client:
        first_answer = answer(client, ids, 60, "turns")
        wait_for("commits", cluster.idle)
        *_, last = client.generate([*ids, *first_answer, 5, 6, 7], temperature=0.0, max_tokens=1, cache_salt="turns")
        *_, other = client.generate([*ids, *first_answer, 5, 6, 7], temperature=0.0, max_tokens=1, cache_salt="other")
    assert last.usage is not None
    assert last.usage.cached_tokens == 144
    assert other.usage is not None
    assert other.usage.cached_tokens == 0


@needs_kernels
def test_no_core_idles_while_either_worker_has_work(cluster: ServedCluster) -> None:
    """Disaggregated workers have a core each or more; what the other one leaves idle is lent, in both directions."""
    worker = cluster.component("decode")
    assert worker is not None
    if usable_cores() < 2:
        pytest.skip("there is one core, and nothing to lend")
    path = next((word.partition("=")[2] for word in words_of(worker) if word.startswith("--core-lending-table=")), "")
    assert path, "workers of one host share a board of cores"
    board, lent, over = CoreLendingTable.open(path), set(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            now = time.monotonic_ns()
            lent.update(core for core, (_, until) in enumerate(board._times()) if until > now)

    watcher = threading.Thread(target=watch)
    watcher.start()
    salts = itertools.count()
    try:
        with Client(cluster.target) as client:

            def all_lent() -> bool:
                answer(client, byte_prompt(3, 900), 60, f"lent {next(salts)}")
                return lent == set(range(board.cores))

            wait_for("all cores to have been lent", all_lent)
        wait_for("everything to be given back", lambda: all(until == 0 for _, until in board._times()))
    finally:
        over.set()
        watcher.join()
        board.close()


def test_cancel_mid_stream_frees_everything(cluster: ServedCluster) -> None:
    with Client(cluster.target) as client:
        for seed in range(6):
            stream = client.generate(byte_prompt(seed, 300), temperature=0.0, max_tokens=600, ignore_eos=True)
            for _ in range(seed):
                next(stream)
            stream.close()
    wait_for("all slots back", cluster.idle)


def test_bad_input_never_reaches_a_worker(cluster: ServedCluster) -> None:
    components = {role: cluster.component(role) for role in ("prefill", "decode", "kvnode", "gateway")}
    with Client(cluster.target) as client:
        for options in ({"temperature": -1.0}, {"max_tokens": -1}, {"top_p": float("nan")}):
            with pytest.raises(InvalidRequest) as caught:
                list(client.generate([2, 3, 4], **options))  # type: ignore[arg-type]
            assert caught.value.violations
        with pytest.raises(NotFound):
            list(client.generate([2, 3, 4], model="nobody"))
        for ids in ([], [999_999], [2] * 5000):
            with pytest.raises(InvalidRequest):
                list(client.generate(ids))
        assert len(answer(client, [2, 3, 4], 3)) == 3
    assert {role: cluster.component(role) for role in components} == components


@pytest.mark.long
def test_streams_that_outgrow_the_pool_alternate(model: str) -> None:
    """In the end SIGTERM ends streams at once, as they have no time to drain, and leaves nothing behind. Each line of
    its log, the supervisor's too, is a JSON object. With time, streams end first: test_gateway_workers.py."""
    # 160 slots of 16 tokens; eight streams that end at 700 tokens each want 352.
    flags = (*FLAGS, "--kv-pool-bytes", str(160 * 8192), "--log-format", "json")
    flags += ("--max-model-len", "1920", "--drain-timeout-s", "0")
    prompts = [byte_prompt(100 + seed, 200) for seed in range(8)]
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), model, *flags, faults=True) as small,
    ):
        with Client(small.target) as client:

            def crowded(ids: list[int]) -> tuple[tuple[int, ...], int]:
                deltas = list(client.generate(ids, temperature=0.0, max_tokens=500, ignore_eos=True))
                assert deltas[-1].timings is not None
                return sum((delta.token_ids for delta in deltas), ()), deltas[-1].timings.preemptions

            small.arm(1, signal.SIGSTOP)
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                streams = [pool.submit(crowded, ids) for ids in prompts]
                with small.holding_all("eight tickets", lambda: small.node_status().tickets == 8, 1):
                    pass
                together, preemptions = zip(*(stream.result() for stream in streams), strict=True)
            assert small.node_status().total_blocks == 160
            assert sum(preemptions) > 0
            alone = [answer(client, ids, 500, "alone") for ids in prompts]
        assert list(together) == alone
        wait_for("all slots back", small.idle)
        check_no_time_to_drain(small)
        lines = [json.loads(line) for line in small.log.read_text().splitlines()]
        components = {"pillion", "kvnode-0", "prefill-0", "decode-0", "gateway-0"}
        assert components <= {line["component"] for line in lines}
        assert all({"time", "level", "message"} <= set(line) for line in lines)


def check_no_time_to_drain(running: ServedCluster) -> None:
    """Streams that cannot end by themselves meanwhile, as their worker is held, are ended by the gateway."""
    begun = threading.Semaphore(0)

    def read() -> None:
        with Client(running.target, resume_timeout_s=0) as client:
            for number, _ in enumerate(client.generate("x", max_tokens=1900, ignore_eos=True)):
                if not number:
                    begun.release()

    running.arm(1, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(read) for _ in range(4)]
        with running.holding_all("four streams", lambda: begun._value == len(reading), 50):
            assert len(running.processes()) >= 6
            running.process.send_signal(signal.SIGTERM)
            for work in reading:
                with pytest.raises(PillionError):
                    result_of("a stream of a cluster that ends", work)
    status = running.process.wait(STOP_TIMEOUT_S)
    check_end(running, signal.SIGTERM)
    assert status == 0


def test_a_killed_prefill_worker_costs_a_pause(cluster: ServedCluster) -> None:
    """Decode workers and KV nodes are killed amid answers in the next two tests."""
    ids = byte_prompt(5, 400)
    with Client(cluster.target) as client:
        expected = answer(client, ids, 20, "before")
        cluster.arm(2, signal.SIGKILL, point="prefill, before a launch")
        deltas = list(client.generate(ids, temperature=0.0, max_tokens=20, ignore_eos=True, cache_salt="after"))
        dead = cluster.struck()
        assert tuple(token for delta in deltas for token in delta.token_ids) == expected
        assert deltas[-1].timings is not None
        assert deltas[-1].timings.replays > 0
        wait_for("the component to return", lambda: (p := cluster.component("prefill")) is not None and p.pid != dead)
        wait_for("prefill to serve again", lambda: answered_by_prefill(client))
    wait_for("all slots back", cluster.idle)


def test_every_kill_under_streams_leaves_a_line_each(cluster: ServedCluster) -> None:
    """One component after the other is killed while streams run that wait for blocks, tokens and memory."""
    prompts = [byte_prompt(800 + seed, 200 + 40 * seed) for seed in range(6)]
    with Client(cluster.target) as client, concurrent.futures.ThreadPoolExecutor(6) as threads:
        expected = list(threads.map(lambda ids: answer(client, ids, 40, "whole"), prompts))
    for role in ("decode", "prefill", "kvnode", "gateway", "redis-server"):
        with (
            Client(cluster.target, resume_timeout_s=WITHIN_S, connect_timeout_s=WITHIN_S) as client,
            concurrent.futures.ThreadPoolExecutor(6) as threads,
        ):
            streams = [threads.submit(answer, client, ids, 40, f"beside a dying {role}") for ids in prompts]
            dead = cluster.kill(role)
            assert [result_of("a stream to end", stream) for stream in streams] == expected
        wait_for(f"{role} to return", lambda gone=dead, of=role: (p := cluster.component(of)) and p.pid != gone)
        wait_for("the cluster to serve again", cluster.serving)
        wait_for("all slots back", cluster.idle)
    assert NewTracebacks().look(cluster.log.read_text()) == []


def test_a_killed_kv_node_costs_no_kv(cluster: ServedCluster) -> None:
    """First under eight streams, of which none is lost, and then with nothing under way: what was committed is hit, and
    no worker has to be started again."""
    prompts, salt, most = [byte_prompt(400 + seed, 300) for seed in range(8)], "kept", 300

    def read(client: Client, ids: list[int]) -> tuple[tuple[int, ...], int]:
        deltas = list(client.generate(ids, temperature=0.0, max_tokens=most, ignore_eos=True, cache_salt=salt))
        assert deltas[-1].timings is not None
        return tuple(token for delta in deltas for token in delta.token_ids), deltas[-1].timings.replays

    def returned(before: NodeStatus) -> None:
        """A killed node has all committed blocks after its restart."""

        def back() -> NodeStatus | None:
            with contextlib.suppress(AssertionError):
                status = cluster.node_status()
                return status if status.boot_epoch != before.boot_epoch and status.total_blocks else None
            return None

        wait_for("the node to return", back)
        wait_for(
            "its workers and all blocks to be back",
            lambda: cluster.serving() and not cluster.node_status().surviving_blocks,
        )
        assert cluster.node_status().recovered_blocks >= 0.95 * before.committed_blocks > 0

    with Client(cluster.target) as client, concurrent.futures.ThreadPoolExecutor(8) as threads:
        expected = list(threads.map(lambda ids: answer(client, ids, most, "before"), prompts))
        wait_for("all slots back", cluster.idle)
        workers = {process.pid for role in ("decode", "prefill") for process in cluster.components(role)}
        before = cluster.node_status()
        # A stream has 300 tokens, at most one per step.
        cluster.arm(100, signal.SIGKILL, victim="kvnode")
        streams = [threads.submit(read, client, ids) for ids in prompts]
        cluster.struck()
        returned(before)
        got, replays = zip(*(result_of("a stream to end", stream) for stream in streams), strict=True)
        assert list(got) == expected
        assert sum(replays) > 0
        wait_for("all slots back", cluster.idle)
        before = cluster.node_status()
        cluster.kill("kvnode")
        returned(before)
        hits = 0
        for ids, tokens in zip(prompts, expected, strict=True):
            *_, last = client.generate([*ids, *tokens], temperature=0.0, max_tokens=1, cache_salt=salt)
            assert last.usage is not None
            hits += last.usage.cached_tokens
        assert hits >= 0.95 * sum((len(ids) + most - 1) // 16 * 16 for ids in prompts)
        assert {process.pid for role in ("decode", "prefill") for process in cluster.components(role)} == workers
    wait_for("all slots back", cluster.idle)


@pytest.mark.long
@needs_kernels
def test_answers_with_8_bit_kv_match_one_process_and_survive_kills(model: str) -> None:
    """Each of several sampled answers is replayed by itself, with its own seed, and none loses or repeats a token (I6).

    The test has a cluster of its own, since a supervisor gives up after too many deaths in a short time. Its KV is in
    8 bits, whose codes a replay has to find again bit by bit. In the end SIGINT leaves nothing behind, not even of what
    was killed.
    """
    ids = byte_prompt(8, 300)
    asked = {"n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 150, "ignore_eos": True, "frequency_penalty": 0.2}

    def read(client: Client, salt: str) -> tuple[dict[int, list[int]], int]:
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for delta in client.generate(ids, cache_salt=salt, **asked):
            found[delta.index] += delta.token_ids
        assert delta.timings is not None
        return found, delta.timings.replays

    flags = (*FLAGS, "--kv-cache-dtype", "fp8", "--max-num-batched-tokens", "64")
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), model, *flags, faults=True) as running,
    ):
        with Client(running.target) as client:
            check_against_one_process(running, client, model, ids)
            expected, replays = read(client, "before")
            assert replays == 0
            for role in ("decode", "kvnode"):
                running.arm(20, signal.SIGKILL, victim=role)
                found, replays = read(client, f"after {role}")
                running.struck()
                assert found == expected
                assert replays > 0
                wait_for("prefill to serve again", lambda: answered_by_prefill(client))
            score_over_a_kill(running, client)
        assert all(len(tokens) == 150 for tokens in expected.values())
        assert len({tuple(tokens) for tokens in expected.values()}) == 3
        wait_for("all slots back", running.idle)
        end(running, signal.SIGINT)


def check_against_one_process(running: ServedCluster, client: Client, model: str, ids: list[int]) -> None:
    """A prompt that a prefill worker computed, and the same prompt from the KV node's memory, are answered as by an
    engine in this process, whose KV is in 8 bits too."""
    prepared = prepare(ModelFlags(model=model, dtype="float32", max_model_len=1024))
    few, plain = (CpuDriver(prepared, backend=cpu_backend(prepared, kv_cache_dtype=kv)) for kv in ("fp8", "auto"))
    assert running.node_status().block_bytes == few.backend.layout.block_bytes
    wanted = few.greedy(ids, 200)
    assert wanted != plain.greedy(ids, 200)  # Otherwise equal tokens would prove nothing.
    asked: Any = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True, "cache_salt": "one process"}
    for cached_tokens in (0, (len(ids) - 1) // 16 * 16):
        deltas = list(client.generate(ids, **asked))
        assert [token for delta in deltas for token in delta.token_ids] == wanted
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.cached_tokens == cached_tokens


def score_over_a_kill(running: ServedCluster, client: Client) -> None:
    """A worker that is killed amid a prompt costs no log probability, and none comes twice."""
    ids = byte_prompt(6, 800)
    asked: Any = {"prompt_logprobs": 1, "temperature": 0.0, "max_tokens": 150, "ignore_eos": True}

    def gathered(deltas: list[Delta]) -> tuple[list[int], list[TokenLogprob]]:
        tokens = [one for delta in deltas for one in delta.token_ids]
        return tokens, [one for delta in deltas for one in delta.prompt_logprobs]

    wanted_tokens, wanted = gathered(list(client.generate(ids, **asked)))
    running.arm(3, signal.SIGKILL)
    deltas = list(client.generate(ids, **asked))
    running.struck()
    tokens, scores = gathered(deltas)
    assert deltas[-1].timings is not None
    assert deltas[-1].timings.replays >= 1
    assert tokens == wanted_tokens
    assert [one.token_id for one in scores] == ids[1:]
    assert [one.top_ids for one in scores] == [one.top_ids for one in wanted]
    assert [one.logprob for one in scores] == pytest.approx([one.logprob for one in wanted], abs=1e-4)


def test_streams_move_to_another_worker(model: str) -> None:
    """Streams of a worker that dies, and of one that is told to stop and has no time left for them, as when a fleet
    becomes smaller. In the end the supervisor is killed, and all others end with it."""
    flags = (*FLAGS, "--prefill-workers", "2", "--decode-workers", "2", "--drain-timeout-s", "0")
    prompts = [byte_prompt(40 + seed, 80) for seed in range(6)]
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), model, *flags, faults=True) as cluster,
    ):
        with Client(cluster.target) as client, concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            expected = list(pool.map(lambda ids: answer(client, ids, MOVED_TOKENS, "before"), prompts))
            for number in (signal.SIGKILL, signal.SIGTERM):
                check_streams_move(cluster, client, pool, prompts, expected, number)
        wait_for("all slots back", cluster.idle)
        end(cluster, signal.SIGKILL)


def check_streams_move(
    cluster: ServedCluster,
    client: Client,
    pool: concurrent.futures.Executor,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    number: signal.Signals,
) -> None:
    """A signal takes one of two decode workers, and with SIGTERM a prefill worker too: no stream loses or repeats a
    token. The worker is held in the midst of its streams until then, however long that takes. Of one that is told to
    stop the steps alone are held, until the time that it gives its streams is over."""

    def whole() -> bool:
        # The gateway keeps records of workers that have just ended, so use the log.
        log = cluster.log.read_text()
        serves = len(re.findall(r"(?:prefill|decode)-\d serves at", log))
        known = [one for one in client.status().components if one.role in ("prefill", "decode")]
        return len(known) == 4 and serves == 4 + log.count("; restarting it")

    def moved(ids: list[int], salt: str) -> tuple[tuple[int, ...], bool]:
        got: list[int] = []
        for last in client.generate(ids, temperature=0.0, max_tokens=MOVED_TOKENS, ignore_eos=True, cache_salt=salt):
            got += last.token_ids
        assert last.timings is not None
        return tuple(got), last.timings.replays > 0

    wait_for("all workers", whole)
    cluster.arm(HELD_AT_STEP, signal.SIGSTOP if number == signal.SIGKILL else None, held_s=STEP_HELD_S)
    streams = [pool.submit(moved, ids, number.name) for ids in prompts]
    held = cluster.struck()
    ended = [held]
    os.kill(held, number)
    if number == signal.SIGTERM:
        ended.append(cluster.kill("prefill", number))
        assert answer(client, prompts[0], 20, "late") == expected[0][:20]
    got, replayed = zip(*(result_of("a stream to end", stream) for stream in streams), strict=True)
    assert list(got) == expected
    wait_for("their ends", lambda: not any(map(psutil.pid_exists, ended)))
    # Streams of the paused worker moved; those of the other one continued.
    assert any(replayed)


@pytest.mark.parametrize("role", ["decode", "kvnode"])
def test_a_new_request_waits_for_a_restarting_component(cluster: ServedCluster, role: str) -> None:
    with Client(cluster.target) as client:
        expected = answer(client, byte_prompt(6, 90), 10)
        cluster.kill(role)
        assert answer(client, byte_prompt(6, 90), 10) == expected


def answered_by_prefill(client: Client) -> bool:
    """Return whether a new prompt is prefilled by a prefill worker again."""
    answered_by_prefill.calls += 1  # type: ignore[attr-defined]
    salt = f"probe {answered_by_prefill.calls}"  # type: ignore[attr-defined]
    *_, last = client.generate(byte_prompt(9, 100), temperature=0.0, max_tokens=1, cache_salt=salt)
    return last.timings is not None and last.timings.prefilled_tokens > 0


answered_by_prefill.calls = 0  # type: ignore[attr-defined]


def test_flushing_redis_only_loses_cache_hits_for_a_while(cluster: ServedCluster) -> None:
    import redis

    ids = byte_prompt(31, 200)
    path = next(cluster.folder.rglob("*redis*.sock"))
    with Client(cluster.target) as client, redis.Redis(unix_socket_path=str(path)) as server:
        expected = answer(client, ids, 10)
        server.flushall()
        assert answer(client, ids, 10) == expected

        def hit() -> bool:
            *_, last = client.generate(ids, temperature=0.0, max_tokens=1)
            return last.usage is not None and last.usage.cached_tokens > 0

        wait_for("the node to announce its blocks again", hit)
