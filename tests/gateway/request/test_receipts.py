"""Receipts by attempt, and sums per tenant."""

from __future__ import annotations

import pytest

from lab.testbed.admitted import admitted_request
from pillion.errors import Unavailable
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot, parse_policy
from pillion.gateway.planning.planner import make_plan
from pillion.gateway.request import events as ev
from pillion.gateway.request.request_machine import ParallelSamples, RequestMachine
from pillion.gateway.request.request_telemetry import MAX_TENANTS, TenantSums
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import OTHER
from pillion.types import FinishReason, Usage
from pillion.v1.prefill_pb2 import ChunkAck
from pillion.wire.registry import ComponentRecord

BLOCK, TOKEN_BYTES = 4, 10
PARTS = tuple(
    ComponentRecord(component_id=f"{role}-0", role=role, address="x", node_id="kv-0", block_bytes=BLOCK * TOKEN_BYTES)
    for role in ("kvnode", "prefill", "decode")
)
GONE = Unavailable("gone")


class AttemptDriver:
    """Drives a machine with 20 prompt tokens through attempts."""

    def __init__(self) -> None:
        self.machine = RequestMachine(admitted_request(tuple(range(100, 120)), 50))
        self.machine.start()

    def begin(self, cached: int, at_s: float) -> None:
        """Plan and grant the attempt, with this number of cached tokens."""
        machine, attempt = self.machine, self.machine.attempt
        snapshot = ClusterSnapshot(
            model="toy", prompt_tokens=len(machine.tokens()), hits={"kv-0": cached // BLOCK}, components=PARTS,
            policy=parse_policy("disaggregated"), block_size=BLOCK, chunk_tokens=8,
        )  # fmt: skip
        machine.handle(ev.PlanMade(attempt, make_plan(snapshot)), at_s)
        # Without a split or fetch the decode worker opens the ticket.
        machine.handle(ev.TicketAdopted(attempt, cached // BLOCK), at_s)
        machine.handle(ev.TicketGranted(attempt, ev.TicketHold("kv-0", 5, attempt), cached // BLOCK), at_s)

    def tokens(self, count: int, at_s: float) -> None:
        self.machine.handle(ev.TokensSampled(self.machine.attempt, (5,) * count), at_s)

    def lose(self, at_s: float) -> None:
        self.machine.handle(ev.DecodeLost(self.machine.attempt, GONE, retryable=True), at_s)

    def finish(self, at_s: float) -> None:
        self.machine.handle(ev.DecodeFinished(self.machine.attempt, FinishReason.STOP, None), at_s)


def test_one_attempt_is_charged_for_tokens_and_memory() -> None:
    driver = AttemptDriver()
    driver.begin(cached=8, at_s=1.0)
    driver.tokens(10, 3.0)
    driver.finish(5.0)
    held = driver.machine.held
    assert held.computed_tokens == 12
    # 20 tokens of the prompt, and 0 to 10 of the answer, for 4 s.
    assert held.byte_s == pytest.approx(4 * 25 * TOKEN_BYTES)
    assert held.token_byte_s == pytest.approx(4 * TOKEN_BYTES)


def test_a_loss_is_charged_as_recomputation() -> None:
    driver = AttemptDriver()
    driver.begin(cached=8, at_s=1.0)
    driver.tokens(10, 2.0)
    driver.lose(3.0)
    # The prompt and 8 tokens of the answer are cached, 2 are not. Between attempts nothing is held.
    driver.begin(cached=28, at_s=4.0)
    driver.tokens(10, 5.0)
    driver.finish(6.0)
    held = driver.machine.held
    assert held.computed_tokens == 12 + 2
    assert held.byte_s == pytest.approx((2 * 25 + 2 * 35) * TOKEN_BYTES)


def test_a_prefill_range_counts_up_to_its_last_chunk() -> None:
    driver = AttemptDriver()
    driver.begin(cached=0, at_s=1.0)
    ack = ChunkAck(chunk_index=0, end_tokens=8, queue_ms=0, compute_ms=1)
    driver.machine.handle(ev.ChunkAcked(1, ack), 2.0)
    driver.machine.handle(ev.PrefillLost(1, GONE, retryable=True), 3.0)
    assert driver.machine.held.computed_tokens == 8
    driver.begin(cached=8, at_s=4.0)
    driver.tokens(1, 5.0)
    driver.finish(5.0)
    assert driver.machine.held.computed_tokens == 20


def test_a_request_cancelled_at_once_costs_nothing() -> None:
    driver = AttemptDriver()
    driver.machine.handle(ev.RequestCancelled(), 1.0)
    held = driver.machine.held
    assert (held.computed_tokens, held.byte_s) == (0, 0.0)


def test_cached_tokens_are_charged_by_tier_and_parallel_samples_as_computed() -> None:
    """Cached tokens count under their tier; all others, with further answers to the same prompt, as computed."""
    driver = AttemptDriver()
    driver.begin(cached=16, at_s=0.0)
    driver.tokens(2, 1.0)
    driver.finish(2.0)
    follower = AttemptDriver().machine
    assert driver.machine.plan is not None
    follower.held.begin_following(driver.machine.plan, 1.0)
    follower.held.end(20 + 6, 0, True, 2.0)
    used = Usage(20, 16, 8, fetched_tokens=4, restored_tokens=4, bucket_tokens=4)
    found = ParallelSamples([driver.machine, follower]).receipt(used)
    each = 4 * 2 * TOKEN_BYTES
    assert found == {
        "computed_tokens": 4,
        "kv_pool_byte_seconds": each,
        "kv_fetched_byte_seconds": each,
        "kv_restored_byte_seconds": each,
        "kv_bucket_byte_seconds": each,
        # 21 tokens for 2 s and 3 for 1 s, without cached ones.
        "kv_computed_byte_seconds": 42 * TOKEN_BYTES + 3 * TOKEN_BYTES - 4 * each,
    }


def test_labels_of_tenants_are_bounded() -> None:
    sums, usage = TenantSums(), Usage(8, 4, 2, computed_tokens=4, kv_pool_byte_seconds=7)
    for number in range(MAX_TENANTS + 3):
        sums.add(f"t{number}", usage)
    sums.add("t0", usage)
    assert len(sums.of) == MAX_TENANTS + 1
    assert sums.of["t0"].kv_pool_byte_seconds == 14
    assert sums.of[OTHER].computed_tokens == 12
    found = {(metric, labels): value for metric, labels, value in sums.readings()}
    assert found[names.TENANT_TOKENS, ("t1", "computed")] == 4
    assert found[names.TENANT_KV, (OTHER, "pool")] == 21
