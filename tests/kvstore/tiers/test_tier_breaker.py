"""When a medium that was late is used again."""

from __future__ import annotations

from pillion.kvstore.tiers.tier_breaker import FIRST_PAUSE_S, MAX_PAUSE_S, TierBreaker


def test_pauses_back_off_up_to_a_limit_and_reset() -> None:
    breaker, now, pauses = TierBreaker(), 100.0, []
    breaker.late(now)
    for _ in range(8):
        assert breaker.paused
        pauses.append(breaker.probe_at_s - now)
        now = breaker.probe_at_s
        breaker.late(now)
    assert pauses == [FIRST_PAUSE_S * 2**k for k in range(6)] + 2 * [MAX_PAUSE_S]
    assert breaker.since_s == 100.0
    breaker.answered()
    assert not breaker.paused
    # One probe shows little: a medium that is late again is paused for longer than at first.
    breaker.late(now)
    assert breaker.probe_at_s - now == MAX_PAUSE_S
    breaker.answered()
    breaker.in_time()
    breaker.late(now)
    assert breaker.probe_at_s - now == FIRST_PAUSE_S


def test_a_read_from_before_a_pause_does_not_shorten_it() -> None:
    breaker = TierBreaker()
    breaker.late(0.0)
    breaker.in_time()
    assert breaker.paused
    breaker.late(1.0)
    assert breaker.probe_at_s == 1.0 + 2 * FIRST_PAUSE_S
