"""Predicts what a plan costs from what workers publish: time to the first token, and what decodes lose by it (I9).

    prefill worker  waits for its queue | chunks: each reads the KV before it again | then, on the decode worker,
    decode worker   waits for its queue . . . . . . . . . . . . . . . . . . . . . . . | prompt tail, beside its decodes

A worker's model is linear in what a step does (:mod:`pillion.engine.scheduling.step_model`). A price is computed by a
few formulas and without a search, because a gateway weighs several routes for each request. Every price grows with a
worker's load, so that a busier worker never looks cheaper.

Workers compute short prompts before long ones (:func:`pillion.rules.priority.prompt_order`), and prices follow it: a
request waits for its queue, or delays by its own tokens each prompt there, whichever is less.

A decode worker that shares a core lending table (:mod:`pillion.host.core_lending_table`) with prefill workers borrows
their cores, so it is as fast as the whole table, and prompts are not split between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pillion.engine.scheduling.step_model import MIN_TAIL_TOKENS, StepModel
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


def queued_token_s(model: StepModel, step_tokens: float, step_s: float) -> float:
    """Returns the seconds that each queued token takes, where a step computes ``step_tokens`` queued tokens and would
    cost ``step_s`` without them."""
    return model.tail_token_s(ASSUMED_POSITION) + (step_s + model.chunk_s(ASSUMED_POSITION)) / step_tokens


class Queue(NamedTuple):
    """Describes what a request finds on a worker.

    Attributes:
        prompts_s: how many seconds pass until the prompts that came earlier are computed.
        prompts: how many there are; 0 where that is not known.
        token_s: how many seconds each queued token takes.
        step_s: how many seconds pass at least before a prompt is begun, as long as there is another one.
        held_s: how many seconds longer the request waits for something other than prompts.
    """

    prompts_s: float
    prompts: float
    token_s: float
    step_s: float
    held_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """Gives the seconds until everything that came earlier is done."""
        return self.held_s + self.prompts_s

    def own_wait_s(self, tokens: int) -> float:
        """Returns how many seconds it costs to have ``tokens`` tokens of a prompt computed there.

        The prompt waits for those before it; it overtakes longer ones (:func:`pillion.rules.priority.prompt_order`),
        and they wait for it. With the whole queue as the price, simulated mixes (`split_sim` at
        31f4af5c) have up to 13 % fewer good requests.
        """
        if self.prompts_s <= 0 or not self.prompts:
            return self.wait_s
        return self.held_s + min(self.prompts_s, max(self.step_s, self.prompts * tokens * self.token_s))


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
        extra_s: how many seconds longer a prefill range takes because the worker is on another node than the decode
            worker.
    """

    component: ComponentRecord
    model: StepModel
    step_tokens: int
    queue: Queue
    extra_s: float = 0.0

    @classmethod
    def of(
        cls, component: ComponentRecord, model: StepModel, chunk_tokens: int, sent_tokens: int, held_s: float
    ) -> PrefillSide:
        """Describes a prefill worker. ``sent_tokens`` counts the prompt tokens that gateways have sent there and that
        are not computed yet (ClusterSnapshot); ``held_s`` is how long the request waits for its adapter there."""
        most = component.max_step_tokens
        step_tokens = most if 0 < most < chunk_tokens else chunk_tokens
        token_s = queued_token_s(model, step_tokens, model.step_s)
        queued_s = _queue_wait_s(component, sent_tokens, token_s)
        unreported = max(0, sent_tokens - component.queued_tokens) / chunk_tokens
        prompts = component.running_requests + component.waiting_requests + unreported
        # A short range waits for half of the step under way, and its own step has tokens of a longer one as well.
        queue = Queue(queued_s, prompts, token_s, 1.5 * token_s * step_tokens, held_s)
        return cls(component, model, step_tokens, queue)

    def range_s(self, start: int, end: int) -> float:
        """Returns the seconds that a prefill range of the tokens start .. end takes, from the beginning of its first
        chunk to the acknowledgement of its last one."""
        calls_s = SPAN_CALL_S + CHUNK_CALL_S * (-(-(end - start) // self.step_tokens))
        return self.model.range_s(start, end, self.step_tokens) + calls_s + self.extra_s


class DecodeSide(NamedTuple):
    """Describes what a plan for a prompt of ``end`` tokens has to know of a decode worker.

    Attributes:
        model: its step model, on all cores that it may use.
        streams: how many streams run there.
        base_s: how many seconds a step takes that only decodes the streams.
        room: how many tokens of a prompt tail a step computes beside the streams' decodes.
        most: how many tokens a step may compute in all.
        queue: what the request finds there, until the worker has room for one more stream.
        limit_s: the inter-token latency that its streams should have.
    """

    component: ComponentRecord
    model: StepModel
    end: int
    streams: int
    base_s: float
    room: float
    most: int
    queue: Queue
    limit_s: float

    @classmethod
    def of(
        cls,
        component: ComponentRecord,
        model: StepModel,
        end: int,
        sent_streams: int,
        sent_tokens: int,
        held_s: float,
    ) -> DecodeSide:
        """Describes a decode worker. ``sent_streams`` counts the streams that gateways have there, ``sent_tokens``
        their prompt tokens that are yet to be computed; ``held_s`` is how long the request waits for its adapter."""
        streams, context = component.decoding_requests, component.context_tokens
        present = reported = component.running_requests + component.waiting_requests
        prompts = max(0, present - streams)
        if sent_streams > present:
            streams += sent_streams - present
            context += (sent_streams - present) * ASSUMED_POSITION
            prompts += sent_streams - reported
            present = sent_streams
        base_s = model.plain_s(streams, context)
        most = component.max_step_tokens or ASSUMED_STEP_TOKENS
        room = float(most - streams) if most > streams else 1.0
        # Each step is priced as if it computed nothing but the streams' decodes and one prompt tail, so that a busier
        # worker never looks cheaper. That a worker takes longer steps where many prompts wait is left out: with it,
        # first tokens of simulated loads came up to 6 % sooner, and as many requests were good.
        plain_s = base_s + model.chunk_s(max(end, ASSUMED_POSITION))
        limit_s = component.target_itl_ms / 1000 or component.target_itl_steps * plain_s
        each_s = model.tail_token_s(end)
        if limit_s and streams and each_s:
            room = min(room, max((limit_s - plain_s) / each_s, MIN_TAIL_TOKENS))
            if not component.target_itl_ms:
                # Where the target follows from the streams, they lose nothing by a step that keeps to it.
                limit_s = plain_s + room * each_s
        queued_s = queued_token_s(model, room, base_s)
        slots = component.running_requests + component.free_seqs or ASSUMED_SLOTS
        if present >= slots:
            held_s += (present + 1 - slots) * base_s * ASSUMED_ANSWER_TOKENS / slots
        wait_s = _queue_wait_s(component, sent_tokens, queued_s)
        queue = Queue(wait_s, prompts, queued_s, base_s / 2, held_s)
        return cls(component, model, end, streams, base_s, room, most, queue, limit_s or DEFAULT_TARGET_S)

    def tail_s(self, start: int) -> tuple[float, float]:
        """Returns two numbers of seconds: how long the prompt's tokens from ``start`` on take, once begun, until the
        first new token; and how much time the worker's streams lose by them in all, because steps take longer than the
        latency that the streams should have."""
        tokens, middle = self.end - start, (start + self.end) / 2
        _, token_s, sequence_s, read_s, pair_s = self.model
        # The number of steps is not rounded up, so that a little more load never makes another number of steps look
        # better.
        steps = max(1.0, tokens / self.room)
        reads = steps * middle + tokens / 2
        seconds = steps * (self.base_s + sequence_s) + tokens * (token_s + pair_s * middle) + reads * read_s
        if not self.streams:
            return seconds, 0.0
        # Steps that keep to a target cost their streams nothing. Without a target, twice as many requests of simulated
        # loads are good where the price has what streams lose.
        has_target = self.component.target_itl_ms or self.component.target_itl_steps
        piece = min(tokens, self.room if has_target else self.most)
        step_s = self.base_s + self.model.chunk_s(self.end) + piece * self.model.tail_token_s(self.end)
        return seconds, max(0.0, step_s - self.limit_s) * steps * self.streams


def route_s(prefill: PrefillSide | None, decode: DecodeSide, cached: int, split: int, fetch_s: float) -> float:
    """Returns what a route costs: the predicted time to the first token, and what running streams lose by it.

    Args:
        prefill: the worker that computes the prompt's tokens cached .. split; None where both are equal.
        fetch_s: how long blocks are fetched before anything is computed.
    """
    begun_s = fetch_s
    if split > cached and prefill is not None:
        begun_s = max(fetch_s, prefill.queue.own_wait_s(split - cached)) + prefill.range_s(cached, split)
    seconds, lost_s = decode.tail_s(split)
    return max(begun_s, decode.queue.own_wait_s(decode.end - split)) + seconds + lost_s


class FetchCost(NamedTuple):
    """Says how many seconds a fetch takes: those of the call, and those of each block."""

    call_s: float
    block_s: float

    def seconds(self, blocks: int) -> float:
        """Returns how long a fetch of so many blocks takes; none takes no time."""
        return self.call_s + blocks * self.block_s if blocks > 0 else 0.0


def unmeasured(source: str, target: str) -> FetchCost | None:
    """Returns what a fetch between two nodes costs where no fetch was measured yet."""
