"""A simulated fleet under a trace's load: runs of steps as one event, hits and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from lab.benchmarks.traces import generate
from lab.fleets.prefix_store import SimTicket
from lab.fleets.traffic import ClientRecord, Request, requests_of
from lab.fleets.world import FleetConfig, FleetWorld, simulate
from pillion.config import ServeFlags
from pillion.errors import ConfigError

# Seconds per step, token, sequence, KV token read and query-key pair of some GPU.
COST = (5e-3, 4e-5, 5e-5, 2e-8, 1e-9)


def fleet(prefills: int, decodes: int, gateways: int = 1, **other: object) -> FleetConfig:
    flags = ServeFlags(prefill_workers=prefills, decode_workers=decodes, gateway_workers=gateways)
    values: dict[str, object] = {"known_costs": True, "macro_steps": True, "block_bytes": 2**20, **other}
    return FleetConfig(flags=flags, prefill_cost_s=COST, decode_cost_s=COST, **values)  # type: ignore[arg-type]


def trace(count: int, speed: float) -> list[Request]:
    return requests_of(generate(5, count), speed=speed, max_model_len=30_000)


def whole(records: Sequence[ClientRecord]) -> bool:
    return all(len(one.gaps_s) == one.request.answer_tokens - 1 and not one.failed for one in records)


def test_macro_steps_give_identical_results() -> None:
    """Equal times per client and token with one event per step."""
    requests, worlds = trace(40, 60.0), []
    for macro_steps in (True, False):
        config = fleet(2, 2, 2, macro_steps=macro_steps, node_blocks=6000)
        records, world = simulate(config, requests)
        world.check_integrity()
        assert whole(records)
        assert any(one.cached_tokens for one in records)
        worlds.append((records, sum(worker.steps for worker in world.site.workers.values())))
    assert worlds[0] == worlds[1]


def test_default_budgets() -> None:
    """A CPU's; with a GPU those for the cost: 0.3 s for 40 us a token, and 1 ns a pair."""

    def budgets(**flags: object) -> tuple[int, int]:
        config = fleet(1, 1)
        settled = dataclasses.replace(config, flags=dataclasses.replace(config.flags, **flags)).settled().flags  # type: ignore[arg-type]
        return settled.max_num_batched_tokens, settled.max_num_batched_prefill_tokens

    assert budgets() == (256, 512)
    assert budgets(device="cuda") == (4096, 4096)
    assert budgets(device="cuda", target_itl_ms=0.0) == (512, 4096)
    assert budgets(device="cuda", target_itl_ms=1000.0) == (8192, 4096)
    assert budgets(device="cuda", max_num_batched_tokens=300) == (300, 4096)
    config = fleet(1, 1)
    world = FleetWorld(dataclasses.replace(config, flags=dataclasses.replace(config.flags, device="cuda")))
    assert {worker.record.max_step_tokens for worker in world.site.workers.values()} == {4096}


def test_a_prompt_hits_the_blocks_of_another_one() -> None:
    blocks = tuple(range(8))
    requests = [Request(0, 0.0, 4100, 4, blocks), Request(1, 60.0, 4200, 4, blocks), Request(2, 120.0, 4100, 4)]
    records, world = simulate(fleet(1, 2), requests)
    assert [one.cached_tokens for one in records] == [0, 4096, 0]
    assert records[1].ttft_s < records[0].ttft_s / 2
    assert sum(len(store._idle) for store in world.site.stores.values()) == len(blocks)


def test_a_prompt_hits_blocks_of_one_being_computed() -> None:
    """8,000 tokens take a third of a second on a decode worker; finished blocks are hits for the next prompt."""
    blocks = tuple(range(15))
    requests = [Request(0, 0.0, 8000, 4, blocks), Request(1, 0.2, 8000, 4, blocks)]
    records, _ = simulate(fleet(0, 1), requests)
    assert records[0].ttft_s > 0.3
    assert 1024 < records[1].cached_tokens < 7000


def test_requests_wait_for_memory_and_blocks_are_evicted() -> None:
    """A pool of two such prompts: of four at once, two wait; idle blocks are evicted."""
    requests = [Request(n, 0.0, 1024, 200, (2 * n, 2 * n + 1)) for n in range(4)]
    short, world = simulate(fleet(0, 1, node_blocks=160), requests)
    ample, _ = simulate(fleet(0, 1), requests)
    world.check_integrity()
    assert whole(short)
    assert max(one.ttft_s for one in short) > 2 * max(one.ttft_s for one in ample)
    assert next(iter(world.site.stores.values())).evicted > 0


def test_blocks_evicted_while_a_request_waits_for_memory_are_recomputed() -> None:
    """The only node has the last request's blocks when it is planned; the request before it in line takes their
    memory."""
    blocks = tuple(range(8))
    requests = [
        Request(0, 0.0, 4100, 4, blocks),
        Request(1, 60.0, 10_000, 200),
        Request(2, 60.2, 15_000, 4),
        Request(3, 60.3, 4100, 4, blocks),
    ]
    records, world = simulate(fleet(0, 1, node_blocks=1000), requests)
    world.check_integrity()
    assert whole(records)
    assert records[3].cached_tokens < 4096 - 512


def test_a_prefill_workers_node_without_memory_is_waited_for_two_seconds() -> None:
    config = fleet(1, 2, node_blocks=600)
    flags = dataclasses.replace(config.flags, split_policy="disaggregated")
    world = FleetWorld(dataclasses.replace(config, flags=flags))
    [prefill] = world.workers("prefill")
    near, _ = world.workers("decode")
    assert near.record.node_id == prefill.record.node_id
    del world._listed[near.record.component_id]
    world._list()
    store = world.site.stores[prefill.record.node_id]
    store.open(SimTicket((), 600, lambda ticket: None))
    world.send([Request(0, 0.0, 4100, 4, tuple(range(8)))])
    world.clock.run(60.0)
    [record] = world.records()
    assert whole([record])
    assert (record.prefilled_tokens, store.waiting) == (0, 0)
    assert 2.0 < record.ttft_s < 3.0
    world.check_integrity()


def test_a_full_gateway_refuses() -> None:
    config = fleet(0, 1)
    config = dataclasses.replace(config, flags=dataclasses.replace(config.flags, max_inflight_requests=3))
    records, _ = simulate(config, [Request(n, 0.0, 100, 8) for n in range(5)])
    assert [one.failed for one in records] == [False, False, False, True, True]
    assert "max_inflight_requests" in records[4].reason


def test_unsupported_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match="one event"):
        FleetWorld(fleet(0, 1, known_costs=False))
    config = fleet(0, 1)
    with pytest.raises(ConfigError, match="--block-size 100"):
        FleetWorld(dataclasses.replace(config, flags=dataclasses.replace(config.flags, block_size=100)))
