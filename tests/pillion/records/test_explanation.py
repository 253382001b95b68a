"""What `pillion explain` says about stories: each cause has its sentence, and the phases have no gaps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pillion.records.bundle import Bundle, BundleAnswer, BundleModel, StoryEvent, TokenTimes, WeighedRoute
from pillion.records.explanation import Wait, end_ms, phases, picture, sentences
from pillion.types import Usage
from tests.pillion.records.test_bundle import bundle_of

PLAN = {"prompt_tokens": 2000, "cached_tokens": 0, "expected_ms": 500.0, "alone_ms": 900.0}


def event(at_ms: float, what: str, worker: str = "", **fields: Any) -> StoryEvent:
    return StoryEvent(at_ms=at_ms, what=what, worker=worker, **fields)


def story(*events: StoryEvent, first_ms: float = 2400.0, last_ms: float = 3000.0, **fields: Any) -> Bundle:
    """Return a bundle of one answer with these times of the first and last token, and these events before."""
    answer = BundleAnswer(tokens=9, times=TokenTimes(first_ms=first_ms, last_ms=last_ms))
    told = [event(0, "arrived"), *events, event(first_ms, "tokens", "decode-0"), event(last_ms, "finished")]
    told.sort(key=lambda one: one.at_ms)
    known = {"answers": (answer,), "story": tuple(told), "usage": Usage(3, 0, 9)} | fields
    return bundle_of(**known)


def submitted(at_ms: float, **figures: float) -> tuple[StoryEvent, ...]:
    return (
        event(at_ms, "planned", "decode-0", attempt=1, figures=PLAN | figures),
        event(at_ms, "submitted", "decode-0", attempt=1, figures=PLAN | figures),
    )


def begun(at_ms: float) -> tuple[StoryEvent, ...]:
    return event(at_ms, "adopted", "decode-0"), event(at_ms, "begun")


IN_LINE = story(
    event(10, "ready"),
    event(10, "waits", words="3 of tenant b", figures={"running": 4, "waiting": 3}),
    event(1910, "turn"),
    *submitted(1920),
    *begun(1930),
)
GRAMMAR = story(event(900, "ready", figures={"grammar_ms": 800.0}), *submitted(910), *begun(2000))
SLOW_LINK = story(
    event(10, "ready"),
    event(20, "planned", "decode-0", figures=PLAN | {"cached_tokens": 1024}),
    event(20, "memory", "kv-0"),
    event(30, "ticket", "kv-0"),
    event(30, "fetch", "kv-0", tokens=1024, words="kv-1", figures={"expected_ms": 40.0}),
    event(1530, "fetched", "kv-0", tokens=0),
    event(1530, "submitted", "decode-0", figures=PLAN),
    *begun(1540),
)
SLOW_WORKER = story(
    event(10, "ready"),
    event(20, "planned", "decode-0", figures=PLAN),
    event(30, "ticket", "kv-0"),
    event(30, "prefill", "prefill-0", tokens=1024, figures=PLAN),
    event(30, "submitted", "decode-0", tokens=1024, figures=PLAN),
    event(1130, "chunk", "prefill-0", tokens=512, figures={"queue_ms": 100.0, "compute_ms": 1000.0}),
    event(2130, "chunk", "prefill-0", tokens=1024, figures={"queue_ms": 0.0, "compute_ms": 1000.0}),
    event(2140, "adopted", "decode-0"),
    event(2150, "begun"),
    event(2160, "prefilled", "prefill-0"),
)
LOST_PREFILL = story(
    event(10, "ready"),
    event(20, "planned", "decode-0", attempt=1, figures=PLAN),
    event(30, "prefill", "prefill-0", attempt=1, tokens=1024, figures=PLAN),
    event(700, "chunk", "prefill-0", attempt=1, tokens=512, figures={"queue_ms": 5.0, "compute_ms": 600.0}),
    event(800, "prefill_lost", "prefill-0", attempt=1, words="Unavailable: gone", figures={"retryable": 1.0}),
    event(820, "planned", "decode-1", attempt=2, figures=PLAN),
    event(830, "prefill", "prefill-1", attempt=2, tokens=1024, figures=PLAN),
    event(2100, "chunk", "prefill-1", attempt=2, tokens=1024, figures={"queue_ms": 0.0, "compute_ms": 900.0}),
    event(2140, "adopted", "decode-1", attempt=2),
)
TWO_ANSWERS = story(
    event(10, "ready"),
    *submitted(20),
    event(2700, "decode_lost", "decode-0", attempt=1, answer=1, words="Internal: broken"),
    answers=tuple(
        BundleAnswer(tokens=9, times=TokenTimes(first_ms=2400, last_ms=3000, longest_gap_ms=gap_ms, longest_gap_at=7))
        for gap_ms in (60.0, 50.0, 40.0)
    ),
    slow_ms=55,
)
# No worker lives for a while, which each look finds again.
AWAY = story(
    event(10, "ready"),
    *submitted(20),
    event(500, "decode_lost", "decode-0", attempt=1, words="Unavailable: gone"),
    *(event(600 + 100 * look, "plan_lost", attempt=2, words="Unavailable: no worker lives") for look in range(16)),
    event(2200, "planned", "decode-0", attempt=2, figures=PLAN),
    event(2200, "still", "decode-0", figures={"lasts_ms": 1700.0}),
)
WORKER_BUSY = story(
    event(10, "ready"),
    *submitted(20, running_requests=4.0, queued_tokens=3000.0),
    event(30, "adopted", "decode-0"),
    event(2390, "begun"),
)
MOVED = story(
    event(10, "ready"),
    *submitted(20),
    *begun(30),
    event(1500, "decode_lost", "decode-0", attempt=1, words="Unavailable: gone", figures={"retryable": 1.0}),
    event(1500, "retry", attempt=2),
    event(1520, "planned", "decode-1", attempt=2, figures=PLAN),
    event(1520, "submitted", "decode-1", attempt=2, figures=PLAN),
    event(2000, "adopted", "decode-1", attempt=2),
    event(2400, "tokens", "decode-1"),
    first_ms=400,
    answers=(
        BundleAnswer(
            tokens=9, times=TokenTimes(first_ms=400, last_ms=3000, longest_gap_ms=1100, longest_gap_at=5, gaps=())
        ),
    ),
)


@pytest.mark.parametrize(
    ("bundle", "told"),
    [
        (
            IN_LINE,
            "1.90 s of 2.40 s to the first token were spent waiting in the gateway's queue, while 4 answers ran and"
            " 3 requests (3 of tenant b) were waiting too.",
        ),
        (GRAMMAR, "800 ms of 2.40 s to the first token were spent making and compiling the grammar."),
        (
            SLOW_LINK,
            "1.50 s of 2.40 s to the first token were spent fetching KV to kv-0 from kv-1; 40.0 ms were expected.",
        ),
        (SLOW_LINK, "The index had promised 1,024 cached tokens, and 0 were found."),
        (SLOW_LINK, "The prefix was cold: none of the prompt's 3 tokens was cached."),
        (
            SLOW_WORKER,
            "2.11 s of 2.40 s to the first token were spent prefilling at prefill-0: 2 chunks waited 100 ms in its"
            " queue and took 2.00 s to compute.",
        ),
        (
            SLOW_WORKER,
            "The split at 1,024 was expected to save 400 ms beside the 900 ms that decode-0 would have taken alone, and"
            " did cost 1.48 s.",
        ),
        (
            SLOW_WORKER,
            "The plan expected the first token after 500 ms, and it came after 2.38 s; the longest part of that was"
            " prefilling at prefill-0.",
        ),
        (
            LOST_PREFILL,
            "1.31 s of 2.40 s to the first token were spent prefilling at prefill-1: 1 chunk waited 0.0 ms in its queue"
            " and took 900 ms to compute.",
        ),
        (
            LOST_PREFILL,
            "The split at 1,024 was expected to save 400 ms beside the 900 ms that decode-1 would have taken alone, and"
            " did cost 680 ms.",
        ),
        (
            TWO_ANSWERS,
            "After 2.70 s, attempt 1 of answer 1 was lost at decode-0 (Internal: broken), and the answer ended there.",
        ),
        (TWO_ANSWERS, "The longest pause of answer 0 was 60.0 ms, before its token 7."),
        (TWO_ANSWERS, "The longest pause of answer 1 was 50.0 ms, before its token 7, when decode-0 was lost."),
        (AWAY, "After 500 ms, attempt 1 was lost at decode-0 (Unavailable: gone), and the request moved."),
        (
            AWAY,
            "After 600 ms, attempt 2 was lost at a component (Unavailable: no worker lives), and so were 15 more within"
            " 1.50 s, and the request moved.",
        ),
        (AWAY, "Until 2.20 s decode-0 sent no heartbeat for 1.70 s: it was stopped, or cut off."),
        (
            WORKER_BUSY,
            "2.36 s of 2.40 s to the first token were spent waiting in the queue of decode-0, where 4 answers ran and"
            " prompts of 3,000 tokens were to be computed.",
        ),
        (MOVED, "After 1.50 s, attempt 1 was lost at decode-0 (Unavailable: gone), and the request moved."),
        (MOVED, "The longest pause of the answer was 1.10 s, before its token 5, when decode-0 was lost."),
    ],
)
def test_each_cause_has_its_sentence(bundle: Bundle, told: str) -> None:
    assert told in sentences(bundle)


@pytest.mark.parametrize(
    ("bundle", "words"),
    [
        (IN_LINE, "The plan expected"),
        (IN_LINE, "were spent looking up the prefix"),
        (IN_LINE, "The index had promised"),
        (MOVED, "were spent moving"),
        (TWO_ANSWERS, "The longest pause of answer 2"),
        (AWAY, "ended there"),
    ],
)
def test_small_or_expected_differences_are_not_reported(bundle: Bundle, words: str) -> None:
    assert [one for one in sentences(bundle) if words in one] == []


@pytest.mark.parametrize("bundle", [IN_LINE, GRAMMAR, SLOW_LINK, SLOW_WORKER, LOST_PREFILL, MOVED])
def test_phases_have_no_gaps(bundle: Bundle) -> None:
    found = phases(bundle)
    assert (found[0].start_ms, found[-1].end_ms) == (0.0, end_ms(bundle))
    assert all(one.end_ms == other.start_ms for one, other in itertools.pairwise(found))
    axis, *rows = picture(bundle)
    assert len(rows) == len(found)
    assert {len(line) for line in rows} == {len(rows[0])}
    assert axis.endswith("3.00 s")


def test_a_migrated_requests_phases_are_listed() -> None:
    assert [(one.name, one.worker, one.start_ms) for one in phases(MOVED)] == [
        (Wait.READING, "", 0),
        (Wait.PLANNING, "", 10),
        (Wait.OPENING, "decode-0", 20),
        (Wait.TAIL, "decode-0", 30),
        (Wait.TOKENS, "decode-0", 400),
        (Wait.MOVING, "decode-0", 1500),
        (Wait.OPENING, "decode-1", 1520),
        (Wait.WORKER_LINE, "decode-1", 2000),
        (Wait.TOKENS, "decode-1", 2400),
    ]


def test_the_source_of_cached_tokens_is_reported() -> None:
    usage = Usage(3, 900, 9, fetched_tokens=300, restored_tokens=100, bucket_tokens=50)
    bundle = story(event(10, "ready"), *submitted(20), *begun(30), usage=usage)
    assert (
        "Of the prompt's 3 tokens 900 were cached (450 were in the pool, 300 came from other nodes, 100 came from"
        " lower tiers, 50 came from a bucket)." in sentences(bundle)
    )


def test_a_replaced_adapter_explains_a_cache_miss() -> None:
    model = BundleModel(name="toy", fingerprint="ab", asked="red", adapter="b" * 64)
    changed = event(10, "adapter_changed", tokens=16, words="a" * 64, figures={"ago_ms": 60_010.0})
    events = (event(10, "ready"), changed, *submitted(20))
    assert (
        "This gateway last served its first 16 tokens at 2023-11-14 22:12:20 UTC, with another adapter of the"
        " name red (aaaaaaaaaa then, bbbbbbbbbb now), and KV of one adapter does not serve another."
    ) in sentences(story(*events, model=model))
    warm = sentences(story(*events, model=model, usage=Usage(3, 2, 9)))
    assert [one for one in warm if "another adapter" in one] == []


def test_considered_routes_are_reported() -> None:
    routes = (WeighedRoute(decode="d0", price_ms=900.0), WeighedRoute(decode="d1", price_ms=500.0, chosen=True))
    plan, sent = submitted(20)
    plan = event(20, "planned", "d1", figures=PLAN, weighed=routes)
    assert "d1 was chosen at a price of 500 ms; the others were d0 at 900 ms." in sentences(story(plan, sent))


def test_a_request_that_never_got_a_slot_is_explained() -> None:
    waits = event(10, "waits", figures={"running": 1, "waiting": 0})
    ended = event(5000, "failed", words="DeadlineExceeded: late")
    told = sentences(
        bundle_of(
            story=(event(0, "arrived"), event(10, "ready"), waits, ended),
            answers=(BundleAnswer(tokens=0),),
            error="DeadlineExceeded: late",
        )
    )
    assert told == [
        "No token came within the 5.00 s of the request.",
        "The request failed with DeadlineExceeded: late",
        "4.99 s of 5.00 s of waiting were spent waiting in the gateway's queue, while 1 answer ran.",
    ]
