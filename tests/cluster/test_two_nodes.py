"""Two nodes with real pools, transfers and processes: blocks move, answers stay, and a killed node costs time only."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from lab.testbed.conditions import wait_for
from lab.testbed.defaults import NODE
from lab.testbed.faults.board import FaultBoard, hook_environment
from lab.testbed.faults.points import BY_NAME
from lab.testbed.hosts import Hosts, hosts
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client, Delta
from pillion.host.adapter_folders import ADAPTERS
from tests.support.adapters import adapted_model, make_adapter
from tests.support.oracle import Oracle, first_difference
from tests.support.own_cache import model_cache

TRANSPORTS = ["grpc"] + (["nixl"] if importlib.util.find_spec("nixl") else [])
ENGLISH = (
    "The harbour at night was quiet, and the lamps along the pier burned with a small yellow light. "
    "A ship lay at anchor; its crew had gone ashore, all but the cook, who was counting onions. "
)
PROMPTS = (ENGLISH * 2, "Once upon a time " + ENGLISH * 5, "Der Hafen lag still. " * 30, "Short.")


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        yield pathlib.Path(name)


def read(target: str, prompt: str | list[int], salt: str = "", max_tokens: int = 24) -> tuple[tuple[int, ...], Delta]:
    """Read a greedy answer; return its tokens, and the last delta, which has usage and timings."""
    with Client(target) as client:
        deltas = list(client.generate(prompt, temperature=0.0, max_tokens=max_tokens, cache_salt=salt, ignore_eos=True))
    last = deltas[-1]
    assert last.usage is not None
    assert last.timings is not None
    times = last.timings
    assert times.cached_tokens + times.prefilled_tokens + times.tail_tokens == last.usage.prompt_tokens
    return tuple(one for delta in deltas for one in delta.token_ids), last


def all_idle(cluster: Hosts, *nodes: str) -> None:
    for node_id in nodes:
        wait_for(f"all slots back at {node_id}", lambda name=node_id: cluster.idle(name))


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_moving_blocks_between_nodes_does_not_change_answers(folder: pathlib.Path, transport: str) -> None:
    # A block has half a MiB, as in small models.
    shape = {"hidden_size": 256, "num_hidden_layers": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = str(save_model(folder / "tiny", num_attention_heads=8, **shape))
    # Blocks that a fetch does not bring in time are computed, and here every block is counted.
    flags = ("--kv-transport", transport, "--kv-pool-bytes", "512MiB")
    with hosts(folder, "--model", model, "--dtype", "float32", "--max-model-len", "4096") as cluster:
        cluster.environ.update(hook_environment(folder / "board"))
        cluster.defaults = {NODE: {"fetch_timeout_s": 60.0}}
        cluster.node("kv-a", *flags)
        cluster.node("kv-b", *flags)
        decode = cluster.worker("decode", "kv-b")
        target = cluster.gateway("--chunk-size", "64", "--heartbeat-timeout-ms", "1000")

        cluster.sees(target, decode)
        expected = [read(target, prompt, "alone")[0] for prompt in PROMPTS]
        prefill = cluster.worker("prefill", "kv-a")
        cluster.sees(target, prefill, decode)
        moved = 0
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            got, last = read(target, prompt)
            assert got == tokens
            assert last.timings.replays == 0
            assert last.timings.tail_tokens <= 16, "all whole blocks came over"
            assert last.timings.prefill_worker == (prefill if last.timings.prefilled_tokens else "")
            moved += last.timings.prefilled_tokens // 16
        assert moved > 30
        assert (cluster.node_status("kv-b").fetched_blocks, cluster.node_status("kv-a").served_blocks) == (moved, moved)
        assert cluster.node_status("kv-b").kv_transport == transport
        all_idle(cluster, "kv-a", "kv-b")

        second = cluster.worker("decode", "kv-a")
        cluster.stop(decode)
        cluster.sees(target, prefill, second)
        fetched = 0
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            got, last = read(target, prompt, "alone")
            assert got == tokens
            assert (last.timings.decode_worker, last.timings.prefilled_tokens) == (second, 0)
            assert last.usage.cached_tokens == (last.usage.prompt_tokens - 1) // 16 * 16
            fetched += last.usage.cached_tokens // 16
        assert cluster.node_status("kv-a").fetched_blocks == fetched
        all_idle(cluster, "kv-a", "kv-b")

        decode = cluster.worker("decode", "kv-b")
        cluster.stop(second)
        cluster.sees(target, prefill, decode)
        check_a_node_killed_in_mid_transfer(cluster, target, FaultBoard(folder / "board"))


def check_a_node_killed_in_mid_transfer(cluster: Hosts, target: str, board: FaultBoard) -> None:
    """kv-a dies while the prefill worker's blocks come over to kv-b, which serves on alone."""
    ids = byte_prompt(0, 2000)
    expected, last = read(target, ids)
    assert last.timings.prefilled_tokens == 1984
    board.arm(0, BY_NAME["kvnode, before a fetch"], 2, signal.SIGKILL, cluster.processes["kv-a"].pid)
    got, last = read(target, ids, "killed")
    assert board.fired(0) is not None
    cluster.stop("kv-a", kill=True)
    assert got == expected
    assert 0 < last.timings.prefilled_tokens < 1984, "some of it came over, some did not"
    assert cluster.node_status("kv-b").corrupt_blocks == 0
    all_idle(cluster, "kv-b")
    assert read(target, ids, "after")[0] == expected
    all_idle(cluster, "kv-b")


@pytest.mark.long
@pytest.mark.cluster
def test_second_turns_hit_blocks_handed_over_by_a_drained_node(folder: pathlib.Path) -> None:
    model = str(save_model(folder / "tiny"))
    flags = ("--kv-pool-bytes", "64MiB")
    leaving = ("--hand-over-timeout-s", "60")
    with hosts(folder, "--model", model, "--dtype", "float32", "--max-model-len", "2048") as cluster:
        cluster.defaults = {NODE: {"fetch_timeout_s": 60.0, "hand_over_bytes_per_s": 2**30}}
        cluster.node("kv-a", *flags, *leaving)
        cluster.node("kv-b", *flags)
        first = cluster.worker("decode", "kv-a")
        target = cluster.gateway("--heartbeat-timeout-ms", "1000")
        cluster.sees(target, first)
        firsts = [byte_prompt(seed, 300 + 50 * seed) for seed in range(5)]
        turns = [[*prompt, *read(target, prompt)[0], *byte_prompt(9, 40)] for prompt in firsts]
        second = cluster.worker("decode", "kv-b")
        cluster.sees(target, first, second)
        cluster.stop(first)
        cluster.stop("kv-a")
        cluster.sees(target, second)
        computed = 0
        for prompt, turn in zip(firsts, turns, strict=True):
            got, last = read(target, turn)
            assert last.usage.cached_tokens >= len(prompt) // 16 * 16
            computed += len(turn) - last.usage.cached_tokens
            # Under another salt nothing is cached, so this answer is computed from scratch.
            assert read(target, turn, "anew")[0] == got
        # With the answers, of which the last block may be half full, the turns have 64 tokens that are new.
        assert computed <= 5 * (64 + 16)
        assert cluster.node_status("kv-b").corrupt_blocks == 0
        all_idle(cluster, "kv-b")


@pytest.mark.long
@pytest.mark.cluster
def test_an_adapters_files_come_from_the_other_host(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kv-a and the gateway share a machine, kv-b and its worker another one, whose copies are lost."""
    here, there = (pathlib.Path(model_cache(folder / name)) for name in ("here", "there"))
    monkeypatch.setenv("PILLION_CACHE", str(here))
    model, ids = save_model(folder / "tiny"), [2 + n * 7919 % 256 for n in range(40)]
    names = ("red", "green")
    for seed, name in enumerate(names):
        make_adapter(model, folder / name, seed=seed, r=4)
    lora = ("--enable-lora", "--max-loras", "1")
    with hosts(folder, "--model", str(model), "--dtype", "float32", "--max-model-len", "512") as cluster:
        cluster.caches["kv-b"] = there
        for node_id in ("kv-a", "kv-b"):
            cluster.node(node_id, "--kv-pool-bytes", "16MiB")
        decode = cluster.worker("decode", "kv-b", *lora)
        modules = [word for name in names for word in ("--lora-modules", f"{name}={folder / name}")]
        target = cluster.gateway("--chunk-size", "64", *lora, *modules)
        cluster.sees(target, decode)
        with Client(target) as client:
            digests = {info.name: info.adapter for info in client.models() if info.parent}

            def check(name: str, salt: str) -> None:
                stream = client.generate(
                    ids, model=name, temperature=0.0, max_tokens=8, ignore_eos=True, cache_salt=salt
                )
                found = [token for delta in stream for token in delta.token_ids]
                expected = Oracle(adapted_model(model, folder / name)).greedy(ids, 8)
                assert first_difference(expected, found, 1e-3) == "", name

            check("red", "first")
            wait_for("both adapters on the other machine", lambda: kept(there) == set(digests.values()))
            check("green", "first")
            shutil.rmtree(there / ADAPTERS / digests["red"])
            check("red", "again")
            assert kept(there) == set(digests.values())
            assert "was fetched from another machine" in cluster.logs()
        all_idle(cluster, "kv-a", "kv-b")


def kept(cache: pathlib.Path) -> set[str]:
    return {path.name for path in (cache / ADAPTERS).glob("*") if path.suffix != ".tmp"}
