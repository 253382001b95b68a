"""Explains a bundle: where the time of its request went, as a timeline and in sentences. Sans-IO.

events of the story --phases--> what the first answer waited for, in order
                    --sentences--> what took long, why, and what the plan had expected
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pillion.records.bundle import Bundle, StoryEvent

# Min share of the time to the first token for which a phase is reported.
MIN_REPORTED_SHARE = 0.05
BAR_COLUMNS = 40


class Wait(StrEnum):
    """What a request waits for; {} is the name of a worker."""

    READING = "reading and tokenizing the prompt"
    GRAMMAR = "making and compiling the grammar"
    LINE = "waiting in the gateway's queue"
    PLANNING = "looking up the prefix and planning"
    MEMORY = "waiting for KV memory at {}"
    FETCHING = "fetching KV to {}"
    PREFILL = "prefilling at {}"
    OPENING = "opening the stream at {}"
    WORKER_LINE = "waiting in the queue of {}"
    TAIL = "computing the rest of the prompt at {}"
    MOVING = "moving to other components after a loss"
    TOKENS = "tokens from {}"


_TIERS = {
    "pool_tokens": "were in the pool",
    "fetched_tokens": "came from other nodes",
    "restored_tokens": "came from lower tiers",
    "bucket_tokens": "came from a bucket",
}
_LOSSES = ("plan_lost", "ticket_lost", "prefill_lost", "decode_lost")
# Events of an answer that continued after a loss.
_CONTINUES = ("planned", "ticket", "fetched", "chunk", "prefilled", "adopted", "tokens", "finished", "stopped")
# The phase that an event begins for the first answer. Other events change nothing.
_BEGINS = {
    "ready": Wait.PLANNING,
    "waits": Wait.LINE,
    "turn": Wait.PLANNING,
    "memory": Wait.MEMORY,
    "ticket": Wait.PLANNING,
    "fetch": Wait.FETCHING,
    "fetched": Wait.PLANNING,
    "prefill": Wait.PREFILL,
    "prefilled": Wait.OPENING,
    "submitted": Wait.OPENING,
    "adopted": Wait.WORKER_LINE,
    "in_line": Wait.WORKER_LINE,
    "begun": Wait.TAIL,
    "tokens": Wait.TOKENS,
    **dict.fromkeys(_LOSSES, Wait.MOVING),
}


@dataclass(frozen=True, slots=True)
class Phase:
    """What the first answer waited for, and at which worker, from ``start_ms`` to ``end_ms`` after the request's
    arrival."""

    name: str
    worker: str
    start_ms: float
    end_ms: float

    @property
    def took_ms(self) -> float:
        """Duration in milliseconds."""
        return self.end_ms - self.start_ms

    @property
    def words(self) -> str:
        """Description for people."""
        return self.name.format(self.worker or "a worker")


def explained(bundle: Bundle, verified: bool) -> dict[str, Any]:
    """Return the explanation of a bundle as JSON fields; ``verified``: whether its HMAC was verified."""
    whose = f" of tenant {bundle.tenant}" if bundle.tenant else ""
    trust = "" if verified else ", unverified: there is no key"
    return {
        "id": bundle.id,
        "created_unix_ms": bundle.created_unix_ms,
        "verified": verified,
        "title": f"{bundle.request.label}{whose}, {bundle.model.asked or bundle.model.name}: {bundle.reason}{trust}",
        "phases": [asdict(phase) | {"words": phase.words} for phase in phases(bundle)],
        "sentences": sentences(bundle),
    }


def phases(bundle: Bundle) -> list[Phase]:
    """Return what the first answer waited for, in order and without gaps, from the request's arrival to its end."""
    result, name, worker, since_ms = [], Wait.READING, "", 0.0
    in_prefill, decode = False, ""
    for event in bundle.story:
        if event.answer or event.what not in _BEGINS:
            decode = event.worker if event.what == "planned" and not event.answer else decode
            continue
        begins = _BEGINS[event.what]
        if event.what == "ready" and "grammar_ms" in event.figures:
            grammar_ms = min(event.figures["grammar_ms"], event.at_ms)
            result.append(Phase(Wait.READING, "", 0.0, event.at_ms - grammar_ms))
            name, since_ms = Wait.GRAMMAR, event.at_ms - grammar_ms
        if event.what == "prefilled" and not in_prefill:
            continue
        if begins == Wait.PREFILL:
            in_prefill = True
        elif event.what in ("adopted", "prefilled", "tokens", *_LOSSES):
            in_prefill = False
        elif in_prefill:
            # Meanwhile the decode worker waits for the prefill worker's blocks.
            continue
        if name == Wait.TOKENS and begins != Wait.MOVING:
            continue
        if name == Wait.MOVING and begins in (Wait.PLANNING, Wait.MEMORY):
            continue
        result.append(Phase(name, worker, since_ms, event.at_ms))
        at = decode if begins in (Wait.OPENING, Wait.WORKER_LINE, Wait.TAIL) else event.worker
        name, worker, since_ms = begins, at or worker, event.at_ms
    result.append(Phase(name, worker, since_ms, max(since_ms, end_ms(bundle))))
    return _merged(result)


def _merged(found: list[Phase]) -> list[Phase]:
    merged: list[Phase] = []
    for phase in found:
        if merged and (merged[-1].name, merged[-1].worker) == (phase.name, phase.worker):
            merged[-1] = replace(merged[-1], end_ms=phase.end_ms)
        elif phase.took_ms > 0:
            merged.append(phase)
    return merged


def end_ms(bundle: Bundle) -> float:
    """Return the time of the story's last event, in milliseconds since the request's arrival."""
    tokens = [one.times.last_ms for one in bundle.answers if one.times is not None]
    return max([*tokens, *(event.at_ms for event in bundle.story)], default=0.0)


def first_token_ms(bundle: Bundle) -> float | None:
    """Return the time of the first token of any answer, in milliseconds since arrival; None without tokens."""
    return min((one.times.first_ms for one in bundle.answers if one.times is not None), default=None)


def picture(bundle: Bundle) -> list[str]:
    """Draw the phases as bars on one time axis, one line each."""
    parts, whole_ms = phases(bundle), max(end_ms(bundle), 0.001)
    width = max((len(phase.words) for phase in parts), default=0)
    lines = [f"{'':{width}}  0 {_ms(whole_ms):>{BAR_COLUMNS - 2}}"]
    for phase in parts:
        start, end = (round(at * BAR_COLUMNS / whole_ms) for at in (phase.start_ms, phase.end_ms))
        start = min(start, BAR_COLUMNS - 1)
        bar = (" " * start + "█" * max(1, end - start)).ljust(BAR_COLUMNS)
        lines.append(f"{phase.words:{width}}  {bar} {_ms(phase.took_ms):>9}")
    return lines


def sentences(bundle: Bundle) -> list[str]:
    """Return sentences that describe what took long, and why."""
    parts = (_summary, _waits, _stills, _prefix, _plan, _losses, _gaps)
    return [sentence for part in parts for sentence in part(bundle)]


def _summary(bundle: Bundle) -> Iterator[str]:
    first_ms, ended_ms = first_token_ms(bundle), end_ms(bundle)
    if first_ms is None:
        yield f"No token came within the {_ms(ended_ms)} of the request."
    else:
        yield f"The first token came after {_ms(first_ms)}, the last after {_ms(ended_ms)}."
    if bundle.error:
        kind, _, text = bundle.error.partition(": ")
        yield f"The request failed with {kind}: {text}"


def _waits(bundle: Bundle) -> Iterator[str]:
    """Describe, in order, the phases before the first token that took a considerable part of the time."""
    first_ms = first_token_ms(bundle)
    whole_ms = end_ms(bundle) if first_ms is None else first_ms
    until = "to the first token" if first_ms is not None else "of waiting"
    for phase in phases(bundle):
        if phase.name != Wait.TOKENS and phase.start_ms < whole_ms and phase.took_ms >= MIN_REPORTED_SHARE * whole_ms:
            reason = _reason(bundle, phase)
            yield f"{_ms(phase.took_ms)} of {_ms(whole_ms)} {until} were spent {phase.words}{reason}."


def _reason(bundle: Bundle, phase: Phase) -> str:
    events = _within(bundle, phase)
    if phase.name == Wait.LINE and (waits := _last(events, "waits")) is not None:
        running, waiting = (round(waits.figures.get(name, 0)) for name in ("running", "waiting"))
        whose = f" ({waits.words})" if waits.words else ""
        others = f" and {_count(waiting, 'request')}{whose} were waiting too" if waiting else ""
        return f", while {_count(running, 'answer')} ran{others}"
    if phase.name == Wait.FETCHING and (fetch := _last(events, "fetch")) is not None:
        sources = f" from {fetch.words}" if fetch.words else " from lower tiers"
        expected = fetch.figures.get("expected_ms", 0.0)
        return f"{sources}" + (f"; {_ms(expected)} were expected" if expected else "")
    if phase.name == Wait.PREFILL and (prefill := _last(events, "prefill")) is not None:
        # The acknowledgement of the last chunks may come after the decode worker has continued.
        chunks = [one for one in bundle.story if one.what == "chunk" and one.attempt == prefill.attempt]
        named = ("queue_ms", "compute_ms")
        queue, compute = (_ms(sum(one.figures.get(name, 0.0) for one in chunks)) for name in named)
        return f": {_count(len(chunks), 'chunk')} waited {queue} in its queue and took {compute} to compute"
    if phase.name == Wait.WORKER_LINE and (submitted := _last(bundle.story, "submitted")) is not None:
        running, queued = (round(submitted.figures.get(name, 0)) for name in ("running_requests", "queued_tokens"))
        return f", where {_count(running, 'answer')} ran and prompts of {_count(queued, 'token')} were to be computed"
    if phase.name == Wait.OPENING and bundle.request.grammar:
        return ", which compiles the grammar first"
    return ""


def _prefix(bundle: Bundle) -> Iterator[str]:
    usage, tokens = bundle.usage, bundle.request.prompt_tokens
    planned = next((event for event in bundle.story if event.what == "planned"), None)
    if planned is None or usage is None:
        return
    cached, expected = usage.cached_tokens, round(planned.figures.get("cached_tokens", 0))
    if cached:
        of = [f"{count:,} {_TIERS[name]}" for name, count in usage.cached_by_tier().items() if count]
        yield f"Of the prompt's {tokens:,} tokens {cached:,} were cached ({', '.join(of)})."
    else:
        yield f"The prefix was cold: none of the prompt's {tokens:,} tokens was cached."
        if (changed := _last(bundle.story, "adapter_changed")) is not None:
            then_ms = bundle.created_unix_ms + changed.at_ms - changed.figures["ago_ms"]
            then = f"{datetime.fromtimestamp(then_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
            digests = f"{changed.words[:10]} then, {bundle.model.adapter[:10]} now"
            served = f"This gateway last served its first {changed.tokens:,} tokens at {then}"
            whose = f"with another adapter of the name {bundle.model.asked} ({digests})"
            yield f"{served}, {whose}, and KV of one adapter does not serve another."
    if expected > cached:
        yield f"The index had promised {expected:,} cached tokens, and {cached:,} were found."


def _plan(bundle: Bundle) -> Iterator[str]:
    """Compare what the last plan before the first token expected with what happened."""
    first = next((event for event in bundle.story if event.what == "tokens" and not event.answer), None)
    before = [event for event in bundle.story if first is not None and event.at_ms <= first.at_ms and not event.answer]
    plan = _last(before, "planned")
    started = _last(before, "prefill") or _last(before, "submitted")
    if first is None or plan is None or started is None:
        return
    took_ms = first.at_ms - plan.at_ms
    expected_ms, alone_ms = (started.figures.get(f"{name}_ms", 0.0) for name in ("expected", "alone"))
    if started.what == "prefill":
        predicted, actual = (_saved(alone_ms - ms) for ms in (expected_ms, took_ms))
        alternative = f"the {_ms(alone_ms)} that {plan.worker} would have taken alone"
        yield f"The split at {started.tokens:,} was expected to {predicted} beside {alternative}, and did {actual}."
    # Smaller errors of the prediction are normal.
    if took_ms > 2 * expected_ms and took_ms - expected_ms > 50:
        after = [one for one in phases(bundle) if plan.at_ms <= one.start_ms < first.at_ms]
        slowest = max(after, key=lambda one: one.took_ms).words
        times = f"{_ms(expected_ms)}, and it came after {_ms(took_ms)}"
        yield f"The plan expected the first token after {times}; the longest part of that was {slowest}."
    if len(plan.weighed) > 1:
        chosen = next((one for one in plan.weighed if one.chosen), plan.weighed[0])
        others = ", ".join(f"{one.decode} at {_ms(one.price_ms)}" for one in plan.weighed if one is not chosen)
        yield f"{chosen.decode} was chosen at a price of {_ms(chosen.price_ms)}; the others were {others}."


def _losses(bundle: Bundle) -> Iterator[str]:
    """Describe each loss; repetitions before tokens came again are one."""
    loss_groups: list[list[StoryEvent]] = []
    open_groups: dict[tuple[int, str, str, str], list[StoryEvent]] = {}
    for event in bundle.story:
        if event.what == "tokens":
            open_groups = {key: group for key, group in open_groups.items() if key[0] != event.answer}
        elif event.what in _LOSSES:
            key = (event.answer, event.what, event.worker, event.words)
            if key not in open_groups:
                open_groups[key] = []
                loss_groups.append(open_groups[key])
            open_groups[key].append(event)
    for first, *others in loss_groups:
        answer = f" of answer {first.answer}" if first.answer else ""
        lost = f"attempt {first.attempt}{answer} was lost at {first.worker or 'a component'} ({first.words})"
        last = others[-1] if others else first
        later = [one for one in bundle.story if one.answer == last.answer and one.at_ms >= last.at_ms]
        end = "the request moved" if any(one.what in _CONTINUES for one in later) else "the answer ended there"
        lasted = f", and so were {len(others)} more within {_ms(last.at_ms - first.at_ms)}" if others else ""
        yield f"After {_ms(first.at_ms)}, {lost}{lasted}, and {end}."


def _stills(bundle: Bundle) -> Iterator[str]:
    for event in bundle.story:
        if event.what == "still":
            lasts_ms = event.figures["lasts_ms"]
            when = f"Until {_ms(event.at_ms)} {event.worker} sent no heartbeat for {_ms(lasts_ms)}"
            yield f"{when}: it was stopped, or cut off."


def _gaps(bundle: Bundle) -> Iterator[str]:
    """Describe the longest pause of each answer if it is longer than the time to the first token or than the threshold
    for slow requests, or if a loss caused it."""
    for number, answer in enumerate(bundle.answers):
        times = answer.times
        if times is None or not times.longest_gap_ms:
            continue
        lost = [one for one in bundle.story if one.what == "decode_lost" and one.answer == number]
        lost = [one for one in lost if times.first_ms <= one.at_ms <= times.last_ms]
        slow = bundle.slow_ms and times.longest_gap_ms > bundle.slow_ms
        if lost or slow or times.longest_gap_ms > times.first_ms:
            name = f"answer {number}" if len(bundle.answers) > 1 else "the answer"
            cause = f", when {lost[0].worker} was lost" if lost else ""
            pause = f"{_ms(times.longest_gap_ms)}, before its token {times.longest_gap_at:,}"
            yield f"The longest pause of {name} was {pause}{cause}."


def _within(bundle: Bundle, phase: Phase) -> list[StoryEvent]:
    return [one for one in bundle.story if not one.answer and phase.start_ms <= one.at_ms <= phase.end_ms]


def _last(events: Sequence[StoryEvent], what: str) -> StoryEvent | None:
    return next((event for event in reversed(events) if event.what == what), None)


def _saved(saved_ms: float) -> str:
    return f"{'cost' if saved_ms < 0 else 'save'} {_ms(abs(saved_ms))}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ms(value: float) -> str:
    """Format a time for people: 12.3 ms, 340 ms, 1.90 s."""
    if abs(value) >= 1000:
        return f"{value / 1000:,.2f} s"
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms"
