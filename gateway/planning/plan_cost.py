"""What a plan costs, predicted from what workers publish: time to the first token, and what decodes lose by it (I9).

    prefill worker  waits for its queue | chunks: each reads the KV before it again | then, on the decode worker,
    decode worker   waits for its queue . . . . . . . . . . . . . . . . . . . . . . . | prompt tail, beside its decodes

A worker's model is linear in what a step does (:mod:`pillion.engine.scheduling.step_cost`). Everything here is closed
arithmetic: a gateway weighs dozens of ways for each request. Every price grows with load, so more load never attracts.

Workers that share a board of cores (:mod:`pillion.core_board`) have one budget of compute. A decode worker there has
all cores that nobody else uses, and what a prefill worker computes takes cores from it (:class:`Board`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from pillion.wire.registry import ComponentRecord

# Seconds of the call that starts a span, and of each chunk's acknowledgement, on one machine.
SPAN_CALL_S = 0.003
CHUNK_CALL_S = 0.001
# Seconds of the call that fetches blocks, and the rate assumed where none was measured.
FETCH_CALL_S = 0.003
DEFAULT_BYTES_PER_S = 1e9
# A fetch may take as long as computing what it would bring, and at least this long: then it and computing nevertheless
# take at most twice as long as computing alone, or so much longer, whatever a source does.
LEAST_FETCH_S = 0.1
# A prompt tail gets this many tokens of a step however late the decodes are
# (pillion.engine.scheduling.step_cost.MIN_TAIL_TOKENS).
MIN_TAIL_TOKENS = 16
# With a target in plain steps, a step may be longer where more prompts than this wait for each stream, until it gets so
# much of the work done that the largest step gets done in the same time
# (pillion.engine.scheduling.step_cost.WAITING_PER_DECODE, LEAST_THROUGHPUT).
WAITING_PER_DECODE = 0.5
LEAST_THROUGHPUT = 0.9
# A fit that has seen no larger step than this does not know what a chunk costs.
MIN_CHUNK_SEEN_TOKENS = 64
# Where a decode worker has no target, a step that takes longer than this harms its streams.
DEFAULT_TARGET_S = 0.1
# The queue that a heartbeat reports shrinks with its age, as the worker computes; longer silence is no sign of work.
MAX_REPORT_FADE_S = 2.0
# A worker whose fit says so many times less, or more, than the middle one of its role is judged by that one: what is
# absurd must not attract everything, nor drive it away.
MAX_ODDS = 16.0
# On a span of so many tokens they are compared.
COMPARED_TOKENS = 512
# Fits of which that is remembered: workers change theirs with every heartbeat, plans are made more often.
MAX_COMPARED = 4096
# Tokens that a running stream is assumed to generate where another one waits for its slot.
ASSUMED_ANSWER_TOKENS = 128
# Where the tokens of somebody's queue stand in their prompts, and the context of a stream that was not reported.
ASSUMED_POSITION = 512
# What a worker's steps are taken to hold until it reports how many tokens and streams they do.
ASSUMED_STEP_TOKENS = 256
ASSUMED_SLOTS = 64


class StepModel(NamedTuple):
    """Seconds of a step, and of each token, sequence, KV token read and query-key pair in it."""

    step_s: float
    token_s: float
    sequence_s: float
    read_s: float
    pair_s: float

    def span_s(self, start: int, end: int, step_tokens: int) -> float:
        """Tokens start .. end computed alone, ``step_tokens`` in a step: every step reads the KV before it again."""
        tokens = end - start
        if tokens <= 0:
            return 0.0
        steps = -(-tokens // step_tokens)
        reads = steps * start + tokens * (steps + 1) / 2
        pairs = tokens * (start + (tokens + 1) / 2)
        fixed = steps * (self.step_s + self.sequence_s)
        return fixed + tokens * self.token_s + reads * self.read_s + pairs * self.pair_s

    def at_speed(self, speed: float) -> StepModel:
        """The model on cores that are so many times as fast together."""
        return StepModel._make([weight_s / speed for weight_s in self])

    def queued_token_s(self, step_tokens: float, step_s: float) -> float:
        """Seconds of each queued token, ``step_tokens`` of them in a step that costs ``step_s`` by itself."""
        fixed_s = step_s + self.sequence_s + self.read_s * ASSUMED_POSITION
        return self.token_s + self.read_s + self.pair_s * ASSUMED_POSITION + fixed_s / step_tokens


def _queue_wait_s(component: ComponentRecord, sent_tokens: int, token_s: float) -> float:
    """Seconds until a worker's queue is computed: what gateways sent, or what the heartbeat reported less the time
    since then, whichever is more."""
    fade_s = min(component.heartbeat_age_ms / 1000, MAX_REPORT_FADE_S)
    reported_s = (component.queued_tokens or component.waiting_tokens) * token_s - fade_s
    sent_s = sent_tokens * token_s
    return reported_s if reported_s > sent_s else sent_s


# A model of no machine in particular: with it, equal workers compare by their queues, and calls by the tokens that they
# save.
DEFAULT_MODEL = StepModel(5e-3, 5e-4, 5e-5, 1e-7, 1e-7)


class Models:
    """The model of each worker: its own fit; of a worker that has none yet, or an absurd one, the middle one of its
    role, or of any."""

    def __init__(self, decodes: Sequence[ComponentRecord], prefills: Sequence[ComponentRecord]) -> None:
        prefill = middle_model(prefills)
        self._known = prefill is not None
        self._decode = middle_model(decodes) or prefill or DEFAULT_MODEL
        self._prefill = prefill or self._decode
        self._compared_s = {"decode": _compared_s(self._decode), "prefill": _compared_s(self._prefill)}

    def of(self, component: ComponentRecord) -> StepModel:
        """The model of a worker. A decode worker that has run no chunk yet has the token costs of prefill workers."""
        if component.role == "prefill":
            return self._own(component, self._prefill)
        own, prefill = self._own(component, self._decode), self._prefill
        if component.largest_step_tokens >= MIN_CHUNK_SEEN_TOKENS or not self._known:
            return own
        return own._replace(token_s=max(own.token_s, prefill.token_s), pair_s=max(own.pair_s, prefill.pair_s))

    def rough_token_s(self, component: ComponentRecord) -> float:
        """Seconds of a token in a queue, to compare workers by."""
        return _compared_s(self.of(component)) / COMPARED_TOKENS

    def _own(self, component: ComponentRecord, middle: StepModel) -> StepModel:
        if not component.step_cost_s:
            return middle
        own = StepModel._make(component.step_cost_s)
        compared_s = self._compared_s[component.role]
        return own if compared_s <= MAX_ODDS * _compared_s(own) <= MAX_ODDS**2 * compared_s else middle


@lru_cache(maxsize=MAX_COMPARED)
def _compared_s(model: StepModel) -> float:
    return model.span_s(0, COMPARED_TOKENS, COMPARED_TOKENS)


def middle_model(workers: Sequence[ComponentRecord]) -> StepModel | None:
    """The median model, of two the slower one: a model that is too good to be true is then the odd one."""
    fits = [StepModel._make(component.step_cost_s) for component in workers if component.step_cost_s]
    return sorted(fits, key=_compared_s)[len(fits) // 2] if fits else None


class PrefillSide(NamedTuple):
    """A prefill worker as a plan sees it.

    Attributes:
        step_tokens: tokens of a step, which is a chunk or a part of one.
        wait_s: until its queue is computed.
        token_s: of each token behind that, roughly.
        extra_s: what it costs that it is on another node.
        followers_per_s: requests that come to it, and would wait behind ours.
    """

    component: ComponentRecord
    model: StepModel
    step_tokens: int
    wait_s: float
    token_s: float
    extra_s: float = 0.0
    followers_per_s: float = 0.0

    @classmethod
    def of(
        cls, component: ComponentRecord, model: StepModel, chunk_tokens: int, sent_tokens: int, followers_per_s: float
    ) -> PrefillSide:
        """``sent_tokens``: what gateways have sent and not got back (ClusterSnapshot)."""
        most = component.max_step_tokens
        step_tokens = most if 0 < most < chunk_tokens else chunk_tokens
        token_s = model.queued_token_s(step_tokens, model.step_s)
        wait_s = _queue_wait_s(component, sent_tokens, token_s)
        return cls(component, model, step_tokens, wait_s, token_s, 0.0, followers_per_s)

    def span_s(self, start: int, end: int) -> float:
        """Seconds from the first chunk's begin to the last one's acknowledgement."""
        if end <= start:
            return 0.0
        calls_s = SPAN_CALL_S + CHUNK_CALL_S * (-(-(end - start) // self.step_tokens))
        return self.model.span_s(start, end, self.step_tokens) + calls_s + self.extra_s


class Board(NamedTuple):
    """How a decode worker and the prefill workers of its host share their cores, as a plan sees it.

    Attributes:
        speed: of the decode worker while prefill workers have nothing to do; 1 is that of its own cores.
        slower: how many times as long its work takes while they compute.
        busy_s: for how long they do, with what they have.
        beside: how many times as long its work takes while a prefill worker computes that had nothing to do.
        span_factor: how many times as long a prefill worker needs for a span as the decode worker would alone.
        follower_tokens: prompt tokens of the requests that come, on the average.
    """

    speed: float
    slower: float
    busy_s: float
    beside: float
    span_factor: float
    follower_tokens: float

    @classmethod
    def of(
        cls,
        component: ComponentRecord,
        mates: Sequence[ComponentRecord],
        sent_tokens: Mapping[str, int],
        follower_tokens: float,
    ) -> Board:
        """The board of a decode worker. ``mates``: all workers of the board, ``sent_tokens``: what gateways have sent
        to each component and not got back."""
        own_share, prefill_share = component.core_share, 0.0
        idle_share, computing_share, computing_s = 1.0 - own_share, 0.0, 0.0
        # Workers that compute, which borrow in equal parts what is idle. A prompt of ours makes this one compute.
        decodes, prefills = 1, 0
        for mate in mates:
            name, share = mate.component_id, mate.core_share
            tokens = max(mate.queued_tokens, mate.waiting_tokens, sent_tokens.get(name, 0))
            if mate.role == "prefill":
                # A plan may use any of them: the one with the most cores takes the most from the decode worker.
                prefill_share = max(prefill_share, share)
            if name == component.component_id or not (tokens or mate.running_requests):
                continue
            idle_share -= share
            if mate.role == "decode":
                decodes += 1
                continue
            prefills, computing_share = prefills + 1, computing_share + share
            if mate.step_cost_s:
                model = StepModel._make(mate.step_cost_s)
                steps = mate.max_step_tokens or ASSUMED_STEP_TOKENS
                computing_s += share * tokens * model.queued_token_s(steps, model.step_s)
        idle_share = max(0.0, idle_share)
        # Once prefill workers are done, their cores are as idle as the rest, and only decode workers borrow.
        speed = 1.0 + (idle_share + computing_share) / (decodes * own_share)
        speed_now = 1.0 + idle_share / ((decodes + prefills) * own_share)
        # Each for as long as its own cores need, on the average over the cores.
        busy_s = computing_s / computing_share if computing_share else 0.0
        has_work = component.running_requests or component.queued_tokens or sent_tokens.get(component.component_id)
        # A span has the prefill worker's own cores, and its part of those of others that have nothing to do: this
        # decode worker's, too, unless it has streams or prompts. Alone, the decode worker would have speed * own_share.
        lent_share = max(0.0, idle_share - prefill_share) + (0.0 if has_work else own_share)
        span_share = prefill_share + lent_share / (decodes + prefills)
        span_factor = speed * own_share / span_share if prefill_share else 1.0
        # The prefill worker's cores are then missing from what decode workers borrow; nobody takes their own.
        speed_beside = max(1.0, speed - prefill_share / (decodes * own_share))
        return cls(speed, speed / speed_now, busy_s, speed / speed_beside, span_factor, follower_tokens)

    def passed_s(self, seconds: float) -> float:
        """How long the decode worker needs for what takes ``seconds`` while prefill workers have nothing to do."""
        # Slowed to the end, or only as long as they are busy: in that time it gets 1 / slower of it done.
        return min(seconds * self.slower, seconds + self.busy_s * (1 - 1 / self.slower))


class DecodeSide(NamedTuple):
    """A decode worker as a plan for a prompt of ``end`` tokens sees it.

    Attributes:
        model: on the cores that it has while prefill workers of its board have nothing to do.
        streams: how many run there.
        waiting: how many prompts wait there.
        base_s: a step of the streams alone.
        room: tokens of a prompt tail that a step takes beside them.
        most: tokens that a step may take in all.
        wait_s: until the prompt tails before ours are computed, and a slot is free.
        limit_s: the inter-token latency that its streams should have.
        followers_per_s: requests that come to it, and would wait behind ours.
        board: its host's cores where workers share them.
    """

    component: ComponentRecord
    model: StepModel
    end: int
    streams: int
    waiting: int
    base_s: float
    room: float
    most: int
    wait_s: float
    limit_s: float
    followers_per_s: float = 0.0
    board: Board | None = None

    @classmethod
    def of(
        cls,
        component: ComponentRecord,
        model: StepModel,
        end: int,
        sent_streams: int,
        sent_tokens: int,
        followers_per_s: float = 0.0,
        board: Board | None = None,
    ) -> DecodeSide:
        """``sent_streams`` and ``sent_tokens``: what gateways have there, and prompt tokens of it to be computed.
        ``model`` is on the worker's own cores."""
        if board is not None:
            model = model.at_speed(board.speed)
        step_s, token_s, sequence_s, read_s, pair_s = model
        streams, context = component.decoding_requests, component.context_tokens
        present = component.running_requests + component.waiting_requests
        waiting = max(0, present - streams)
        if sent_streams > present:
            streams += sent_streams - present
            context += (sent_streams - present) * ASSUMED_POSITION
            present = sent_streams
        base_s = step_s + streams * (token_s + sequence_s) + context * (read_s + pair_s)
        most = component.max_step_tokens or ASSUMED_STEP_TOKENS
        room = float(most - streams) if most > streams else 1.0
        target_s, target_steps = component.target_itl_ms / 1000, component.target_itl_steps
        each_s = token_s + read_s + pair_s * end
        crowd, crowded_room = 0.0, room
        if target_s and each_s:
            fitting = (target_s - base_s - sequence_s - read_s * end) / each_s
            room = min(room, max(fitting, MIN_TAIL_TOKENS))
        elif target_steps and streams and each_s:
            # As if all of a step were plain but the tail's tokens: a busier worker then never looks cheaper.
            tail_s = sequence_s + read_s * max(end, ASSUMED_POSITION)
            plain_s = base_s + tail_s
            bounded_room = min(room, max((target_steps - 1) * plain_s / each_s, MIN_TAIL_TOKENS))
            # Prompts beyond these, which go first, are computed in longer steps.
            patient = int(WAITING_PER_DECODE * streams)
            crowd = min(1.0, max(0, waiting + 1 - patient) / max(1, waiting))
            if crowd:
                fixed_s, longest_s = step_s + tail_s, plain_s + most * each_s
                fast_s = fixed_s / (1 - LEAST_THROUGHPUT * (1 - fixed_s / longest_s))
                crowded_room = min(room, max((fast_s - plain_s) / each_s, bounded_room))
            room = bounded_room if patient else crowded_room
            # Its streams lose no more than that.
            target_s = plain_s + room * each_s
        queued_s = model.queued_token_s(room, base_s)
        if crowd:
            queued_s += crowd * (model.queued_token_s(crowded_room, base_s) - queued_s)
        wait_s = _queue_wait_s(component, sent_tokens, queued_s)
        slots = component.running_requests + component.free_seqs or ASSUMED_SLOTS
        if present >= slots:
            wait_s += (present + 1 - slots) * base_s * ASSUMED_ANSWER_TOKENS / slots
        limit_s = target_s or DEFAULT_TARGET_S
        return cls(component, model, end, streams, waiting, base_s, room, most, wait_s, limit_s, followers_per_s, board)

    def tail_s(self, start: int) -> tuple[float, float]:
        """Seconds from the first step with a token of start .. end to the first token, and the seconds that the streams
        there lose by it, together: what its steps take beyond their latency."""
        _, token_s, sequence_s, read_s, pair_s = self.model
        tokens = self.end - start
        # Not rounded up: a little more load then never makes another number of steps look better.
        steps = max(1.0, tokens / self.room)
        seconds = self._steps_s(steps, start, self.end)
        if not self.streams:
            return seconds, 0.0
        has_target = self.component.target_itl_ms or self.component.target_itl_steps
        piece = min(tokens, self.room if has_target else self.most)
        step_s = self.base_s + sequence_s + read_s * self.end + piece * (token_s + read_s + pair_s * self.end)
        return seconds, max(0.0, step_s - self.limit_s) * steps * self.streams

    def own_cores_s(self, start: int, end: int) -> float:
        """Seconds of tokens start .. end alone, on the worker's own cores: they do not depend on the load of others."""
        return self.model.span_s(start, end, self.most) * (self.board.speed if self.board is not None else 1.0)

    def part_s(self, start: int, end: int) -> float:
        """Seconds that the prompt's tokens start .. end take here as a part of a longer tail: it shares its first and
        last step with the rest."""
        return self._steps_s((end - start) / self.room, start, end)

    def _steps_s(self, steps: float, start: int, end: int) -> float:
        """Seconds of so many steps beside the streams that compute start .. end."""
        _, token_s, sequence_s, read_s, pair_s = self.model
        tokens, middle = end - start, (start + end) / 2
        reads = steps * middle + tokens / 2
        return steps * (self.base_s + sequence_s) + tokens * (token_s + pair_s * middle) + reads * read_s


def _followers_lose_s(per_s: float, wait_s: float, work_s: float) -> float:
    """Seconds that all requests wait longer for our work which come before a worker's queue, ours included, is done."""
    return per_s * work_s * (max(0.0, wait_s) + work_s / 2)


def way_s(prefill: PrefillSide | None, decode: DecodeSide, cached: int, split: int, fetch_s: float) -> float:
    """What a way costs: the predicted time to the first token, what running streams lose by it, and what those lose who
    come behind it.

    Args:
        prefill: computes cached .. split, in tokens; not needed where they are equal.
        fetch_s: blocks come for so long before anything is computed.
    """
    if decode.board is not None:
        return _way_on_board_s(decode.board, prefill, decode, cached, split, fetch_s)
    begun_s, others_s = fetch_s, 0.0
    if split > cached and prefill is not None:
        span_s = prefill.span_s(cached, split)
        begun_s = max(fetch_s, prefill.wait_s) + span_s
        others_s = _followers_lose_s(prefill.followers_per_s, prefill.wait_s, span_s)
    seconds, lost_s = decode.tail_s(split)
    others_s += lost_s + _followers_lose_s(decode.followers_per_s, decode.wait_s, seconds)
    return (begun_s if begun_s > decode.wait_s else decode.wait_s) + seconds + others_s


def _way_on_board_s(
    board: Board, prefill: PrefillSide | None, decode: DecodeSide, cached: int, split: int, fetch_s: float
) -> float:
    """The price of a way whose decode worker shares its cores with prefill workers of its host.

    What a prefill worker computes takes cores from the decode worker: its steps take longer. Nobody waits there behind
    our prompt, but whoever computes there is later, by as much as ours takes at most.
    """
    seconds, lost_s = decode.tail_s(split)
    wait_s, begun_s, others_s = board.passed_s(decode.wait_s), fetch_s, lost_s
    if split > cached and prefill is not None:
        there = prefill.component
        span_s = prefill.span_s(cached, split)
        if (there.node_id, there.core_board) == (decode.component.node_id, decode.component.core_board):
            # Both compute the same with the same cores: two fits would only differ by what disturbed them.
            same_s = board.span_factor * decode.model.span_s(cached, split, prefill.step_tokens)
            span_s += same_s - prefill.model.span_s(cached, split, prefill.step_tokens)
            alone_s, longer = decode.part_s(cached, split), board.beside - 1
            queue_s = min(alone_s, decode.wait_s * longer)
            # Steps with a prompt tail keep to a bound of the latency, but not beside a prefill worker.
            others_s += queue_s * (decode.streams + decode.waiting)
            if decode.streams and decode.base_s:
                others_s += decode.streams * span_s * max(0.0, 1 - decode.limit_s / (decode.base_s * board.beside))
            follower_s = min(1.0, longer * board.follower_tokens / (split - cached)) * alone_s
            others_s += decode.followers_per_s * span_s * follower_s
            wait_s += queue_s
        else:
            others_s += _followers_lose_s(prefill.followers_per_s, prefill.wait_s, span_s)
        begun_s = max(fetch_s, prefill.wait_s) + span_s
        done_s = max(begun_s, wait_s) + seconds
    else:
        # The prompt's own share of this shrinks with the queue, which uses up the prefill workers' busy time. So the
        # fetch is compared with the whole, and what it does to followers is priced as if nobody else computed: each
        # term then grows with the load.
        done_s = max(fetch_s + board.passed_s(seconds), board.passed_s(decode.wait_s + seconds))
    return done_s + others_s + _followers_lose_s(decode.followers_per_s, decode.wait_s, seconds)


class Demand:
    """How many requests a second a gateway plans, how many of them use prefill workers, and how many tokens they have,
    as decaying means."""

    FADING_S = 20.0

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._all_per_s = 0.0
        self._shared_per_s = 0.0
        self._tokens_per_s = 0.0

    def note(self, now: float, shared: bool, tokens: int) -> None:
        """Notes one more request, which has to compute ``tokens`` of its prompt."""
        self._fade(now)
        self._all_per_s += 1 / self.FADING_S
        self._shared_per_s += shared / self.FADING_S
        self._tokens_per_s += tokens / self.FADING_S

    @property
    def mean_tokens(self) -> float:
        """Tokens of a request's prompt that are computed; 0.0 before any came."""
        return self._tokens_per_s / self._all_per_s if self._all_per_s else 0.0

    def per_s(self, now: float) -> tuple[float, float]:
        """Requests a second: all, and those that use prefill workers."""
        self._fade(now)
        return self._all_per_s, self._shared_per_s

    def _fade(self, now: float) -> None:
        left = math.exp(min(0.0, self._seen_s - now) / self.FADING_S)
        self._all_per_s, self._shared_per_s, self._seen_s = self._all_per_s * left, self._shared_per_s * left, now
        self._tokens_per_s *= left


class FetchPace:
    """How fast blocks come from one kind of source, as this gateway sees it, as a decaying mean. Times are in seconds
    of one clock.

    A source that was slow is not asked, so nothing is learnt of it: its pace is taken to get better while nobody hears
    of it, and one request tries it again. What that can cost is bounded (LEAST_FETCH_S).
    """

    FADING = 0.9
    # After so long without a fetch, the pace is taken to be twice as good; and how often that is done.
    HALVING_S = 60.0
    MAX_HALVINGS = 10

    def __init__(self) -> None:
        self._blocks = 0.0
        self._seconds = 0.0
        self._seen_s = 0.0

    def observe(self, blocks: int, seconds: float, now: float) -> None:
        """Notes a fetch that brought ``blocks`` blocks in ``seconds``, and ended ``now``. One that brought nothing in
        its time counts, too; one of no time asked nobody."""
        if seconds > 0:
            self._blocks = self._blocks * self.FADING + blocks
            self._seconds = self._seconds * self.FADING + seconds
            self._seen_s = now

    def block_s(self, now: float) -> float:
        """Seconds a block; 0.0 before any source was heard of. Where none came, one would have been about to."""
        silent_s = max(0.0, now - self._seen_s)
        halvings = min(silent_s / self.HALVING_S, self.MAX_HALVINGS)
        return self._seconds / max(self._blocks, 1.0) * math.exp2(-halvings)
