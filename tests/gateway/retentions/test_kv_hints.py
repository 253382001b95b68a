"""Hints about KV in vLLM's envelope: what they ask for, and what is refused by its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import InvalidRequest
from pillion.gateway.retentions.kv_hints import MAX_ACTIONS, MAX_HINT_S, read_hints
from tests.support.examples import examples


def action(kind: str = "kv.retain", version: str = "0.1", **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


@pytest.mark.parametrize(
    ("actions", "hint"),
    [
        ([], None),
        ([action("kv.fetch", "9.0", keys=[1])], None),
        ([action(ttl_seconds=2.5, priority=3, block_hashes=["1"])], 2.5),
        ([action()], MAX_HINT_S),
        ([action("kv.evict", "1.0")], 0.0),
        ([action("kv.evict"), action(ttl_seconds=7)], 7.0),
        ([action(directives=[{"start": 0, "end": 9, "duration": 3, "priority": 1}, {"duration": 60.0}])], 60.0),
        ([action(directives=[{"start": 0, "priority": 1}])], MAX_HINT_S),
    ],
)
def test_what_hints_ask_for(actions: list[Any], hint: float | None) -> None:
    assert read_hints(json.dumps(envelope(*actions))) == hint


@pytest.mark.parametrize(
    ("hints", "field"),
    [
        ([], "kv_hints"),
        ("{", "kv_hints"),
        ("[" * 50_000, "kv_hints"),
        (" " * 65_537, "kv_hints"),
        ({"message_id": "m", "actions": []}, "kv_hints.protocol_version"),
        ({"protocol_version": "0.1", "message_id": 5, "actions": []}, "kv_hints.message_id"),
        ({"protocol_version": "0.1", "message_id": "x" * 513, "actions": []}, "kv_hints.message_id"),
        ({"protocol_version": "0.1", "message_id": "m"}, "kv_hints.actions"),
        (envelope(*[action()] * (MAX_ACTIONS + 1)), "kv_hints.actions"),
        (envelope("x"), "kv_hints.actions[0]"),
        (envelope({"action_id": "a"}), "kv_hints.actions[0].action_type"),
        (envelope(action() | {"payload": []}), "kv_hints.actions[0].payload"),
        (envelope(action(version="2.0")), "kv_hints.actions[0].action_version"),
        *[
            (envelope(action(), action(ttl_seconds=bad)), "kv_hints.actions[1].payload.ttl_seconds")
            for bad in (0, -1, True, "5", float("nan"), float("inf"), 10**400, MAX_HINT_S + 1)
        ],
        (envelope(action(directives={})), "kv_hints.actions[0].payload.directives"),
        (envelope(action(directives=[])), "kv_hints.actions[0].payload.directives"),
        (envelope(action(directives=[5])), "kv_hints.actions[0].payload.directives[0]"),
        (envelope(action(directives=[{"duration": -1}])), "kv_hints.actions[0].payload.directives[0].duration"),
    ],
)
def test_hints_that_make_no_sense_are_refused_by_their_field(hints: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_hints(hints if isinstance(hints, str) else json.dumps(hints))
    assert [violation.field for violation in caught.value.violations] == [field]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["protocol_version", "message_id", "actions", "payload", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(100))
@given(hints=VALUES, payload=VALUES)
def test_any_value_is_read_or_refused(hints: Any, payload: Any) -> None:
    for value in (hints, envelope(action() | {"payload": payload}), envelope(action(directives=[payload]))):
        try:
            hint = read_hints(json.dumps(value))
        except InvalidRequest:
            continue
        assert hint is None or 0 <= hint <= MAX_HINT_S
