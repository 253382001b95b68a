"""Planning considers a bounded number of live workers, in rotation."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from pillion.errors import Unavailable
from pillion.gateway.links.cluster import FIRST_LOOK_S, MIN_RETURN_WAIT_S, Cluster
from pillion.gateway.planning.cluster_view import MAX_CANDIDATES
from pillion.wire.registry import ComponentRecord

NODES, WORKERS_EACH = 100, 3
RECORDS = [
    ComponentRecord(component_id=f"kv-{n}", role="kvnode", address="x", node_id=f"kv-{n}", total_blocks=64)
    for n in range(NODES)
] + [
    ComponentRecord(
        component_id=f"{role}-{n}-{m}", role=role, address="x", node_id=f"kv-{n}", model="m", namespace="0f",
        block_size_tokens=16,
    )
    for n in range(NODES) for m in range(WORKERS_EACH) for role in ("prefill", "decode")
]  # fmt: skip


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster("g", SimpleNamespace(refusal=""), None, 5.0)  # type: ignore[arg-type]
    made.view.update(RECORDS, 100.0)
    monkeypatch.setattr(made, "answers", lambda component: component.component_id not in made.view.fenced)
    return made


def ids(found: tuple[ComponentRecord, ...], role: str) -> list[str]:
    return [record.component_id for record in found if record.role == role]


def test_candidates_are_bounded_and_include_workers_near_the_prefix(cluster: Cluster) -> None:
    served = cluster.served("m", "")
    found = cluster.candidates(served, 100, {"kv-7": 5, "kv-70": 50}, 3)
    assert len(found) == len({record.component_id for record in found})
    for role in ("decode", "prefill"):
        assert len(ids(found, role)) == MAX_CANDIDATES
    assert ids(found, "decode")[:6] == [f"decode-{n}-{m}" for n in (70, 7) for m in range(WORKERS_EACH)]
    nodes = {f"kv-{name.split('-')[1]}" for name in ids(found, "decode")}
    assert nodes <= set(ids(found, "kvnode"))
    assert {f"prefill-{n}-{m}" for n in (70, 7) for m in range(WORKERS_EACH)} <= set(ids(found, "prefill"))


def test_every_worker_has_a_turn(cluster: Cluster) -> None:
    served, seen = cluster.served("m", ""), set()
    for number in range(NODES * WORKERS_EACH):
        seen.update(ids(cluster.candidates(served, 100, {}, number), "decode")[:1])
    assert len(seen) == NODES * WORKERS_EACH


def test_a_few_live_workers_are_found_at_any_rotation(cluster: Cluster) -> None:
    fenced = tuple(
        record.component_id for record in RECORDS if record.role != "kvnode" and record.node_id not in ("kv-5", "kv-95")
    )
    cluster.view.update([replace(RECORDS[0], fenced_components=fenced), *RECORDS[1:]], 101.0)
    served = cluster.served("m", "")
    for number in (0, 1, 77):
        live = ids(cluster.candidates(served, 100, {"kv-1": 9}, number), "decode")
        assert sorted(live) == [f"decode-{n}-{m}" for n in (5, 95) for m in range(WORKERS_EACH)]
    with pytest.raises(Unavailable, match="whose pool holds 1025 tokens"):
        cluster.candidates(served, 64 * 16 + 1)
    assert not cluster.lacks_node(served)


OURS = "ab" * 32


def with_adapters(cluster: Cluster, ranks: dict[str, int], **more: dict[str, object]) -> None:
    """Set workers' max adapter rank."""
    runs = [
        replace(one, **({"max_loras": 2, "max_lora_rank": ranks[one.component_id]} | more.get(one.component_id, {})))
        if one.component_id in ranks
        else one
        for one in RECORDS
    ]
    cluster.view.update(runs, 101.0)


def test_workers_that_support_the_adapter_rank_are_always_found(cluster: Cluster) -> None:
    with_adapters(cluster, {"decode-5-0": 16, "decode-95-1": 16, "decode-50-1": 8, "prefill-7-2": 8, "prefill-8-2": 64})
    served = cluster.served("m", "", 16)
    for number in range(9):
        found = cluster.candidates(served, 100, {"kv-1": 9}, number, OURS)
        assert sorted(ids(found, "decode")) == ["decode-5-0", "decode-95-1"]
        assert ids(found, "prefill") == ["prefill-8-2"]
    assert len(ids(cluster.candidates(cluster.served("m", ""), 100), "decode")) == MAX_CANDIDATES
    with pytest.raises(Unavailable, match="adapters of rank 32 "):
        cluster.served("m", "", 32)


def test_workers_with_the_adapter_loaded_are_always_candidates(cluster: Cluster) -> None:
    names = [record.component_id for record in RECORDS if record.role == "decode"]
    loaded = {name: {"adapters": (OURS,)} for name in ("decode-33-0", "decode-66-1")}
    with_adapters(cluster, dict.fromkeys(names, 16), **loaded)
    cluster.routes.sent_adapters.note(OURS, {"decode-77-1"}, time.monotonic())
    served = cluster.served("m", "", 16)
    for number in range(9):
        found = ids(cluster.candidates(served, 100, {"kv-1": 9}, number, OURS), "decode")
        assert {"decode-33-0", "decode-66-1", "decode-77-1"} < set(found)
        assert len(found) == MAX_CANDIDATES


def test_a_lost_adapter_worker_is_waited_for(cluster: Cluster) -> None:
    """Workers without adapters do not count, nor those of too small a rank."""
    with_adapters(cluster, {"decode-5-0": 16})
    cluster._record_starts(time.monotonic())
    cluster.view.update(RECORDS, 102.0)
    cluster._record_starts(time.monotonic())
    assert cluster._wait_limit_s(("m", "", 16)) == MIN_RETURN_WAIT_S
    assert cluster._wait_limit_s(("m", "", 17)) == FIRST_LOOK_S
    assert cluster._wait_limit_s(("m", "", 0)) == MIN_RETURN_WAIT_S


@pytest.mark.parametrize(("start_s", "wait_s"), [(2.0, 55.0), (60.0, 345.0), (900.0, 600.0)])
def test_the_wait_for_a_lost_model_depends_on_its_start_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, start_s: float, wait_s: float
) -> None:
    """Large models take minutes to return; the loss of a small one is reported soon. The slowest worker counts."""
    now_s = 1000.0
    monkeypatch.setattr("pillion.gateway.links.cluster.time", SimpleNamespace(monotonic=lambda: now_s))
    slow = [replace(one, start_s=start_s) if one.component_id == "decode-5-0" else one for one in RECORDS]
    cluster.view.update(slow, 101.0)
    cluster._record_starts(now_s)
    assert cluster.return_wait_s("m") == wait_s
    now_s += wait_s - 0.1
    assert cluster._wait_limit_s(("m", "", 0)) == wait_s
    now_s += 0.2
    assert cluster._wait_limit_s(("m", "", 0)) == FIRST_LOOK_S
    assert cluster.return_wait_s("another") == MIN_RETURN_WAIT_S
    # A faster restart (files in the page cache) shortens the next wait.
    cluster.view.update(RECORDS, 102.0)
    cluster._record_starts(now_s)
    assert cluster.return_wait_s("m") == MIN_RETURN_WAIT_S


def test_moved_and_removed_workers_leave_nothing_behind(cluster: Cluster) -> None:
    view = cluster.view
    moved = replace(RECORDS[-1], node_id="kv-0", model="other")
    view.update([*RECORDS[:-1], moved], 101.0)
    assert moved in view.on_node("kv-0")
    assert moved not in view.on_node("kv-99")
    assert view.of("decode", "other") == [moved]
    assert len(view.of("decode", "m")) == NODES * WORKERS_EACH - 1
    view.update([], 101.0)
    view.update([], 200.0)
    assert not [*view.records(), *view.models(), *view.on_node("kv-0"), *view.of("kvnode")]
