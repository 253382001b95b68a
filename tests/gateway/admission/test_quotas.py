"""Token buckets: a minute's worth at once, then the rate; debts; other rates after a reload."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import Overloaded
from pillion.gateway.admission.quotas import Quotas
from pillion.gateway.admission.tenants import MINUTE_S, OPEN, Bucket, Tenant
from tests.support.examples import examples


def test_a_minutes_worth_at_once_then_the_rate() -> None:
    quotas, tenant = Quotas(), Tenant(name="acme", requests_per_minute=3)
    for _ in range(3):
        quotas.take_request(tenant, 100.0)
    with pytest.raises(Overloaded) as caught:
        quotas.take_request(tenant, 100.0)
    assert caught.value.retry_after_ms == 20_000
    assert [quota.subject for quota in caught.value.quotas] == ["acme/requests_per_minute"]
    quotas.take_request(tenant, 120.0)
    with pytest.raises(Overloaded):
        quotas.take_request(tenant, 120.0)


def test_an_answer_leaves_a_debt() -> None:
    quotas, tenant = Quotas(), Tenant(name="acme", tokens_per_minute=60)
    quotas.take_prompt(tenant, 10, 0.0)
    quotas.spend(tenant, 80, 0.0)
    with pytest.raises(Overloaded) as caught:
        quotas.take_prompt(tenant, 1, 0.0)
    assert caught.value.retry_after_ms == 31_000
    quotas.take_prompt(tenant, 1, 31.0)


def test_a_prompt_above_the_quota_needs_a_full_bucket() -> None:
    quotas, tenant = Quotas(), Tenant(name="acme", tokens_per_minute=60)
    quotas.take_prompt(tenant, 600, 0.0)
    with pytest.raises(Overloaded) as caught:
        quotas.take_prompt(tenant, 600, 0.0)
    assert caught.value.retry_after_ms == 600_000


def test_unserved_tokens_are_refunded() -> None:
    quotas, tenant = Quotas(), Tenant(name="acme", tokens_per_minute=60)
    quotas.take_prompt(tenant, 60, 0.0)
    quotas.spend(tenant, -60, 0.0)
    quotas.take_prompt(tenant, 60, 0.0)
    quotas.spend(tenant, -1000, 0.0)
    quotas.take_prompt(tenant, 60, 0.0)
    with pytest.raises(Overloaded):
        quotas.take_prompt(tenant, 1, 0.0)


def test_buckets_are_per_tenant_and_optional() -> None:
    quotas = Quotas()
    for _ in range(1000):
        quotas.take_request(OPEN, 0.0)
        quotas.take_prompt(OPEN, 10**9, 0.0)
    one, two = Tenant(name="1", requests_per_minute=1), Tenant(name="2", requests_per_minute=1)
    quotas.take_request(one, 0.0)
    quotas.take_request(two, 0.0)


def test_a_new_rate_keeps_debts() -> None:
    quotas = Quotas()
    for _ in range(4):
        quotas.take_request(Tenant(name="acme", requests_per_minute=4), 0.0)
    quotas.retain({"acme"})
    wider = Tenant(name="acme", requests_per_minute=6)
    for _ in range(2):
        quotas.take_request(wider, 0.0)
    with pytest.raises(Overloaded):
        quotas.take_request(wider, 0.0)
    quotas.retain(())
    quotas.take_request(wider, 0.0)


@settings(max_examples=examples(100))
@given(
    per_minute=st.integers(1, 1000),
    asked=st.lists(st.tuples(st.integers(0, 50), st.floats(0, 30)), max_size=60),
)
def test_a_minute_never_exceeds_two_quotas(per_minute: int, asked: list[tuple[int, float]]) -> None:
    """At most the saved amount plus the refill is spent in any minute."""
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, []
    for amount, pause in asked:
        now += pause
        if amount <= per_minute and bucket.wait_s(amount, now) == 0:
            bucket.take(amount, now)
            taken.append((now, amount))
    for begin, _ in taken:
        assert sum(amount for at, amount in taken if begin <= at < begin + MINUTE_S) <= 2 * per_minute + 1e-6
