"""Table and log of clients' rejected requests, in bounded memory."""

from __future__ import annotations

import logging
import time

import pytest

from pillion.gateway.request import refusals
from pillion.gateway.request.refusals import MAX_LINES_PER_S, MAX_ROWS, MAX_TENANTS, Caller, Refusals


def test_one_tenant_cannot_fill_the_table_or_evict_others() -> None:
    found = Refusals()
    found.without_effect(Caller("/v1/a", "quiet", "one"), ["field"])
    for number in range(2 * MAX_ROWS):
        found.without_effect(Caller("/v1/a", "loud", f"client {number}"), ["x" * 10_000])
    rows = list(found.rows())
    assert len(rows) == MAX_ROWS + 1
    assert [row["times"] for row in rows if row["tenant"] == "quiet"] == [1]
    assert max(len(row["field"]) for row in rows) == 100
    for number in range(MAX_TENANTS + 5):
        found.without_effect(Caller("/v1/a", f"tenant {number}", ""), ["field"])
    assert len({row["tenant"] for row in found.rows()}) == MAX_TENANTS


def test_log_lines_per_second_are_bounded_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now)
    found, caller = Refusals(), Caller("/v1/a", "acme", "a\nforged line \x1b[31m")
    with caplog.at_level(logging.INFO, "pillion.gateway.refusals"):
        for number in range(100):
            found.refused(caller, 400, "invalid_value", "n", f"r-{number}", None)
        assert len(caplog.records) == MAX_LINES_PER_S
        now += 1
        found.refused(caller, 400, "invalid_value", "", "r-101", None)
    last = caplog.records[-1]
    assert last.message.endswith(f"{100 - MAX_LINES_PER_S} refusals before it were not logged")
    assert "field" not in last.message
    assert (last.fields["client"], last.fields["status"]) == ("a?forged line ?[31m", 400)  # type: ignore[attr-defined]
    assert [row["times"] for row in found.rows()] == [100, 1]
