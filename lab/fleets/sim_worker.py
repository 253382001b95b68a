"""A simulated worker: the production scheduler over steps whose cost a model predicts (I9).

    add -> [schedule -> step -> commit] ... -> chunks of prefill ranges, tokens of streams

With ``macro_steps``, a run of steps in which all streams only decode is one event where this changes nothing: the costs
of its steps are drawn as always, and at its end, or at an event in between, the scheduler commits all steps that have
ended at once, as it commits tokens forced by a grammar. This requires that the growth of streams is reserved in advance
and that the cost model is fixed, since each step would update it.
"""

from __future__ import annotations

import itertools
import random
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul

import msgspec
import numpy as np

from lab.fleets.clock import Clock
from pillion.engine.scheduling.block_chain import AdoptedTicket, ChunkDone
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Ending
from pillion.engine.scheduling.sequence import Sequence as Stream
from pillion.engine.scheduling.step_cost import SCALES, Features, StepCost, features
from pillion.engine.scheduling.step_model import StepModel
from pillion.engine.scheduling.step_plan import CommitOrder, Outcome, ScheduledChunk, StepPlan, Update
from pillion.kernels.step import Sampled
from pillion.kvstore.hashing import HASH_BYTES
from pillion.rules.priority import NO_FLOW, Flow
from pillion.types import SamplingParams
from pillion.wire.registry import ComponentRecord, WorkerLoad

ROOT = b"\7" * HASH_BYTES
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0)
# Upper bound of a text's tokens.
MAX_TOKENS = 1 << 30
TOKEN = 1
# Steps per event, and the lowest factor of noise on a step's time.
MAX_RUN_STEPS = 4096
MIN_NOISE = 0.5


class KnownCost(StepCost):
    """An exact cost model that learns nothing."""

    def __init__(self, cost_s: Sequence[float]) -> None:
        super().__init__()
        self._weights = list(map(mul, cost_s, SCALES))
        self.steps = 1

    def observe(self, found: Features, seconds: float, borrowed_s: float = 0.0) -> None:
        """Ignore a measured step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """A worker's costs, flags and noise.

    Attributes:
        cost_s: seconds per step, token, sequence, KV token read and query-key pair (StepCost.weights_s).
        noise: relative standard deviation of a step's time.
        call_s: seconds of a call to the KV node.
        known_cost: the worker starts with ``cost_s`` instead of learning it.
        first_come: the worker has no costs, and so serves prompts in order of arrival.
        macro_steps: see the module; needs ``known_cost``.
    """

    cost_s: tuple[float, ...]
    block_size: int
    max_num_seqs: int
    noise: float
    heartbeat_s: float
    call_s: float
    known_cost: bool = False
    first_come: bool = False
    macro_steps: bool = False


# Called with the times of a stream's next tokens, and the gaps before all but the first.
OnTokens = Callable[[Sequence[float], "array[float]"], None]
NO_GAPS: array[float] = array("d")


@dataclass(slots=True, eq=False)
class WorkerJob:
    """A prefill range or a stream on a worker.

    Attributes:
        tokens: of its text; the KV of ``computed_blocks`` blocks of it exists.
        answer_tokens: tokens to generate; 0: a prefill range, whose chunks end at ``chunk_ends``.
        on_committed: called with the committed tokens of a stream's prompt.
        on_chunk, on_tokens, on_end: called with chunks of a prefill range, tokens of a stream, and the end.
        flow: its tenant's share of the worker.
    """

    tokens: int
    computed_blocks: int
    answer_tokens: int = 0
    chunk_ends: tuple[int, ...] = ()
    on_chunk: Callable[[ChunkDone], None] = lambda chunk: None
    on_committed: Callable[[int], None] = lambda tokens: None
    on_tokens: OnTokens = lambda times, gaps: None
    on_end: Callable[[Ending], None] = lambda ending: None
    flow: Flow = NO_FLOW
    seq_id: int = 0


@dataclass(slots=True)
class StepRun:
    """Decode-only steps in flight: when each ends, and its noise. ``plan``: of the first."""

    plan: StepPlan
    ends_s: list[float]
    noises: list[float]

    def ended(self, now: float) -> int:
        """Return the number of finished steps."""
        return bisect_right(self.ends_s, now)


class SimWorker:
    """A real scheduler on simulated steps. ``record``: as of its last heartbeat; heartbeats come ``phase_s`` after
    whole periods. An idle worker sends none, which makes no difference."""

    def __init__(
        self,
        clock: Clock,
        record: ComponentRecord,
        settings: WorkerSettings,
        number: int,
        phase_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._phase_s = phase_s
        self._weights: list[float] = list(map(mul, settings.cost_s, SCALES))
        self._draw = random.Random(number)
        # Noise drawn for a run that was cut short; used by the next steps.
        self._noises: deque[float] = deque()
        cost = StepModel._make(settings.cost_s)
        self._scheduler = Scheduler(
            blocks=BlockManager(settings.block_size),
            max_num_batched_tokens=record.max_step_tokens,
            max_num_seqs=settings.max_num_seqs,
            target_itl_s=record.target_itl_ms / 1000,
            target_itl_steps=record.target_itl_steps,
            # A worker derives it from its model's shape.
            pair_tokens=cost.pair_s / cost.token_s if cost.token_s else 0.0,
        )
        if settings.known_cost:
            self._scheduler.budget.cost = KnownCost(settings.cost_s)
        elif settings.first_come:
            self._scheduler.budget.cost = KnownCost([0.0] * len(SCALES))
        self._slots = itertools.count()
        self._ids = itertools.count(1)
        self._jobs: dict[int, WorkerJob] = {}
        self._busy = False
        self._cancelled: list[int] = []
        self._run: StepRun | None = None
        # Incremented to make the event at a run's expected end a no-op.
        self._version = 0
        self._load = WorkerLoad(step_cost_s=self._scheduler.budget.cost.weights_s())
        self._beating = False
        self.steps = 0
        self.record = self.earlier = msgspec.structs.replace(
            record, step_cost_s=self._load.step_cost_s, free_seqs=settings.max_num_seqs
        )
        self.beat_s = self._clock.now

    def beat(self) -> None:
        """Publish the worker's record, now and after each heartbeat period while there is work."""
        self.earlier, self.record, self.beat_s = self.record, self.fresh_record(), self._clock.now
        self._beating = bool(self._jobs) or self._busy
        if self._beating:
            self._clock.after(self._settings.heartbeat_s, self.beat)

    def seen(self, at_s: float) -> ComponentRecord:
        """Return the record that the registry had at a recent time, with its age in ms."""
        period_s = self._settings.heartbeat_s
        record, beat_s = (self.record, self.beat_s) if self.beat_s <= at_s else (self.earlier, self.beat_s - period_s)
        if at_s > beat_s:
            beat_s += (at_s - beat_s) // period_s * period_s
        return msgspec.structs.replace(record, heartbeat_age_ms=max(0, int((self._clock.now - beat_s) * 1000)))

    def fresh_record(self) -> ComponentRecord:
        """Return the record that a heartbeat would send now."""
        load = self._load_now()
        return msgspec.structs.replace(
            self.record,
            **msgspec.structs.asdict(load),
            free_seqs=max(0, self._settings.max_num_seqs - load.running_requests - load.waiting_requests),
        )

    def _load_now(self) -> WorkerLoad:
        if self._run is None:
            return self._load
        grown = self._run.ended(self._clock.now) * len(self._run.plan.scheduled)
        return msgspec.structs.replace(self._load, context_tokens=self._load.context_tokens + grown)

    def _begin_beating(self) -> None:
        if not self._beating:
            self._beating, period_s = True, self._settings.heartbeat_s
            passed = (self._clock.now - self._phase_s) // period_s
            self._clock.at(max(self._clock.now, self._phase_s + (passed + 1) * period_s), self.beat)

    @property
    def jobs(self) -> int:
        """Number of prefill ranges and streams."""
        return len(self._jobs)

    def add(self, job: WorkerJob) -> None:
        """Add a prefill range or a stream."""
        self._catch_up()
        job.seq_id, size = next(self._ids), self._settings.block_size
        prefill_range = not job.answer_tokens
        total = job.tokens // size if prefill_range else job.tokens // size + 1
        if self._settings.macro_steps and not prefill_range:
            # One slot more than needed, so that the scheduler never leases.
            total = (job.tokens + job.answer_tokens) // size + 2
        chain, leased = self._take(job.computed_blocks), self._take(total - job.computed_blocks)
        holding = AdoptedTicket(job.seq_id, chain, leased)
        stream = Stream(
            holding,
            size,
            self._clock.now,
            seq_id=job.seq_id,
            token_ids=np.full(job.tokens, TOKEN, dtype=np.int32),
            parent_hash=ROOT,
            prompt_tokens=job.tokens,
            sampling=None if prefill_range else replace(GREEDY, max_tokens=job.answer_tokens),
            max_model_len=0 if prefill_range else MAX_TOKENS,
            chunk_ends=job.chunk_ends,
            flow=job.flow,
            hashes=bytes(job.tokens // size * HASH_BYTES),
        )
        self._jobs[job.seq_id] = job
        self._begin_beating()
        self._scheduler.add(stream, self._clock.now)
        self._step()

    def cancel(self, job: WorkerJob) -> None:
        """Cancel a job."""
        if self._jobs.pop(job.seq_id, None) is not None:
            self._catch_up()
            self._cancelled.append(job.seq_id)
            self._step()

    def check_integrity(self) -> None:
        """Raise AssertionError on an inconsistent scheduler or a job that it lacks."""
        self._scheduler.check_integrity()
        assert self._jobs.keys() <= self._scheduler.sequences.keys(), "a job is left that the scheduler does not have"

    def _take(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._slots, count))

    def _step(self) -> None:
        if self._busy:
            return
        # Not during a step, which computes what it began with.
        for seq_id in self._cancelled:
            self._scheduler.cancel(seq_id, self._clock.now)
        self._cancelled.clear()
        plan = self._scheduler.schedule(self._clock.now)
        self._apply(self._scheduler.flush(self._clock.now))
        if plan.scheduled:
            self._busy = True
            self._begin(plan)

    def _begin(self, plan: StepPlan) -> None:
        count, found = self._plain_steps(plan), list(features(plan.scheduled))
        if count < 2:
            self._clock.after(self._cost_s(found) * self._noise(), lambda: self._done(plan))
            return
        now, streams = self._clock.now, len(plan.scheduled)
        run = StepRun(plan, [], [])
        # Each step reads one more token and pairs one more per stream. SCALES are powers of two, so the sum equals
        # features() exactly.
        more_reads, more_pairs = streams / SCALES[3], streams / SCALES[4]
        for _ in range(count):
            noise = self._noise()
            now += self._cost_s(found) * noise
            run.ends_s.append(now)
            run.noises.append(noise)
            found[3] += more_reads
            found[4] += more_pairs
        self._run = run
        self._version += 1
        self._clock.at(now, lambda version=self._version: self._run_over(version))  # type: ignore[misc]

    def _cost_s(self, found: Sequence[float]) -> float:
        step, token, row, read, pair = self._weights
        return step * found[0] + token * found[1] + row * found[2] + read * found[3] + pair * found[4]

    def _noise(self) -> float:
        if self._noises:
            return self._noises.popleft()
        return max(MIN_NOISE, self._draw.gauss(1.0, self._settings.noise))

    def _plain_steps(self, plan: StepPlan) -> int:
        """Return how many steps from this one on only decode and end no stream; 0 if they may not be joined."""
        if not self._settings.macro_steps:
            return 0
        queues = self._scheduler.queues
        # With several tenants a waiting request may have its turn after any step.
        idle = not (queues.waiting or queues.preempted) or not (queues.free_seqs or queues.flows.several)
        if not idle or len(plan.scheduled) != len(queues.running):
            return 0
        least = MAX_RUN_STEPS
        for chunk in plan.scheduled:
            stream = chunk.sequence
            if not stream.decoding or chunk.count != 1 or chunk.samples != 1:
                return 0
            least = min(least, stream.max_length - stream.num_tokens - 1)
        return least

    def _run_over(self, version: int) -> None:
        if version == self._version and self._run is not None:
            self._commit_run(self._run, len(self._run.ends_s))
            self._step()

    def _catch_up(self) -> None:
        """Commit the finished steps of a run; the one in flight becomes a step of its own."""
        run = self._run
        if run is None:
            return
        count = run.ended(self._clock.now)
        plan = run.plan
        if count:
            began_s = run.ends_s[count - 1]
            self._commit_run(run, count)
            if count == len(run.ends_s):
                self._step()
                return
            self._busy = True
            plan = self._scheduler.schedule(began_s)
            self._apply(self._scheduler.flush(began_s))
        self._run, self._version = None, self._version + 1
        self._noises.extendleft(reversed(run.noises[count + 1 :]))
        self._clock.at(run.ends_s[count], lambda: self._done(plan))

    def _commit_run(self, run: StepRun, count: int) -> None:
        """Commit the first ``count`` steps of the run as one with known tokens."""
        self._run, self._version, self._busy = None, self._version + 1, False
        ends_s = run.ends_s[:count]
        if count > 1:
            ids = np.full(count - 1, TOKEN, dtype=np.int32)
            for chunk in run.plan.scheduled:
                chunk.sequence.propose(ids, forced=True)
        scheduled = tuple(ScheduledChunk(chunk.sequence, chunk.start, count, 1) for chunk in run.plan.scheduled)
        plan = replace(run.plan, scheduled=scheduled)
        gaps = array("d", [after - before for before, after in itertools.pairwise(ends_s)])
        self.steps += count
        outcome = self._scheduler.commit(plan, Sampled((TOKEN,) * len(scheduled)), ends_s[-1])
        self._apply(outcome, ends_s, gaps)

    def _done(self, plan: StepPlan) -> None:
        self._busy = False
        self.steps += 1
        sampled = Sampled((TOKEN,) * sum(chunk.samples for chunk in plan.scheduled))
        outcome = self._scheduler.commit(plan, sampled, self._clock.now)
        self._apply(outcome)
        self._step()

    def _apply(self, outcome: Outcome, times: Sequence[float] = (), gaps: array[float] = NO_GAPS) -> None:
        if outcome.empty:
            return
        self._load = WorkerLoad(**outcome.load)
        for update in outcome.updates:
            self._emit(update, times or (self._clock.now,), gaps)
        for chunk in outcome.chunks:
            self._emit_chunk(chunk)
        for order in outcome.commits:
            self._clock.after(self._settings.call_s, lambda order=order: self._committed(order))  # type: ignore[misc]
        if outcome.lease_blocks:
            slots = self._take(outcome.lease_blocks)
            self._clock.after(self._settings.call_s, lambda: self._granted(slots))

    def _emit(self, update: Update, times: Sequence[float], gaps: array[float]) -> None:
        job = self._jobs.get(update.seq_id)
        if job is None:
            return
        if update.token_ids:
            job.on_tokens(times, gaps)
        if update.ending is not None:
            del self._jobs[update.seq_id]
            job.on_end(update.ending)

    def _emit_chunk(self, chunk: ChunkDone) -> None:
        job = self._jobs.get(chunk.seq_id)
        if job is not None:
            job.on_chunk(chunk)

    def _committed(self, order: CommitOrder) -> None:
        self._catch_up()
        self._scheduler.committed(order.seq_id, order.slots, "", self._clock.now)
        for chunk in order.chunks:
            self._emit_chunk(chunk)
        stream, job = self._scheduler.sequences.get(order.seq_id), self._jobs.get(order.seq_id)
        if stream is not None and job is not None and not stream.is_prefill:
            job.on_committed(stream.num_committed * self._settings.block_size)
            if self._settings.macro_steps and stream.decoding and not stream.in_commit and stream.may_commit:
                # Simulated nodes (prefix_store) track blocks of prompts only.
                stream.refuse_commit()
        self._step()

    def _granted(self, slots: tuple[int, ...]) -> None:
        self._catch_up()
        self._scheduler.granted(slots, self._clock.now)
        self._step()
