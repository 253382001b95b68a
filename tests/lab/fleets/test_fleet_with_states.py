"""A simulated fleet whose model has states: what prompts find, on one node and from another one, and what there is room
for."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.benchmarks.traces import write_trace
from lab.fleets.__main__ import main
from lab.fleets.prefix_store import SimTicket, SlotsOfState
from lab.fleets.state_store import StateIndex, StateStore
from lab.fleets.traffic import Request
from lab.fleets.world import FleetConfig, FleetWorld, simulate
from pillion.config import KVNodeFlags, ServeFlags
from pillion.errors import ConfigError
from pillion.loadgen.traces import TraceRequest

COST = (5e-3, 4e-5, 5e-5, 2e-8, 1e-9)
BLOCK_TOKENS, BLOCK_BYTES = 64, 2**20


def fleet(prefills: int, decodes: int, *, pages: int = 2, blocks: int = 2000, **other: object) -> FleetConfig:
    flags = ServeFlags(prefill_workers=prefills, decode_workers=decodes, block_size=BLOCK_TOKENS)
    values: dict[str, object] = {"node_blocks": blocks, "state_bytes": pages * BLOCK_BYTES, **other}
    return FleetConfig(
        flags=flags,
        prefill_cost_s=COST,
        decode_cost_s=COST,
        known_costs=True,
        macro_steps=True,
        block_bytes=BLOCK_BYTES,
        **values,  # type: ignore[arg-type]
    )


def cached(config: FleetConfig, prompts: Sequence[Sequence[int]]) -> list[int]:
    """How many whole blocks of each prompt were found; the prompts come a minute apart."""
    requests = [Request(n, 60.0 * n, 512 * len(one) + 9, 70, tuple(one)) for n, one in enumerate(prompts)]
    records, world = simulate(config, requests)
    world.check_integrity()
    assert not any(one.failed for one in records)
    return [one.cached_tokens // 512 for one in records]


def stop_the_first_worker(world: FleetWorld) -> None:
    """Lets a world run until one decode worker has answered the first request, and takes that worker off the list."""
    world.clock.run(30.0)
    [first] = [one for one in world.workers("decode") if one.steps]
    del world._listed[first.record.component_id]
    world._list()


@pytest.mark.parametrize("policy", ["colocated", "disaggregated"])
def test_a_prompt_goes_on_from_a_state_alone(policy: str) -> None:
    """A state stands after the first prompt, and where the second one parts from it when that has come by."""
    config = fleet(1, 1)
    config = dataclasses.replace(config, flags=dataclasses.replace(config.flags, split_policy=policy))
    assert cached(config, [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 7], [1, 8]]) == [0, 4, 0, 2, 0]


def test_a_node_fetches_the_state_behind_the_blocks() -> None:
    """The first node's worker takes no more, so the next turn runs on the second one, whose node has nothing."""
    world = FleetWorld(fleet(0, 2, bytes_per_s=2.0**30))
    blocks = tuple(range(6))
    world.send([Request(0, 0.0, 512 * 4 + 9, 4, blocks[:4]), Request(1, 60.0, 512 * 6 + 9, 4, blocks)])
    stop_the_first_worker(world)
    world.clock.run(120.0)
    world.check_integrity()
    assert [one.cached_tokens for one in world.records()] == [0, 2048]
    [second] = world.workers("decode")
    # Its own states stand at the prompt's end; the answer has no whole block.
    assert world.site.stores[second.record.node_id].states.kept == 2


def test_where_texts_part_is_known_to_all_nodes() -> None:
    """The first node alone has the first text; the second one's first text leaves a state where it parts from that."""
    world = FleetWorld(fleet(0, 2))
    texts = [(1, 2, 3), (1, 2, 4), (1, 2, 5)]
    world.send([Request(number, 60.0 * number, 512 * 3 + 9, 4, text) for number, text in enumerate(texts)])
    stop_the_first_worker(world)
    world.clock.run(200.0)
    world.check_integrity()
    assert [one.cached_tokens for one in world.records()] == [0, 0, 1024]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12), st.integers(0, 3), st.data()
)
@settings(max_examples=40, deadline=None)
def test_hits_are_those_of_a_search_through_all_states(texts: list[list[int]], pages: int, data: st.DataObject) -> None:
    """One after the other in an ample pool: the longest prefix that was kept; and the index says the same."""
    index = StateIndex()
    store = StateStore("kv", index, 4000, 256, pages, KVNodeFlags(state_percent=100))
    numbers: dict[tuple[int, ...], int] = {}
    kept: set[int] = set()
    shared: set[int] = set()
    for text in texts:
        chain = tuple(numbers.setdefault(tuple(text[: at + 1]), len(numbers)) for at in range(len(text)))
        good = kept if pages else shared
        expected = max((at + 1 for at, number in enumerate(chain) if number in good), default=0)
        assert store.prefix(chain) == index.longest_prefix(chain).get("kv", 0) == expected
        ticket = SimTicket(chain, 2 * len(chain) + 6 + 3 * pages, lambda one: None)
        store.open(ticket)
        assert not ticket.waiting
        assert ticket.pinned == expected
        known = max((at + 1 for at, number in enumerate(chain) if number in shared), default=0) if pages else 0
        assert ticket.known == index.known_blocks(chain) == known
        place = data.draw(st.integers(expected, len(chain)))
        store.commit(ticket, len(chain))
        if place > expected and pages:
            store.keep(ticket, place, SlotsOfState.RUNNING)
            kept.add(chain[place - 1])
        shared.update(chain)
        store.finish(ticket, 512 * len(chain) + 300)
        store.close(ticket)
        store.check_integrity()


def test_a_prefill_ranges_states_are_let_go_with_its_end() -> None:
    """Of its three one is kept; those of the stream that goes on stay reserved."""
    pages = 5
    store = StateStore("kv", StateIndex(), 4000, 256, pages, KVNodeFlags())
    ticket = SimTicket((1, 2, 3), 2 * 3 + 2 + 2 * 3 * pages, lambda one: None, sequences=2)
    store.open(ticket)
    reserved = store.used
    store.commit(ticket, 3)
    store.keep(ticket, 3, SlotsOfState.ENDED)
    assert reserved - store.used == 2 * pages
    store.finish(ticket, 512 * 3 + 300)
    store.close(ticket)
    store.check_integrity()
    assert store.used == 2 * 3 + 1 + 2 * pages


def test_a_state_that_comes_back_in_the_moment_it_leaves_stays_in_the_index() -> None:
    index = StateIndex()
    store = StateStore("kv", index, 2 * 2 + 2 * 2, 256, 2, KVNodeFlags())
    for _ in range(4):
        ticket = SimTicket((1, 2), 2 * 2 + 2, lambda one: None)
        store.open(ticket)
        store.commit(ticket, 2)
        store.keep(ticket, 1, SlotsOfState.RUNNING)
        store.keep(ticket, 2, SlotsOfState.ENDED)
        store.close(ticket)
        store.check_integrity()


def test_states_take_room_and_running_ones_do() -> None:
    """Two texts with their states fit; the third one takes the place of one, and no fourth one could run at all."""
    config = fleet(0, 1, pages=40, blocks=8 * 3 * 3 + 3 * 40 + 40)
    assert cached(config, [[1, 2, 3], [1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [1, 2, 3]]) == [0, 3, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match="kv-pool-bytes: a text of 3000 tokens needs 167 blocks"):
        FleetWorld(fleet(0, 1, pages=40, blocks=160)).send([Request(0, 0.0, 2900, 100)])


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="--flag kv-pool-bytes"):
        FleetWorld(fleet(0, 1, blocks=0))
    with pytest.raises(ConfigError, match="hands over of states is not simulated"):
        FleetWorld(fleet(0, 2, scale_down=((1.0, 1),)))


def test_the_command_counts_states(tmp_path: pathlib.Path) -> None:
    """Two turns of a chat: two states at the ends of prompts, and none after answers shorter than a block."""
    trace, found = tmp_path / "trace.jsonl", tmp_path / "found.json"
    write_trace(
        trace, [TraceRequest(60_000 * turn, 1030 + 512 * turn, 8, (1, 2, 3 + turn, 4 + turn)) for turn in (0, 1)]
    )
    words = (f"--trace={trace}", "--step-cost=5e-3,4e-5,5e-5,2e-8,1e-9", f"--json={found}")
    states = ("--block-bytes=1000", "--state-bytes=2500", "--flag=block-size=64", "--flag=kv-pool-bytes=1MB")
    with pytest.raises(SystemExit) as ended:
        main([*words, *states])
    assert ended.value.code == 0
    [one] = json.loads(found.read_text())["fleets"]
    assert (one["states_kept"], one["states_evicted"], one["state_bytes"]) == (2, 0, 6000)
    assert one["hit_share"] == 1024 / (1030 + 1542)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--flag=state-percent=10"])
    assert ended.value.code == 2
