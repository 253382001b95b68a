"""The auto policy with workers that lend each other cores, and its predictions in plain steps."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.planning.cluster_snapshot import parse_policy
from pillion.gateway.planning.plan_cost import DecodeSide
from pillion.gateway.planning.planner import make_plan
from pillion.gateway.planning.split_decision import Fetched
from pillion.wire.registry import ComponentRecord
from tests.support.examples import examples
from tests.support.planner_components import COST, decode, is_shared, node, prefill, snapshot

HALF = {"core_lending_table": "table-1", "core_share": 0.5}
AUTO = {"target_itl_ms": 0.0, "target_itl_steps": 2.5}


def on_shared_cores(*, prefill_ranges: int = 0, streams: int = 0, **fields: float) -> tuple[ComponentRecord, ...]:
    """Return a host with a prefill worker that has ``prefill_ranges`` tokens queued, and a decode worker; each owns
    half the cores."""
    return (node(0), prefill(queued_tokens=prefill_ranges, **HALF), decode(streams=streams, **(AUTO | HALF | fields)))


def test_queued_prompts_do_not_take_cores_from_running_ones() -> None:
    """An idle prefill worker with its own cores helps a queued decode worker; with shared cores it does not."""
    queue = {"queued_tokens": 6 * 1024, "running_requests": 8}
    crowd, apart = on_shared_cores(streams=2, **queue), (node(0), prefill(), decode(streams=2, **(AUTO | queue)))
    for prompt in (256, 1024, 2000):
        assert not is_shared(make_plan(snapshot(prompt, crowd)))
        assert is_shared(make_plan(snapshot(prompt, apart)))
        assert is_shared(make_plan(snapshot(prompt, crowd, policy=parse_policy("disaggregated"))))
        strangers = (node(0), prefill(core_lending_table="other", core_share=0.5), crowd[-1])
        assert is_shared(make_plan(snapshot(prompt, strangers)))


def test_a_disturbed_step_model_on_shared_cores_does_not_change_the_plan() -> None:
    """Both workers are equally fast with equal cores, whichever was disturbed while learning."""
    _, prefill_ranges, streams = on_shared_cores(streams=2, queued_tokens=3000, running_requests=5)
    for slow in (1.0, 3.0, 9.0):
        disturbed = replace(streams, step_cost_s=tuple(weight * slow for weight in COST))
        assert not is_shared(make_plan(snapshot(1024, (node(0), prefill_ranges, disturbed))))


@pytest.mark.parametrize("share", [1e-9, 0.5, 1.0, 1e18])
def test_implausible_core_sharing_records_are_no_error(share: float) -> None:
    free = (0.0, 0.0, 0.0, 1e-7, 0.0)
    lending_table = {"core_lending_table": "table-1", "core_share": share, "step_cost_s": free}
    parts = (
        node(0),
        prefill(**lending_table),
        decode(streams=3, context_tokens=0, queued_tokens=10, **(AUTO | lending_table)),
    )
    assert make_plan(snapshot(1000, parts)).decode.component_id == "decode-0"


def test_a_fetch_is_compared_with_computing_on_the_lent_cores() -> None:
    """With an idle prefill worker's cores it computes blocks faster than they arrive."""
    other = replace(node(1), node_id="kv-1")
    own_s = StepModel._make(COST).range_s(0, 960, 256)
    for block_s, fetched in ((own_s / 60 / 3, True), (own_s / 60 / 1.5, False)):
        parts = (*on_shared_cores(running_requests=1), other)
        decided = make_plan(snapshot(1000, parts, hits={"kv-1": 60}, fetch_block_s=block_s))
        assert decided.split_decision is not None
        assert (decided.split_decision.route.fetched is Fetched.OF_NODES) == fetched


LOADS = st.fixed_dictionaries(
    {"prefill_ranges": st.integers(0, 20_000), "streams": st.integers(0, 30), "queued_tokens": st.integers(0, 10_000)}
)


def price_s(prompt: int, load: dict[str, int]) -> float:
    return make_plan(snapshot(prompt, on_shared_cores(**load))).split_decision.route.price_s


@given(
    prompt=st.integers(17, 5000),
    load=LOADS,
    kind=st.sampled_from(["prefill_ranges", "streams", "queued_tokens"]),
    more=st.integers(0, 20_000),
)
@example(2835, {"prefill_ranges": 3454, "streams": 0, "queued_tokens": 1575}, "queued_tokens", 1200)
@settings(max_examples=examples(400))
def test_more_load_never_attracts_requests(prompt: int, load: dict[str, int], kind: str, more: int) -> None:
    loaded = load | {kind: load[kind] + (more % 60 if kind == "streams" else more)}
    assert price_s(prompt, loaded) >= price_s(prompt, load) * (1 - 1e-9)


def predicted(streams: int, waiting: int, queue: int = 0) -> DecodeSide:
    record = decode(streams=streams, queued_tokens=queue, **AUTO)
    crowded = replace(record, running_requests=streams + waiting)
    sent = {"sent_load": {"decode-0": streams + waiting}, "sent_tokens": {"decode-0": queue}}
    return make_plan(snapshot(1000, (node(0), crowded), **sent)).split_decision.route.decode


@given(
    streams=st.integers(0, 30),
    waiting=st.integers(0, 20),
    tokens=st.integers(1, 2000),
    further=st.integers(0, 10),
)
@settings(max_examples=examples(200))
def test_more_prompts_never_make_the_wait_shorter(streams: int, waiting: int, tokens: int, further: int) -> None:
    def until(prompts: int) -> float:
        side = predicted(streams, prompts, prompts * tokens)
        return side.queue.wait_s + side.tail_s(0)[0]

    assert until(waiting + further) >= until(waiting) * (1 - 1e-9)
