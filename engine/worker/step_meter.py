"""Measures steps: how long they took, and what filled their token budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pillion.engine.scheduling.step_plan import Outcome, StepPlan
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Meters, Reading
from pillion.settings.speculative_config import MAX_SPECULATIVE_TOKENS
from pillion.wire.registry import WorkerLoad

DECODE, TAIL, PREFILL, SPECULATIVE, FORCED, IDLE = "decode", "tail", "prefill", "speculative", "forced", "idle"


class StepMeter:
    """Counts a worker's steps over all its epochs. The step thread calls count_step, and asyncio's thread
    count_outcome."""

    def __init__(self, meters: Meters) -> None:
        self._duration = meters.distribution(names.STEP_DURATION)
        self._steps = {ok: meters.counter(names.STEPS, "ok" if ok else "failed") for ok in (True, False)}
        every = (DECODE, TAIL, PREFILL, SPECULATIVE, FORCED, IDLE)
        self._tokens = {use: meters.counter(names.STEP_BUDGET, use) for use in every}
        self._preemptions = meters.counter(names.PREEMPTIONS)
        places = range(MAX_SPECULATIVE_TOKENS)
        self._accepted = [meters.counter(names.ACCEPTED, str(place)) for place in places]
        self._wasted = [meters.counter(names.WASTED, str(place)) for place in places]
        self._forced = meters.counter(names.FORCED)
        self._late_masks = meters.counter(names.LATE_MASKS)
        self._evicted_adapters = meters.counter(names.ADAPTER_EVICTIONS)

    def count_step(self, plan: StepPlan, seconds: float, ok: bool) -> dict[str, int]:
        """Counts a step that has run and is not committed yet. Returns its tokens by use."""
        self._duration.observe(seconds)
        self._steps[ok].add()
        used = tokens_by_use(plan)
        for use, tokens in used.items():
            self._tokens[use].add(tokens)
        return used

    def totals(self) -> dict[str, Any]:
        """Returns what :meth:`count_step` has counted so far, as fields of a ComponentRecord."""
        duration = self._duration.now()
        tokens = {f"step_{use}_tokens": int(cell.value) for use, cell in self._tokens.items()}
        return {"steps": duration.count, "steps_ms": round(duration.total * 1000, 3), **tokens}

    def count_outcome(self, outcome: Outcome) -> None:
        """Counts the preemptions, judged draft tokens, forced tokens, late masks and evicted adapters of an outcome."""
        self._preemptions.add(outcome.preemptions)
        for made, right in outcome.judged_draft_tokens:
            for counter in (*self._accepted[:right], *self._wasted[right:made]):
                counter.add(1)
        self._forced.add(outcome.forced_tokens)
        self._late_masks.add(outcome.late_masks)
        self._evicted_adapters.add(outcome.evicted_adapters)


def tokens_by_use(plan: StepPlan) -> dict[str, int]:
    """Returns the tokens of a step that is not committed yet, by use: its budget in all, or more where decodes alone
    are more."""
    used = dict.fromkeys((DECODE, TAIL, PREFILL, SPECULATIVE, FORCED), 0)
    for chunk in plan.scheduled:
        sequence = chunk.sequence
        if sequence.is_prefill:
            used[PREFILL] += chunk.count
        elif not sequence.decoding:
            used[TAIL] += chunk.count
        else:
            used[DECODE] += 1
            used[FORCED if sequence.forced else SPECULATIVE] += chunk.count - 1
    used[IDLE] = max(0, plan.budget_tokens - plan.num_tokens)
    return used


def load_readings(load: WorkerLoad, max_num_seqs: int) -> Iterator[Reading]:
    yield names.FREE_SEQUENCES, (), max(0, max_num_seqs - load.running_requests)
    yield from load.readings()
