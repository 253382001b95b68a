"""Pools of different sizes, and their limits for requests without ``max_tokens``."""

from __future__ import annotations

from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S, until
from tests.support.fake_components import record, running_fake_cluster


async def pools(fakes: Any, **blocks: int) -> None:
    """Return KV nodes with pools of 4-token blocks; only kv-0 and its workers live."""
    for role in ("kvnode", "prefill", "decode"):
        component_id = "kv-0" if role == "kvnode" else f"{role}-0"
        address = f"unix:{fakes.folder}/{role}.sock"
        more = {"total_blocks": blocks["kv0"]} if role == "kvnode" else {}
        await fakes.registry.heartbeat(record(component_id, role, address, **more))
    gone = f"unix:{fakes.folder}/gone.sock"
    await fakes.registry.heartbeat(record("decode-1", "decode", gone, node_id="kv-1"))
    if "kv1" in blocks:
        await fakes.registry.heartbeat(record("kv-1", "kvnode", gone, node_id="kv-1", total_blocks=blocks["kv1"]))
    view = fakes.gateway.gateway.cluster.view
    wanted = {"decode-1", "kv-0", *(["kv-1"] if "kv1" in blocks else [])}
    await until(
        "the pools to be known",
        lambda: wanted <= {r.component_id for r in view.records()} and any(r.total_blocks for r in view.records()),
    )


@pytest.mark.parametrize(
    "blocks",
    [{"kv0": 32}, {"kv0": 32, "kv1": 48}, {"kv0": 32, "kv1": 32}],
    ids=["its node is gone", "its node is larger", "its node is as large"],
)
async def test_a_lost_host_does_not_stop_requests_without_max_tokens(blocks: dict[str, int]) -> None:
    async with running_fake_cluster() as fakes:
        await pools(fakes, **blocks)
        stream = fakes.client.generate("What is the capital of France?", timeout_s=WITHIN_S)
        assert "".join([delta.text async for delta in stream]) == "The answer."
        await fakes.settled()
