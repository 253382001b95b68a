"""The view of the cluster: registry records, corrected by broken connections."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pillion._version import PROTOCOL
from pillion.errors import InvalidRequest
from pillion.gateway.admission.admission import Admission
from pillion.gateway.links.load_exchange import OwnLoad
from pillion.gateway.planning.cluster_view import SUSPECT_S, ClusterView
from pillion.gateway.request.validation import check_pool
from pillion.wire.registry import FOREIGN, ComponentRecord

A, B = (ComponentRecord(component_id=name, role="prefill", address="x") for name in "ab")


def ids(records: tuple[ComponentRecord, ...]) -> str:
    return "".join(record.component_id for record in records)


def test_a_vanished_part_stays_for_a_while() -> None:
    view = ClusterView(grace_s=5)
    view.update([A, B], 100)
    view.update([B], 105)
    assert ids(view.records()) == "ab"
    view.update([B], 105.1)
    assert ids(view.records()) == "b"
    view.update([], 106)
    assert ids(view.records()) == "b"


def test_an_unregistered_component_that_refuses_is_dropped_at_once() -> None:
    view = ClusterView(grace_s=5)
    view.update([A, B], 100)
    view.note_refusal("a")
    assert ids(view.records()) == "ab", "the registry lists it"
    view.update([B], 101)
    view.note_refusal("a")
    assert ids(view.records()) == "b"
    view.update([A, B], 102)
    assert ids(view.records()) == "ab"


def test_times_without_heartbeats_are_remembered() -> None:
    view = ClusterView(grace_s=5)
    silent = replace(A, heartbeat_age_ms=900)
    for now in (100.0, 101.0, 102.0, 103.0):
        # The registry returns the same record until the next heartbeat.
        view.update([silent], now)
        assert view.last_stall("a", now) == (None if now < 102 else (pytest.approx(99.1), now))
    view.update([replace(A, heartbeat_age_ms=100)], 103.5)
    assert view.last_stall("a", 104.5) == (pytest.approx(99.1), pytest.approx(103.4))
    assert view.last_stall("b", 104.5) is None


def test_the_last_view_is_used_without_a_registry_answer() -> None:
    view = ClusterView(grace_s=5)
    view.update([A], 100)
    assert ids(view.records()) == "a"
    assert view.aged(103)[0].heartbeat_age_ms == 3000


def test_held_records_stay_and_age() -> None:
    view = ClusterView(grace_s=5)
    view.update([A, B], 100)
    for now in range(101, 131):
        view.keep(["a"], now)
        view.update([], now)
    assert [(one.component_id, one.heartbeat_age_ms) for one in view.aged(130)] == [("a", 30_000)]
    view.update([], 136)
    assert not view.records()


def test_the_load_and_fences_of_an_old_record_are_ignored() -> None:
    view = ClusterView(grace_s=5)
    busy = replace(A, running_requests=3, free_seqs=5, queued_tokens=900, heartbeat_age_ms=5001)
    node = replace(B, role="kvnode", fenced_components=("a",), heartbeat_age_ms=5001)
    gateway = replace(A, component_id="g", role="gateway", running_requests=7, heartbeat_age_ms=5001)
    assert view.update([busy, node, gateway], 100) == frozenset()
    found = {record.component_id: record for record in view.records()}
    assert (found["a"].running_requests, found["a"].free_seqs, found["a"].queued_tokens) == (0, 8, 0)
    assert found["g"] == gateway, "its share of the workers is as large as it was"
    assert view.update([replace(node, heartbeat_age_ms=1)], 100) == {"a"}


def test_suspects_are_left_out_for_a_moment() -> None:
    view = ClusterView(grace_s=5)
    view.update([A, B], 100)
    view.suspect("a", 100)
    for now, trusted in ((100, ""), (100 + SUSPECT_S - 0.01, ""), (100 + SUSPECT_S, "a")):
        assert [name for name in "ab" if view.trusts(name, now)] == [*trusted, "b"]


def test_only_components_of_adjacent_protocols_are_used(caplog: pytest.LogCaptureFixture) -> None:
    """Logged once per component, not per heartbeat."""
    view = ClusterView(grace_s=5)
    for now in (100, 101):
        view.update([replace(A, component_id=str(n), protocol=PROTOCOL + n) for n in (-2, -1, 0, 1, 2)], now)
    assert ids(view.records()) == "-101"
    assert caplog.messages == [f"{n} is not used: it speaks protocol {PROTOCOL + n}, not {PROTOCOL}" for n in (-2, 2)]


def test_versions_are_counted_and_incompatible_components_listed() -> None:
    view = ClusterView(grace_s=5)
    new, old = replace(A, component_id="new", version="9.9"), replace(A, component_id="old", protocol=PROTOCOL - 1)
    far = replace(A, component_id="far", protocol=PROTOCOL - 2, version="0.0")
    for now in (100, 101):
        view.update([new, old, far], now)
        assert view.versions() == {
            ("9.9", PROTOCOL, True): 1,
            ("", PROTOCOL - 1, True): 1,
            ("0.0", PROTOCOL - 2, False): 1,
        }
        (shown,) = view.foreign()
        assert (shown.component_id, shown.role) == ("far", FOREIGN)
        assert shown.trouble == f"it is not used: it speaks protocol {PROTOCOL - 2}, not {PROTOCOL}"
    # A replaced component keeps its id: one that is unused leaves the view, and may return.
    view.update([replace(new, protocol=PROTOCOL + 2), replace(far, protocol=PROTOCOL)], 102)
    assert ids(view.records()) == "farold"
    assert [one.component_id for one in view.foreign()] == ["new"]
    view.update([], 103)
    assert view.foreign() == ()


def test_own_load_returns_to_zero() -> None:
    load = OwnLoad()
    load.add("a", 5)
    load.add("a", 2)
    load.add("a", -7)
    assert not load.by_component


def test_one_prompt_is_always_admitted() -> None:
    admission = Admission(max_requests=2, max_tokens=10)
    permit = admission.enter()
    admission.weigh(permit, 50)
    admission.leave(permit)
    assert (admission.requests, admission.tokens) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "pool", "outcome"),
    [(30, None, 100), (30, 100, 100), (30, 120, 100), (30, 50, 50), (49, 50, 50), (50, 50, "text"), (90, 99, 99)],
)
def test_max_tokens_and_prompts_are_limited_by_the_pool(prompt: int, pool: int | None, outcome: int | str) -> None:
    if isinstance(outcome, int):
        assert check_pool(prompt, "text", 100, pool) == outcome
        return
    with pytest.raises(InvalidRequest) as caught:
        check_pool(prompt, "text", 100, pool)
    assert [violation.field for violation in caught.value.violations] == [outcome]
