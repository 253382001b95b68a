"""Tenants share a simulated fleet: a lone request beside a flood, and floods of several weights."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lab.fleets.traffic import ClientRecord, Request
from lab.fleets.world import FleetConfig, FleetWorld
from pillion.config import ServeFlags
from pillion.gateway.admission.tenants import Tenant
from pillion.rules.priority import OUTPUT_COST

# Seconds per step, token, sequence, KV token read and query-key pair of a small model on a CPU.
COST = (2e-2, 1e-3, 1e-3, 1e-7, 1e-8)
FLOOD, HEAVY, LONE = Tenant(name="flood"), Tenant(name="heavy", weight=3.0), Tenant(name="lone")


@dataclass(frozen=True)
class AskingClient:
    """Sends a request ``pause_s`` after each answer."""

    tenant: Tenant
    prompt_tokens: int
    answer_tokens: int
    pause_s: float = 0.0


def run(clients: list[AskingClient], seconds: float, **flags: object) -> list[ClientRecord]:
    """Return all requests that ended within ``seconds``."""
    known = {"prefill_workers": 0, "decode_workers": 1, "gateway_workers": 1, **flags}
    config = FleetConfig(
        flags=ServeFlags(**known),  # type: ignore[arg-type]
        prefill_cost_s=COST,
        decode_cost_s=COST,
        known_costs=True,
        block_bytes=2**10,
    )
    world = FleetWorld(config)
    world.warm_up()
    numbers: Iterator[int] = itertools.count()
    asked: dict[int, AskingClient] = {}
    (gateway,) = world.gateways

    def ask(client: AskingClient) -> None:
        number = next(numbers)
        asked[number] = client
        request = Request(number, world.clock.now, client.prompt_tokens, client.answer_tokens, tenant=client.tenant)
        gateway.arrive(request)

    def end(request: Request) -> None:
        client = asked[request.number]
        world.clock.after(client.pause_s, lambda: ask(client))

    gateway.on_end = end
    for client in clients:
        ask(client)
    world.clock.run(world.clock.now + seconds)
    for worker in world.site.workers.values():
        worker._scheduler.check_integrity()
    assert not any(one.failed for one in gateway.records)
    return gateway.records


@pytest.mark.parametrize(
    "flags", [{"max_num_seqs": 8}, {"max_num_seqs": 64}, {"max_num_seqs": 8, "prefill_workers": 1}]
)
def test_a_lone_request_beside_a_flood(flags: dict[str, Any]) -> None:
    """Its first token takes at most twice the time alone, and a step of each of its workers."""
    lone = AskingClient(LONE, 300, 12, pause_s=1.7)
    alone_s = max(one.ttft_s for one in run([lone], 20, **flags))
    flood = [AskingClient(FLOOD, 200 + n, 150 + n) for n in range(64)]
    before, records = run(flood, 80, **flags), run([*flood, lone], 80, **flags)
    found_s = [one.ttft_s for one in records if one.request.tenant is LONE]
    # The largest step has its full budget of tokens and all sequences.
    step_s = COST[0] + COST[1] * 256 + COST[2] * flags["max_num_seqs"]
    if "prefill_workers" in flags:
        step_s += COST[0] + COST[1] * 512
    assert len(found_s) > 10
    assert max(found_s) <= 2 * alone_s + step_s
    # The total is not reduced. Unfinished answers do not count.
    whole, beside = (
        sum(one.request.prompt_tokens + one.request.answer_tokens for one in some) for some in (before, records)
    )
    assert beside >= 0.97 * whole


@pytest.mark.parametrize("max_num_seqs", [8, 32])
def test_weights_are_shares_within_five_percent(max_num_seqs: int) -> None:
    """Measured after the end of the first answers, which began before all had asked."""
    clients = [AskingClient(tenant, 100 + 3 * n, 60 + 5 * n) for tenant in (FLOOD, HEAVY) for n in range(48)]
    records = run(clients, 400, max_num_seqs=max_num_seqs)
    served: Counter[str] = Counter()
    for one in records:
        if one.request.at_s + one.ttft_s + sum(one.gaps_s) > 100:
            served[one.request.tenant.name] += one.request.prompt_tokens + OUTPUT_COST * one.request.answer_tokens
    assert served["heavy"] / served["flood"] == pytest.approx(3, rel=0.05)
