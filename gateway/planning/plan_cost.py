"""Predicts a plan's cost from what workers publish: time to first token, and the delay of running decodes. Sans-IO
(I9).

    prefill worker  waits for its queue | chunks: each reads the KV before it again | then, on the decode worker,
    decode worker   waits for its queue . . . . . . . . . . . . . . . . . . . . . . . | prompt tail, beside its decodes

A worker's model is linear in a step's contents (:mod:`pillion.engine.scheduling.step_model`). A price takes a few
formulas and no search, since a gateway compares several routes per request. Every price grows with a worker's load, so
that a busier worker never looks cheaper.

Workers compute short prompts before long ones (:func:`pillion.rules.priority.prompt_order`), and prices follow: a
request waits for the queue, or delays each queued prompt by its own tokens, whichever is less.

A decode worker that shares a core lending table (:mod:`pillion.host.core_lending_table`) with prefill workers borrows
their cores. It is as fast as the whole table, and prompts are not split between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pillion.engine.scheduling.step_model import MIN_TAIL_TOKENS, StepModel
from pillion.wire.registry import ComponentRecord

SPAN_CALL_S = 0.003
CHUNK_CALL_S = 0.001
# Assumed time of a fetch's call between nodes without a measurement, and bandwidth without any measurement.
FETCH_CALL_S = 0.003
DEFAULT_BYTES_PER_S = 1e9
# Minimum time limit of a fetch, which may otherwise take as long as computing its blocks. So a failed fetch at most
# doubles the time, or adds MIN_FETCH_S.
MIN_FETCH_S = 0.1
MIN_CHUNK_SEEN_TOKENS = 64
DEFAULT_TARGET_S = 0.1
# Time for which a reported queue is assumed to shrink: a worker that is silent for longer may compute nothing.
MAX_REPORT_FADE_S = 2.0
# Ratio to the median worker's predictions beyond which the median worker's model is used instead: an absurd fit must
# neither attract nor repel all requests.
MAX_ODDS = 16.0
COMPARED_TOKENS = 512
MAX_COMPARED = 4096
ASSUMED_ANSWER_TOKENS = 128
# Assumed prompt position of queued tokens, and context of a stream without a heartbeat.
ASSUMED_POSITION = 512
ASSUMED_STEP_TOKENS = 256
ASSUMED_SLOTS = 64


def queued_token_s(model: StepModel, step_tokens: float, step_s: float) -> float:
    """Return the seconds per queued token if a step computes ``step_tokens`` of them and costs ``step_s`` without
    them."""
    return model.tail_token_s(ASSUMED_POSITION) + (step_s + model.chunk_s(ASSUMED_POSITION)) / step_tokens


class Queue(NamedTuple):
    """A worker's queue as seen by a request.

    Attributes:
        prompts_s: seconds until the queued prompts are computed.
        prompts: their number; 0 if unknown.
        token_s: seconds per queued token.
        step_s: minimum seconds before a prompt starts, if there is another one.
        held_s: additional wait for something other than prompts, in seconds.
    """

    prompts_s: float
    prompts: float
    token_s: float
    step_s: float
    held_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until all earlier work is done."""
        return self.held_s + self.prompts_s

    def own_wait_s(self, tokens: int) -> float:
        """Return the cost in seconds of computing ``tokens`` prompt tokens there.

        The prompt waits for those before it; it overtakes longer ones (:func:`pillion.rules.priority.prompt_order`),
        and they wait for it. With the whole queue as the price, simulated mixes (`split_sim` at
        31f4af5c) have up to 13 % fewer good requests.
        """
        if self.prompts_s <= 0 or not self.prompts:
            return self.wait_s
        return self.held_s + min(self.prompts_s, max(self.step_s, self.prompts * tokens * self.token_s))


def _queue_wait_s(component: ComponentRecord, sent_tokens: int, token_s: float) -> float:
    """Return the seconds until a worker's queue is computed: the larger of the time for tokens that gateways sent, and
    the reported queue's, less its age."""
    fade_s = min(component.heartbeat_age_ms / 1000, MAX_REPORT_FADE_S)
    reported_s = (component.queued_tokens or component.waiting_tokens) * token_s - fade_s
    sent_s = sent_tokens * token_s
    return reported_s if reported_s > sent_s else sent_s


# Default cost model until a worker reports one. Its absolute times mean nothing; it only ranks by queue and fetched
# tokens.
DEFAULT_MODEL = StepModel(5e-3, 5e-4, 5e-5, 1e-7, 1e-7)


class Models:
    """Step models of workers: fitted to their own steps or, if missing or absurd, the median of the role or, failing
    that, of the other role."""

    def __init__(self, decodes: Sequence[ComponentRecord], prefills: Sequence[ComponentRecord]) -> None:
        prefill = middle_model(prefills)
        self._known = prefill is not None
        self._decode = middle_model(decodes) or prefill or DEFAULT_MODEL
        self._prefill = prefill or self._decode
        self._compared_s = {"decode": _compared_s(self._decode), "prefill": _compared_s(self._prefill)}

    def of(self, component: ComponentRecord) -> StepModel:
        """Return a worker's step model. A decode worker without a chunk yet gets the token costs of prefill workers;
        one that borrows cores is as fast as all cores of its lending table."""
        if component.role == "prefill":
            return self._own(component, self._prefill)
        own, prefill = self._own(component, self._decode), self._prefill
        if component.largest_step_tokens < MIN_CHUNK_SEEN_TOKENS and self._known:
            own = own._replace(token_s=max(own.token_s, prefill.token_s), pair_s=max(own.pair_s, prefill.pair_s))
        borrows = component.core_lending_table and 0 < component.core_share < 1
        return own.at_speed(min(MAX_ODDS, 1 / component.core_share)) if borrows else own

    def rough_token_s(self, component: ComponentRecord) -> float:
        """Estimate the seconds per queued token, to compare workers."""
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
    """Return the median worker's step model, or None. Of an even number, the slower one in the middle, which discards
    an implausibly fast one of two."""
    fits = [StepModel._make(component.step_cost_s) for component in workers if component.step_cost_s]
    return sorted(fits, key=_compared_s)[len(fits) // 2] if fits else None


class PrefillSide(NamedTuple):
    """A prefill worker's part in a plan.

    Attributes:
        step_tokens: tokens per step: a chunk, or a part of one.
        queue: its queue as seen by the request.
        extra_s: additional seconds if it is on another node than the decode worker.
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
        """Describe a prefill worker. ``sent_tokens`` as in :class:`ClusterSnapshot`; ``held_s`` is the wait for an
        adapter."""
        most = component.max_step_tokens
        step_tokens = most if 0 < most < chunk_tokens else chunk_tokens
        token_s = queued_token_s(model, step_tokens, model.step_s)
        queued_s = _queue_wait_s(component, sent_tokens, token_s)
        unreported = max(0, sent_tokens - component.queued_tokens) / chunk_tokens
        prompts = component.running_requests + component.waiting_requests + unreported
        # A short range waits for half of the current step, and its own step has tokens of a longer one too.
        queue = Queue(queued_s, prompts, token_s, 1.5 * token_s * step_tokens, held_s)
        return cls(component, model, step_tokens, queue)

    def range_s(self, start: int, end: int) -> float:
        """Return the seconds of prefilling tokens start .. end, from the first chunk's start to the last one's
        acknowledgement."""
        calls_s = SPAN_CALL_S + CHUNK_CALL_S * (-(-(end - start) // self.step_tokens))
        return self.model.range_s(start, end, self.step_tokens) + calls_s + self.extra_s


class DecodeSide(NamedTuple):
    """A decode worker's part in a plan for a prompt of ``end`` tokens.

    Attributes:
        model: its step model on all cores that it may use.
        streams: number of running streams.
        base_s: seconds of a step with only the streams' decodes.
        room: tokens of a prompt tail per step beside the decodes.
        most: limit on tokens per step.
        queue: its queue as seen by the request, until there is room for one more stream.
        limit_s: target inter-token latency of its streams.
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
        """Describe a decode worker. ``sent_streams`` is the number of streams that gateways have there, ``sent_tokens``
        their uncomputed prompt tokens; ``held_s`` is the wait for an adapter."""
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
        # Each step is priced with only the decodes and one prompt tail, so that a busier worker never looks cheaper.
        # Longer steps while many prompts wait are ignored: with them, first tokens of simulated loads came up to 6 %
        # sooner, with as many good requests.
        plain_s = base_s + model.chunk_s(max(end, ASSUMED_POSITION))
        limit_s = component.target_itl_ms / 1000 or component.target_itl_steps * plain_s
        each_s = model.tail_token_s(end)
        if limit_s and streams and each_s:
            room = min(room, max((limit_s - plain_s) / each_s, MIN_TAIL_TOKENS))
            if not component.target_itl_ms:
                # A target derived from the streams: steps that meet it cost them nothing.
                limit_s = plain_s + room * each_s
        queued_s = queued_token_s(model, room, base_s)
        slots = component.running_requests + component.free_seqs or ASSUMED_SLOTS
        if present >= slots:
            held_s += (present + 1 - slots) * base_s * ASSUMED_ANSWER_TOKENS / slots
        wait_s = _queue_wait_s(component, sent_tokens, queued_s)
        queue = Queue(wait_s, prompts, queued_s, base_s / 2, held_s)
        return cls(component, model, end, streams, base_s, room, most, queue, limit_s or DEFAULT_TARGET_S)

    def tail_s(self, start: int) -> tuple[float, float]:
        """Return the seconds to compute the prompt from token ``start`` until the first new token, and the total
        seconds by which the streams' steps exceed their target latency."""
        tokens, middle = self.end - start, (start + self.end) / 2
        _, token_s, sequence_s, read_s, pair_s = self.model
        # Not rounded up, so that slightly more load never makes another number of steps look better.
        steps = max(1.0, tokens / self.room)
        reads = steps * middle + tokens / 2
        seconds = steps * (self.base_s + sequence_s) + tokens * (token_s + pair_s * middle) + reads * read_s
        if not self.streams:
            return seconds, 0.0
        # Steps that meet a target cost streams nothing. Without a target, pricing the streams' loss doubles the good
        # requests of simulated loads.
        has_target = self.component.target_itl_ms or self.component.target_itl_steps
        piece = min(tokens, self.room if has_target else self.most)
        step_s = self.base_s + self.model.chunk_s(self.end) + piece * self.model.tail_token_s(self.end)
        return seconds, max(0.0, step_s - self.limit_s) * steps * self.streams


def route_s(prefill: PrefillSide | None, decode: DecodeSide, cached: int, split: int, fetch_s: float) -> float:
    """Return a route's cost: predicted time to first token, plus the running streams' loss.

    Args:
        prefill: the worker that computes the prompt's tokens cached .. split; None if there are none.
        fetch_s: time to fetch blocks before anything is computed.
    """
    begun_s = fetch_s
    if split > cached and prefill is not None:
        begun_s = max(fetch_s, prefill.queue.own_wait_s(split - cached)) + prefill.range_s(cached, split)
    seconds, lost_s = decode.tail_s(split)
    return max(begun_s, decode.queue.own_wait_s(decode.end - split)) + seconds + lost_s


class FetchCost(NamedTuple):
    """Seconds of a fetch: per call, and per block."""

    call_s: float
    block_s: float

    def seconds(self, blocks: int) -> float:
        """Return the seconds to fetch ``blocks`` blocks; 0 for none."""
        return self.call_s + blocks * self.block_s if blocks > 0 else 0.0


def unmeasured(source: str, target: str) -> FetchCost | None:
    """Return None, the cost of a fetch that was never measured."""
