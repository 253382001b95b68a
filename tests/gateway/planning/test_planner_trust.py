"""The planner handles absurd records, implausibly fast workers, and gateways that it cannot see."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from pillion.gateway.planning.planner import make_plan
from pillion.wire.registry import ComponentRecord
from tests.support.planner_components import COST, decode, node, prefill, snapshot


def test_several_gateways_do_not_herd() -> None:
    """Four gateways, blind to each other until the next heartbeat: no worker gets much more than its share."""
    components = (node(0), *(decode(n, queued_tokens=0 if n == 0 else 600) for n in range(4)), *map(prefill, range(4)))
    got: Counter[str] = Counter()
    for gateway in range(4):
        streams: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for number in range(16):
            spread = 17 * gateway + number
            decided = make_plan(snapshot(600, components, sent_load=streams, sent_tokens=tokens, spread=spread))
            streams[decided.decode.component_id] += 1
            tokens[decided.decode.component_id] += decided.prompt_tokens - decided.split_tokens
            if decided.prefill is not None and decided.chunks:
                tokens[decided.prefill.component_id] += sum(decided.chunks)
        got += streams
    assert got.total() == 64
    assert max(got.values()) <= 32


def test_a_step_model_round_trips_through_the_registry_or_is_ignored() -> None:
    record = decode(streams=3, queued_tokens=7, heartbeat_age_ms=4)
    assert ComponentRecord.from_json(record.to_json()) == record
    for broken in ("[1, 2]", "[1, 2, 3, 4, -5]", "[0, 0, 0, 0, 0]", '"abcde"', "[1, 2, 3, 4, NaN]", "null"):
        text = record.to_json().replace("[0.005,0.001,0.0002,1e-7,2e-7]", broken)
        assert text != record.to_json()
        assert ComponentRecord.from_json(text) == replace(record, step_cost_s=())
    for broken in ("-5", "NaN", "1e999", "1" + 400 * "0", '"7"', "null", "[7]", "true"):
        text = record.to_json().replace('"queued_tokens":7', f'"queued_tokens":{broken}')
        assert ComponentRecord.from_json(text) == replace(record, queued_tokens=0)
        costs = record.to_json().replace("[0.005,", f"[{broken},")
        assert ComponentRecord.from_json(costs) == replace(record, step_cost_s=())
        target = record.to_json().replace('"target_itl_ms":60.0', f'"target_itl_ms":{broken}')
        assert ComponentRecord.from_json(target) == replace(record, target_itl_ms=0.0)


def test_an_implausibly_fast_worker_does_not_attract_everything() -> None:
    for absurd in ((1e-15, 0.0, 0.0, 0.0, 0.0), (0.0, 1e-30, 0.0, 0.0, 0.0), (1e-3, 0.0, 0.0, 0.0, 1e-12)):
        components = (node(0), *(decode(n, step_cost_s=absurd if n == 0 else COST) for n in range(3)),
                 *(prefill(n, step_cost_s=absurd if n == 0 else COST) for n in range(3)))  # fmt: skip
        streams: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for number in range(60):
            decided = make_plan(snapshot(2000, components, sent_load=streams, sent_tokens=tokens, spread=number))
            streams[decided.decode.component_id] += 1
            tokens[decided.decode.component_id] += decided.prompt_tokens - decided.split_tokens
            if decided.prefill is not None and decided.chunks:
                tokens[decided.prefill.component_id] += sum(decided.chunks)
        assert max(streams.values()) < 2 * min(streams[f"decode-{n}"] for n in range(3))
        assert tokens["prefill-0"] < 2 * tokens["prefill-1"]
