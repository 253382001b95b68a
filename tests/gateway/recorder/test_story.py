"""Contents of a story: tokens up to a stop string, requests ahead in the queue, a bounded number of moments."""

from __future__ import annotations

import pytest

from lab.testbed.admitted import admitted_request
from pillion.gateway.recorder import story as stories
from pillion.gateway.recorder.story import AnswerLog, Story
from pillion.gateway.request import events as ev
from pillion.types import TokenLogprob


def story_of(tenant: str = "a", answers: int = 1) -> Story:
    logs = [AnswerLog() for _ in range(answers)]
    story = Story(
        id="0" * 24,
        admitted=admitted_request(),
        tenant=tenant,
        content="hash",
        chosen=None,
        answers=logs,
        on_end=lambda _: None,
    )
    story.ready(story.admitted.arrived)
    return story


def sampled(story: Story, now: float, *ids: int, answer: int = 0) -> None:
    logprobs = tuple(TokenLogprob(one, -one / 10) for one in ids)
    story.note(answer, ev.TokensSampled(1, ids), [(answer, ev.Emit(ids, logprobs))], now)


def test_a_paused_worker_is_noted() -> None:
    story = story_of()
    begun = story.admitted.arrived
    story.ended(begun + 10.0)
    for from_s, to_s in ((-9.0, -1.0), (11.0, 14.0), (2.0, 5.5)):
        story.stalled("decode-0", begun + from_s, begun + to_s)
    (still,) = [one for one in story.events() if one.what == "still"]
    assert (still.worker, still.at_ms, still.figures["lasts_ms"]) == ("decode-0", 5500.0, 3500.0)


def test_tokens_after_a_stop_string_are_not_recorded() -> None:
    story = story_of()
    begun = story.admitted.arrived
    for number, ids in enumerate([(1,), (2, 3), (4, 5, 6)]):
        sampled(story, begun + (0.5, 0.504, 2.004)[number], *ids)
    story.note(0, ev.StopStringFound(4), [], begun + 2.1)
    (log,) = story.answers
    times = log.times(begun)
    assert (log.token_ids, log.logprobs) == ([1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4])
    assert times is not None
    assert (times.first_ms, times.last_ms, times.longest_gap_ms, times.longest_gap_at) == (500.0, 2004.0, 1500.0, 3)
    assert sum(times.gaps) == 2
    assert story.longest_wait_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("tenant", "waiting", "words", "before"),
    [
        ("a", {"a": 1}, "", 0),
        ("a", {"a": 3, "b": 2}, "2 of tenant a, 2 of tenant b", 4),
        ("", {"": 4}, "", 3),
    ],
)
def test_requests_ahead_in_the_queue_are_recorded(
    tenant: str, waiting: dict[str, int], words: str, before: int
) -> None:
    story = story_of(tenant)
    story.waits(story.admitted.arrived + 1.0, 7, waiting)
    *_, waits = story.events()
    assert (waits.what, waits.at_ms, waits.words) == ("waits", 1000.0, words)
    assert waits.figures == {"running": 7, "waiting": before}


def test_recorded_events_are_bounded_and_end_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stories, "MAX_MOMENTS", 3)
    story = story_of()
    now = story.admitted.arrived
    for position in range(9, 0, -1):
        story.note(0, ev.StillQueued(1, position), [], now + 1)
    story.ended(now + 2)
    story.note(0, ev.RequestCancelled(), [], now + 3)
    assert [one.figures.get("position") for one in story.events() if one.what == "in_line"] == [9, 8, 7]
    assert "cancelled" not in [one.what for one in story.events()]
