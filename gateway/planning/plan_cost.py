"""Predicts what a plan costs from what workers publish: time to the first token, and what decodes lose by it (I9).

    prefill worker  waits for its queue | chunks: each reads the KV before it again | then, on the decode worker,
    decode worker   waits for its queue . . . . . . . . . . . . . . . . . . . . . . . | prompt tail, beside its decodes

A worker's model is linear in what a step does (:mod:`pillion.engine.scheduling.step_model`). A price is computed by a
few formulas and without a search, because a gateway weighs several routes for each request. Every price grows with a
worker's load, so that a busier worker never looks cheaper.

Workers compute short prompts before long ones (:func:`pillion.rules.priority.prompt_order`), and prices follow it: a
request waits for the part of a queue that goes first, and costs later requests what this order costs
(:class:`PromptLengths`).

A decode worker that shares a core lending table (:mod:`pillion.host.core_lending_table`) with prefill workers borrows
their cores, so it is as fast as the whole table, and prompts are not split between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pillion.engine.scheduling.step_model import (
    MIN_TAIL_TOKENS,
    StepModel,
    seconds_beside,
)
from pillion.wire.registry import ComponentRecord

# These are the seconds that the call which starts a prefill range takes on one machine, and those that the
# acknowledgement of each chunk takes.
SPAN_CALL_S = 0.003
CHUNK_CALL_S = 0.001
# Between nodes of which no fetch was measured, the call that fetches blocks is assumed to take FETCH_CALL_S; where none
# was measured at all, blocks are assumed to come at DEFAULT_BYTES_PER_S.
FETCH_CALL_S = 0.003
DEFAULT_BYTES_PER_S = 1e9
# A fetch may take as long as computing the blocks that it would bring, and at least LEAST_FETCH_S. So where a fetch
# fails, the fetch and the computing after it take at most twice as long as computing alone, or LEAST_FETCH_S longer.
LEAST_FETCH_S = 0.1
# A cost model that was fitted only to steps of fewer tokens than this does not know what a chunk costs.
MIN_CHUNK_SEEN_TOKENS = 64
# Where a decode worker has no target for inter-token latency, a step that takes longer than this harms its streams.
DEFAULT_TARGET_S = 0.1
# The queue that a heartbeat reports is assumed to shrink as the heartbeat ages, because the worker computes, but only
# for this long: a worker that stays silent for longer may compute nothing.
MAX_REPORT_FADE_S = 2.0
# Where the times that a worker's fitted cost model predicts are more than this many times longer, or shorter, than
# those of the median worker of its role, the median worker's model is used in its place: an absurd fit must neither
# attract all requests nor repel them.
MAX_ODDS = 16.0
# The fitted cost models of workers are compared by what they predict for a prefill range of this many tokens.
COMPARED_TOKENS = 512
# The results of this many comparisons of fitted cost models are remembered, because plans are made more often than
# heartbeats bring new ones.
MAX_COMPARED = 4096
# Where a request waits until a running stream ends, that stream is assumed to generate this many tokens until then.
ASSUMED_ANSWER_TOKENS = 128
# Queued tokens are assumed to stand at this position of their prompts, and a stream that no heartbeat has reported yet
# is assumed to have this many tokens of context.
ASSUMED_POSITION = 512
# Until a worker reports how many tokens and streams its steps hold, they are assumed to hold at most this many.
ASSUMED_STEP_TOKENS = 256
ASSUMED_SLOTS = 64
# Lengths of prompts count as unknown when fewer prompts than this are left of them, after fading.
LEAST_SEEN = 1e-3


def queued_token_s(model: StepModel, step_tokens: float, step_s: float) -> float:
    """Returns the seconds that each queued token takes, where a step computes ``step_tokens`` queued tokens and would
    cost ``step_s`` without them."""
    return model.tail_token_s(ASSUMED_POSITION) + (step_s + model.chunk_s(ASSUMED_POSITION)) / step_tokens


class PromptLengths(NamedTuple):
    """Says how long prompts are, counted in the tokens that have to be computed for them; 0.0 where that is not known.

    Attributes:
        mean_tokens: the mean length of a prompt.
        typical_tokens: the length of the prompt that a worker is busy with, on the average: the mean, where each prompt
            weighs as much as it is long.
    """

    mean_tokens: float = 0.0
    typical_tokens: float = 0.0

    def follower_share(self, tokens: int) -> float:
        """Returns about the share of the seconds of a prompt of ``tokens`` tokens, 0 to 1, that it costs to have it
        served beside a request that comes after it: one that is not shorter waits for it, and for one that is shorter
        it waits itself. It is 1.0 where nothing is known."""
        return min(1.0, self.mean_tokens / tokens) if self.mean_tokens and tokens > 0 else 1.0


UNKNOWN_LENGTHS = PromptLengths()


class Queue(NamedTuple):
    """Describes what a request finds on a worker.

    Attributes:
        prompts_s: how many seconds pass until the prompts that came earlier are computed.
        prompts: how many there are; 0 where that is not known.
        token_s: how many seconds each queued token takes.
        step_s: how many seconds pass at least before a prompt is begun, as long as there is another one.
        typical_tokens: how many tokens of a prompt are typically computed there; 0.0 where that is not known.
        held_s: how many seconds longer the request waits for something other than prompts.
    """

    prompts_s: float
    prompts: float
    token_s: float
    step_s: float
    typical_tokens: float
    held_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """Gives the seconds until everything that came earlier is done."""
        return self.held_s + self.prompts_s

    def held(self, seconds: float) -> Queue:
        """Returns this queue where the request has to wait some seconds for something other than prompts, too."""
        return self._replace(held_s=self.held_s + seconds)

    def own_wait_s(self, tokens: int, whole: int) -> float:
        """Returns how many seconds it costs to have ``tokens`` tokens of a prompt computed there, of which ``whole``
        tokens have to be computed in all.

        It waits for all prompts if they are not longer than it on the average. If they are, it overtakes them
        (:func:`pillion.rules.priority.prompt_order`), and each of them waits for it. What a longer prompt waits counts
        less, in proportion to its length: so long waits are judged, and so workers bound them.
        """
        if self.prompts_s <= 0 or not self.prompts:
            return self.wait_s
        shorter = whole / self.typical_tokens if whole < self.typical_tokens else 1.0
        passing_s = self.prompts * tokens * shorter * self.token_s
        return self.held_s + min(self.prompts_s, max(self.step_s, passing_s))


def _queue_wait_s(component: ComponentRecord, sent_tokens: int, token_s: float) -> float:
    """Returns the seconds until a worker's queue is computed: either the time for the tokens that gateways sent, or the
    time for the queue that the last heartbeat reported, less that heartbeat's age, whichever is larger."""
    fade_s = min(component.heartbeat_age_ms / 1000, MAX_REPORT_FADE_S)
    reported_s = (component.queued_tokens or component.waiting_tokens) * token_s - fade_s
    sent_s = sent_tokens * token_s
    return reported_s if reported_s > sent_s else sent_s


# This cost model stands for no particular machine. It is used while no worker has reported a cost model: workers are
# then compared by their queues, and fetches by the tokens that they save.
DEFAULT_MODEL = StepModel(5e-3, 5e-4, 5e-5, 1e-7, 1e-7)


class Models:
    """Finds the step model of each worker: the one fitted to its own steps or, where that is lacking or absurd, the
    median one of its role or, where no worker of its role has one, of the other role."""

    def __init__(self, decodes: Sequence[ComponentRecord], prefills: Sequence[ComponentRecord]) -> None:
        prefill = middle_model(prefills)
        self._known = prefill is not None
        self._decode = middle_model(decodes) or prefill or DEFAULT_MODEL
        self._prefill = prefill or self._decode
        self._compared_s = {"decode": _compared_s(self._decode), "prefill": _compared_s(self._prefill)}

    def of(self, component: ComponentRecord) -> StepModel:
        """Returns the step model of a worker. A decode worker that has run no chunk yet gets the token costs of prefill
        workers; one that borrows cores is as fast as all cores of its lending table."""
        if component.role == "prefill":
            return self._own(component, self._prefill)
        own, prefill = self._own(component, self._decode), self._prefill
        if component.largest_step_tokens < MIN_CHUNK_SEEN_TOKENS and self._known:
            own = own._replace(token_s=max(own.token_s, prefill.token_s), pair_s=max(own.pair_s, prefill.pair_s))
        borrows = component.core_lending_table and 0 < component.core_share < 1
        return own.at_speed(min(MAX_ODDS, 1 / component.core_share)) if borrows else own

    def rough_token_s(self, component: ComponentRecord) -> float:
        """Returns roughly the seconds that a token in a worker's queue takes, to compare workers."""
        return _compared_s(self.of(component)) / COMPARED_TOKENS

    def _own(self, component: ComponentRecord, middle: StepModel) -> StepModel:
        if not component.step_cost_s:
            return middle
        own = StepModel._make(component.step_cost_s)
        compared_s = self._compared_s[component.role]
        return own if compared_s <= MAX_ODDS * _compared_s(own) <= MAX_ODDS**2 * compared_s else middle


@lru_cache(maxsize=MAX_COMPARED)
def _compared_s(model: StepModel) -> float:
    return model.range_s(0, COMPARED_TOKENS, COMPARED_TOKENS)


def middle_model(workers: Sequence[ComponentRecord]) -> StepModel | None:
    """Returns the step model of the median worker, or None where no worker has one. Of an even number it takes the
    slower of the two in the middle, so that of two workers a model that is too good to be true is not taken."""
    fits = [StepModel._make(component.step_cost_s) for component in workers if component.step_cost_s]
    return sorted(fits, key=_compared_s)[len(fits) // 2] if fits else None


class PrefillSide(NamedTuple):
    """Describes what a plan has to know of a prefill worker.

    Attributes:
        step_tokens: how many tokens each of its steps computes: a chunk, or a part of one.
        queue: what the request finds there.
        lengths: how long the prefill ranges of other requests are.
        extra_s: how many seconds longer a prefill range takes because the worker is on another node than the decode
            worker.
        followers_per_s: requests a second that come to it, and would wait until the present one is done.
    """

    component: ComponentRecord
    model: StepModel
    step_tokens: int
    queue: Queue
    lengths: PromptLengths
    extra_s: float = 0.0
    followers_per_s: float = 0.0

    @classmethod
    def of(
        cls,
        component: ComponentRecord,
        model: StepModel,
        chunk_tokens: int,
        sent_tokens: int,
        lengths: PromptLengths,
        followers_per_s: float,
    ) -> PrefillSide:
        """Describes a prefill worker. ``sent_tokens`` counts the prompt tokens that gateways have sent there and that
        are not computed yet (ClusterSnapshot)."""
        most = component.max_step_tokens
        step_tokens = most if 0 < most < chunk_tokens else chunk_tokens
        token_s = queued_token_s(model, step_tokens, model.step_s)
        queued_s = _queue_wait_s(component, sent_tokens, token_s)
        prompts = component.running_requests + component.waiting_requests
        unreported = max(0, sent_tokens - component.queued_tokens) / (lengths.mean_tokens or chunk_tokens)
        # A short range waits for half of the step under way, and its own step has tokens of a longer one as well.
        queue = Queue(queued_s, prompts + unreported, token_s, 1.5 * token_s * step_tokens, lengths.typical_tokens)
        return cls(component, model, step_tokens, queue, lengths, followers_per_s=followers_per_s)

    def range_s(self, start: int, end: int) -> float:
        """Returns the seconds that a prefill range of the tokens start .. end takes, from the beginning of its first
        chunk to the acknowledgement of its last one."""
        if end <= start:
            return 0.0
        calls_s = SPAN_CALL_S + CHUNK_CALL_S * (-(-(end - start) // self.step_tokens))
        return self.model.range_s(start, end, self.step_tokens) + calls_s + self.extra_s


class DecodeSide(NamedTuple):
    """Describes what a plan for a prompt of ``end`` tokens has to know of a decode worker.

    Attributes:
        model: its step model, on all cores that it may use.
        streams: how many streams run there.
        waiting: how many prompts wait there.
        base_s: how many seconds a step takes that only decodes the streams.
        room: how many tokens of a prompt tail a step computes beside the streams' decodes.
        most: how many tokens a step may compute in all.
        queue: what the request finds there, until the worker has room for one more stream.
        lengths: how long the prompt tails of other requests are.
        limit_s: the inter-token latency that its streams should have.
        followers_per_s: requests a second that come to it, and would wait until the present one is done.
    """

    component: ComponentRecord
    model: StepModel
    end: int
    streams: int
    waiting: int
    base_s: float
    room: float
    most: int
    queue: Queue
    limit_s: float
    lengths: PromptLengths
    followers_per_s: float = 0.0

    @classmethod
    def of(
        cls,
        component: ComponentRecord,
        model: StepModel,
        end: int,
        sent_streams: int,
        sent_tokens: int,
        lengths: PromptLengths,
        followers_per_s: float = 0.0,
    ) -> DecodeSide:
        """Describes a decode worker. ``sent_streams`` counts the streams that gateways have there, ``sent_tokens``
        their prompt tokens that are yet to be computed."""
        streams, context = component.decoding_requests, component.context_tokens
        present = reported = component.running_requests + component.waiting_requests
        waiting = max(0, present - streams)
        if sent_streams > present:
            streams += sent_streams - present
            context += (sent_streams - present) * ASSUMED_POSITION
            present = sent_streams
        base_s = model.plain_s(streams, context)
        most = component.max_step_tokens or ASSUMED_STEP_TOKENS
        room = queue_room = free = float(most - streams) if most > streams else 1.0
        target_s, target_steps = component.target_itl_ms / 1000, component.target_itl_steps
        each_s = model.tail_token_s(end)
        if target_s and streams and each_s:
            fitting = (target_s - base_s - model.chunk_s(end)) / each_s
            room = queue_room = min(free, max(fitting, MIN_TAIL_TOKENS))
        elif target_steps and streams and each_s:
            # Each step is priced as if it computed nothing but the streams' decodes and one prompt tail, so that a
            # busier worker never looks cheaper.
            tail_s = model.chunk_s(max(end, ASSUMED_POSITION))
            plain_s = base_s + tail_s
            fixed_s, longest_s = model.step_s + tail_s, plain_s + most * each_s

            def room_of(prompts: float) -> float:
                step_s = seconds_beside(plain_s, target_steps, prompts, streams, fixed_s, longest_s)
                return min(free, max((step_s - plain_s) / each_s, MIN_TAIL_TOKENS))

            # The worker computes the prompts that came before this one in longer steps: the first of them while all
            # prompts wait, the last of them while two prompts wait. The mean of both numbers stands for all.
            room, queue_room = room_of(1), room_of((waiting + 3) / 2)
            # A step on this worker takes at most target_s, so its streams wait no longer for a token.
            target_s = plain_s + room * each_s
        queued_s = queued_token_s(model, queue_room, base_s)
        slots, held_s = component.running_requests + component.free_seqs or ASSUMED_SLOTS, 0.0
        if present >= slots:
            held_s = (present + 1 - slots) * base_s * ASSUMED_ANSWER_TOKENS / slots
        wait_s, unreported = _queue_wait_s(component, sent_tokens, queued_s), present - reported
        queue = Queue(wait_s, waiting + unreported, queued_s, base_s / 2, lengths.typical_tokens, held_s)
        return cls(
            component,
            model,
            end,
            streams,
            waiting,
            base_s,
            room,
            most,
            queue=queue,
            limit_s=target_s or DEFAULT_TARGET_S,
            lengths=lengths,
            followers_per_s=followers_per_s,
        )

    def tail_s(self, start: int) -> tuple[float, float]:
        """Returns two numbers of seconds: how long the prompt's tokens from ``start`` on take, once begun, until the
        first new token; and how much time the worker's streams lose by them in all, because steps take longer than the
        latency that the streams should have."""
        tokens = self.end - start
        # The number of steps is not rounded up, so that a little more load never makes another number of steps look
        # better.
        steps = max(1.0, tokens / self.room)
        seconds = self._steps_s(steps, start, self.end)
        if not self.streams:
            return seconds, 0.0
        has_target = self.component.target_itl_ms or self.component.target_itl_steps
        piece = min(tokens, self.room if has_target else self.most)
        step_s = self.base_s + self.model.chunk_s(self.end) + piece * self.model.tail_token_s(self.end)
        return seconds, max(0.0, step_s - self.limit_s) * steps * self.streams

    def _steps_s(self, steps: float, start: int, end: int) -> float:
        """Returns the seconds that ``steps`` steps take which compute the prompt's tokens start .. end beside the
        streams' decodes."""
        _, token_s, sequence_s, read_s, pair_s = self.model
        tokens, middle = end - start, (start + end) / 2
        reads = steps * middle + tokens / 2
        return steps * (self.base_s + sequence_s) + tokens * (token_s + pair_s * middle) + reads * read_s


def _followers_lose_s(per_s: float, wait_s: float, work_s: float, lengths: PromptLengths, tokens: int) -> float:
    """Returns how many seconds longer all waits are together because a request with ``work_s`` seconds of work, of
    ``tokens`` prompt tokens, is served beside those that come after it: ``per_s`` come each second until its wait of
    ``wait_s`` seconds and its work are done. Where the order is that of arrival, each of them waits for what is left of
    the work; but one with a shorter prompt overtakes it."""
    lost_s = work_s * lengths.follower_share(tokens)
    return per_s * lost_s * (max(0.0, wait_s) + work_s - lost_s / 2)


def route_s(prefill: PrefillSide | None, decode: DecodeSide, cached: int, split: int, fetch_s: float) -> float:
    """Returns what a route costs: the predicted time to the first token, what running streams lose by it, and what
    later requests lose.

    Args:
        prefill: the worker that computes the prompt's tokens cached .. split; None where both are equal.
        fetch_s: how long blocks are fetched before anything is computed.
    """
    begun_s, others_s = fetch_s, 0.0
    if split > cached and prefill is not None:
        range_s = prefill.range_s(cached, split)
        prefill_wait_s = prefill.queue.own_wait_s(split - cached, decode.end - cached)
        begun_s = max(fetch_s, prefill_wait_s) + range_s
        others_s = _followers_lose_s(prefill.followers_per_s, prefill_wait_s, range_s, prefill.lengths, split - cached)
    seconds, lost_s = decode.tail_s(split)
    wait_s = decode.queue.own_wait_s(decode.end - split, decode.end - cached)
    others_s += lost_s + _followers_lose_s(decode.followers_per_s, wait_s, seconds, decode.lengths, decode.end - split)
    return (begun_s if begun_s > wait_s else wait_s) + seconds + others_s


class RecentLengths:
    """Measures how long prompts are; the weight of each fades."""

    def __init__(self) -> None:
        self._count = self._tokens = self._squares = 0.0

    def note(self, tokens: int) -> None:
        """Notes a prompt of which ``tokens`` tokens have to be computed; one without any is none."""
        if tokens > 0:
            self._count, self._tokens, self._squares = (
                self._count + 1,
                self._tokens + tokens,
                self._squares + tokens * tokens,
            )

    def fade(self, left: float) -> None:
        """Multiplies the weights of all earlier prompts by ``left``."""
        self._count, self._tokens, self._squares = self._count * left, self._tokens * left, self._squares * left

    def now(self) -> PromptLengths:
        """Returns how long the prompts of late are."""
        if self._count < LEAST_SEEN:
            return UNKNOWN_LENGTHS
        return PromptLengths(self._tokens / self._count, self._squares / self._tokens)


class Demand:
    """Measures, as decaying means, how many requests a second a gateway plans, how many of them use prefill workers,
    and how many prompt tokens each kind of worker has to compute for them.

    Attributes:
        decode_lengths, prefill_lengths: tokens of a prompt that decode workers compute, and that prefill workers do.
    """

    FADING_S = 20.0

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._all_per_s = 0.0
        self._shared_per_s = 0.0
        self.decode_lengths, self.prefill_lengths = RecentLengths(), RecentLengths()

    def note(self, now: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Notes one more request, and of how many tokens of its prompt a prefill worker and a decode worker compute the
        KV."""
        self._fade(now)
        self._all_per_s += 1 / self.FADING_S
        self._shared_per_s += (prefill_tokens > 0) / self.FADING_S
        self.prefill_lengths.note(prefill_tokens)
        self.decode_lengths.note(decode_tokens)

    def per_s(self, now: float) -> tuple[float, float]:
        """Returns how many requests come a second, and how many a second use prefill workers."""
        self._fade(now)
        return self._all_per_s, self._shared_per_s

    def _fade(self, now: float) -> None:
        left = math.exp(min(0.0, self._seen_s - now) / self.FADING_S)
        self._all_per_s, self._shared_per_s, self._seen_s = self._all_per_s * left, self._shared_per_s * left, now
        self.decode_lengths.fade(left)
        self.prefill_lengths.fade(left)


class FetchCost(NamedTuple):
    """Says how many seconds a fetch takes: those of the call, and those of each block."""

    call_s: float
    block_s: float

    def seconds(self, blocks: int) -> float:
        """Returns how long a fetch of so many blocks takes; none takes no time."""
        return self.call_s + blocks * self.block_s if blocks > 0 else 0.0


class FetchPace:
    """Measures, with decaying weights, how fast this gateway's fetches bring blocks from one kind of source. Times are
    in seconds of one clock.

    A slow source is not asked, so nothing more is learnt of it. Its speed is therefore assumed to rise while nobody
    asks it, until one request tries it again, at a bounded cost (LEAST_FETCH_S).
    """

    FADING = 0.9
    # For each HALVING_S seconds without a fetch, a block is assumed to take half as long as before, but no more than
    # MAX_HALVINGS times.
    HALVING_S = 60.0
    MAX_HALVINGS = 10
    # Fetches of about one size do not tell the time of a call from that of a block. Least squares therefore also count
    # a line without a call time, with this share of the squared mean size as its weight.
    PROPORTIONAL = 0.01

    def __init__(self) -> None:
        self._count = 0.0
        self._blocks = 0.0
        self._squares = 0.0
        self._seconds = 0.0
        self._products = 0.0
        self._seen_s = 0.0

    def observe(self, blocks: int, seconds: float, now: float) -> None:
        """Notes a fetch that brought ``blocks`` blocks in ``seconds``, and ended ``now``. A fetch that brought no block
        counts too, but not one of 0 seconds, which has asked no source."""
        if seconds <= 0:
            return
        # The time of a fetch that brought nothing makes all other fetches dearer by as much, whatever their sizes.
        size = blocks if blocks > 0 else self._blocks / max(self._count, 1.0)
        self._count = self._count * self.FADING + (blocks > 0)
        self._blocks = self._blocks * self.FADING + blocks
        self._squares = self._squares * self.FADING + blocks * blocks
        self._seconds = self._seconds * self.FADING + seconds
        self._products = self._products * self.FADING + size * seconds
        self._seen_s = now

    def block_s(self, now: float) -> float:
        """Returns the seconds that a block takes, with its share of the calls; 0.0 before any fetch ended. Where
        fetches have brought no block yet, all their time counts as that of one block."""
        return self._seconds / max(self._blocks, 1.0) * self._faded(now)

    def cost(self, now: float) -> FetchCost:
        """Returns the line through the fetches seen, by least squares; neither of its two numbers is negative."""
        if self._blocks < 1.0:
            return FetchCost(0.0, self.block_s(now))
        size, taken_s = self._blocks / self._count, self._seconds / self._count
        pull = self.PROPORTIONAL * size * size
        spread = max(0.0, self._squares / self._count - size * size)
        slope = (self._products / self._count - size * taken_s + pull * taken_s / size) / (spread + pull)
        slope = min(max(0.0, slope), taken_s / size)
        faded = self._faded(now)
        return FetchCost(max(0.0, taken_s - slope * size) * faded, slope * faded)

    def _faded(self, now: float) -> float:
        silent_s = max(0.0, now - self._seen_s)
        return math.exp2(-min(silent_s / self.HALVING_S, self.MAX_HALVINGS))


class FetchPaces:
    """Holds the pace of each pair of nodes between which this gateway's requests fetched blocks: links differ.

    Attributes:
        anywhere: the pace over all pairs, which a pair is assumed to have that was never measured.
    """

    # The pair that was measured longest ago is forgotten for a further one.
    MAX_PAIRS = 4096

    def __init__(self) -> None:
        self.anywhere = FetchPace()
        self._pairs: dict[tuple[str, str], FetchPace] = {}

    def observe(self, source: str, target: str, blocks: int, seconds: float, now: float) -> None:
        """Notes a fetch to the node ``target`` that asked ``source`` first: that is what a plan has to foretell. Its
        ``seconds`` are those of the gateway's call, by which far nodes differ from near ones too."""
        if seconds <= 0:
            return
        self.anywhere.observe(blocks, seconds, now)
        pace = self._pairs.pop((source, target), None) or FetchPace()
        pace.observe(blocks, seconds, now)
        self._pairs[source, target] = pace
        if len(self._pairs) > self.MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def cost(self, source: str, target: str, now: float) -> FetchCost | None:
        """Returns what a fetch from ``source`` to ``target`` costs; None where none was measured."""
        pace = self._pairs.get((source, target))
        return None if pace is None else pace.cost(now)


def unmeasured(source: str, target: str) -> FetchCost | None:
    """Returns what a fetch between two nodes costs where no fetch was measured yet."""
