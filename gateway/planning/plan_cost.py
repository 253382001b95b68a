"""Predicts a plan's cost from what workers publish: time to first token, and the delay of running decodes. Sans-IO
(I9).

    prefill worker  waits for its queue | chunks: each reads the KV before it again | then, on the decode worker,
    decode worker   waits for its queue . . . . . . . . . . . . . . . . . . . . . . . | prompt tail, with its decodes

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

# Time of the calls for a prefill range: per range, and per chunk.
SPAN_CALL_S, CHUNK_CALL_S = 0.003, 0.001
# Assumed for a fetch between nodes without a measurement: time of its call, and, if no fetch was ever measured,
# bandwidth.
FETCH_CALL_S = 0.003
DEFAULT_BYTES_PER_S = 1e9
# Min time limit of a fetch. The limit is else the time to compute its blocks, so a failed fetch at most doubles the
# time, or adds MIN_FETCH_S.
MIN_FETCH_S = 0.1
# Max time for which a queue is assumed to shrink after its report: a worker that is silent for longer may have stalled.
MAX_REPORT_FADE_S = 2.0
# Max ratio between the predictions of a worker's fitted model and of the median worker's, which is used beyond it: an
# absurd fit must neither attract nor repel all requests.
MAX_FIT_RATIO = 16.0
# Length of the prompt by whose predicted time models are compared.
COMPARED_TOKENS = 512
ASSUMED_ANSWER_TOKENS = 128
# Assumed prompt position of queued tokens, and context of a stream that no heartbeat has reported.
ASSUMED_POSITION = 512
ASSUMED_STEP_TOKENS = 256


def queued_token_s(model: StepModel, step_tokens: float, step_s: float) -> float:
    """Return the seconds per queued prompt token if a step computes ``step_tokens`` of them and takes ``step_s``
    without them."""
    return model.tail_token_s(ASSUMED_POSITION) + (step_s + model.chunk_s(ASSUMED_POSITION)) / step_tokens


class Queue(NamedTuple):
    """A worker's queue as seen by a request. Times are seconds.

    Attributes:
        prompts_s: time until the queued prompts are computed.
        prompts: number of queued prompts; 0 if unknown.
        token_s: time per queued token.
        step_s: min wait if a prompt is queued, since its step cannot be interrupted.
        other_wait_s: wait before the queue, e.g. for an adapter or a free slot.
    """

    prompts_s: float
    prompts: float
    token_s: float
    step_s: float
    other_wait_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until all queued work is done."""
        return self.other_wait_s + self.prompts_s

    def own_wait_s(self, tokens: int) -> float:
        """Return the cost in seconds of queueing a prompt of ``tokens`` tokens: its own wait, or the delay that it
        causes.

        The prompt overtakes longer ones (:func:`pillion.rules.priority.prompt_order`), which then wait for it. If it
        is priced with the whole queue instead, up to 13% fewer requests of simulated mixes (`split_sim` at 31f4af5c)
        meet their targets.
        """
        if self.prompts_s <= 0 or not self.prompts:
            return self.wait_s
        return self.other_wait_s + min(self.prompts_s, max(self.step_s, self.prompts * tokens * self.token_s))


def _queue_wait_s(component: ComponentRecord, sent_tokens: int, token_s: float) -> float:
    """Return the seconds until a worker's queue is computed: by the tokens that gateways have sent to it or by its last
    report less the report's age, whichever is longer."""
    fade_s = min(component.heartbeat_age_ms / 1000, MAX_REPORT_FADE_S)
    reported_s = (component.queued_tokens or component.waiting_tokens) * token_s - fade_s
    sent_s = sent_tokens * token_s
    return reported_s if reported_s > sent_s else sent_s


# Cost model until a worker reports one. It only serves to rank workers by queue and fetched tokens; its absolute times
# mean nothing.
DEFAULT_MODEL = StepModel(5e-3, 5e-4, 5e-5, 1e-7, 1e-7)


class Models:
    """Step models of workers. A worker whose fitted model is missing or absurd gets the median model of its role or, if
    no worker of the role has one, of the other role."""

    def __init__(self, decodes: Sequence[ComponentRecord], prefills: Sequence[ComponentRecord]) -> None:
        prefill = median_model(prefills)
        self._prefill_fitted = prefill is not None
        self._decode = median_model(decodes) or prefill or DEFAULT_MODEL
        self._prefill = prefill or self._decode
        self._compared_s = {"decode": _compared_s(self._decode), "prefill": _compared_s(self._prefill)}

    def of(self, component: ComponentRecord) -> StepModel:
        """Return a worker's step model. A decode worker that has not computed a chunk yet gets at least the token costs
        of prefill workers; a decode worker that borrows cores is as fast as all cores of its lending table."""
        if component.role == "prefill":
            return self._own(component, self._prefill)
        own, prefill = self._own(component, self._decode), self._prefill
        # Steps of fewer tokens do not show what a chunk costs.
        if component.largest_step_tokens < 64 and self._prefill_fitted:
            own = own._replace(token_s=max(own.token_s, prefill.token_s), pair_s=max(own.pair_s, prefill.pair_s))
        borrows = component.core_lending_table and 0 < component.core_share < 1
        return own.at_speed(min(MAX_FIT_RATIO, 1 / component.core_share)) if borrows else own

    def rough_token_s(self, component: ComponentRecord) -> float:
        """Estimate the seconds per queued token, to compare workers."""
        return _compared_s(self.of(component)) / COMPARED_TOKENS

    def _own(self, component: ComponentRecord, default: StepModel) -> StepModel:
        """Return the worker's fitted model, or ``default`` if it is missing or absurd."""
        if not component.step_cost_s:
            return default
        own = StepModel._make(component.step_cost_s)
        compared_s = self._compared_s[component.role]
        return own if compared_s <= MAX_FIT_RATIO * _compared_s(own) <= MAX_FIT_RATIO**2 * compared_s else default


@lru_cache(maxsize=4096)
def _compared_s(model: StepModel) -> float:
    return model.range_s(0, COMPARED_TOKENS, COMPARED_TOKENS)


def median_model(workers: Sequence[ComponentRecord]) -> StepModel | None:
    """Return the median of the workers' fitted step models, by speed; None if none has one. Of an even number it is the
    slower middle one, since the faster of two may be implausibly fast."""
    fits = [StepModel._make(component.step_cost_s) for component in workers if component.step_cost_s]
    return sorted(fits, key=_compared_s)[len(fits) // 2] if fits else None


class PrefillSide(NamedTuple):
    """A prefill worker's part in a plan.

    Attributes:
        step_tokens: tokens per step: a chunk, or less if the worker's steps are smaller.
        queue: the worker's queue as seen by the request.
        extra_s: additional seconds if the worker is on another node than the decode worker.
    """

    component: ComponentRecord
    model: StepModel
    step_tokens: int
    queue: Queue
    extra_s: float = 0.0

    @classmethod
    def of(
        cls, component: ComponentRecord, model: StepModel, chunk_tokens: int, sent_tokens: int, adapter_wait_s: float
    ) -> PrefillSide:
        """Describe a prefill worker to which gateways have sent ``sent_tokens`` prompt tokens that it has not computed
        yet; ``adapter_wait_s`` is the request's wait for its adapter on the worker."""
        step_tokens = min(component.max_step_tokens or chunk_tokens, chunk_tokens)
        token_s = queued_token_s(model, step_tokens, model.step_s)
        queued_s = _queue_wait_s(component, sent_tokens, token_s)
        unreported = max(0, sent_tokens - component.queued_tokens) / chunk_tokens
        prompts = component.running_requests + component.waiting_requests + unreported
        # A short range waits for half of the current step, and shares its own step with tokens of a longer range.
        queue = Queue(queued_s, prompts, token_s, 1.5 * token_s * step_tokens, adapter_wait_s)
        return cls(component, model, step_tokens, queue)

    def range_s(self, start: int, end: int) -> float:
        """Return the seconds to prefill tokens start .. end - 1, from the first chunk's start to the last chunk's
        acknowledgement."""
        calls_s = SPAN_CALL_S + CHUNK_CALL_S * (-(-(end - start) // self.step_tokens))
        return self.model.range_s(start, end, self.step_tokens) + calls_s + self.extra_s


class DecodeSide(NamedTuple):
    """A decode worker's part in a plan for a prompt of ``end`` tokens.

    Attributes:
        model: the worker's step model on all cores that it may use.
        streams: number of running streams.
        base_s: seconds of a step that has only the streams' decodes.
        tail_step_tokens: tokens of a prompt tail that fit into a step with the decodes.
        max_step_tokens: max tokens per step, decodes included.
        queue: the worker's queue as seen by the request, with the wait for a free slot.
        limit_s: target inter-token latency of the streams, in seconds.
    """

    component: ComponentRecord
    model: StepModel
    end: int
    streams: int
    base_s: float
    tail_step_tokens: float
    max_step_tokens: int
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
        adapter_wait_s: float,
    ) -> DecodeSide:
        """Describe a decode worker, for a prompt of ``end`` tokens. Gateways have ``sent_streams`` streams on it, with
        ``sent_tokens`` prompt tokens that it has not computed yet; ``adapter_wait_s`` is the request's wait for its
        adapter on the worker."""
        streams, context = component.decoding_requests, component.context_tokens
        present = reported = component.running_requests + component.waiting_requests
        prompts = max(0, present - streams)
        if sent_streams > present:
            streams += sent_streams - present
            context += (sent_streams - present) * ASSUMED_POSITION
            prompts += sent_streams - reported
            present = sent_streams
        base_s = model.plain_s(streams, context)
        max_step_tokens = component.max_step_tokens or ASSUMED_STEP_TOKENS
        tail_step_tokens = float(max(1, max_step_tokens - streams))
        # Price each step with only the decodes and one prompt tail, so that a busier worker never looks cheaper. That
        # steps grow while many prompts wait is ignored: in simulated loads, predicting it makes first tokens up to 6%
        # sooner, but no more requests meet their targets.
        plain_s = base_s + model.chunk_s(max(end, ASSUMED_POSITION))
        limit_s = component.target_itl_ms / 1000 or component.target_itl_steps * plain_s
        token_s = model.tail_token_s(end)
        if limit_s and streams and token_s:
            tail_step_tokens = min(tail_step_tokens, max((limit_s - plain_s) / token_s, MIN_TAIL_TOKENS))
            if not component.target_itl_ms:
                # A target relative to the streams' own steps: steps that meet it cost the streams nothing.
                limit_s = plain_s + tail_step_tokens * token_s
        queued_s = queued_token_s(model, tail_step_tokens, base_s)
        # 64: assumed for a worker that reports no slots.
        slots = component.running_requests + component.free_seqs or 64
        other_wait_s = adapter_wait_s
        if present >= slots:
            other_wait_s += (present + 1 - slots) * base_s * ASSUMED_ANSWER_TOKENS / slots
        wait_s = _queue_wait_s(component, sent_tokens, queued_s)
        queue = Queue(wait_s, prompts, queued_s, base_s / 2, other_wait_s)
        # 0.1 s: assumed target of a worker without one.
        return cls(component, model, end, streams, base_s, tail_step_tokens, max_step_tokens, queue, limit_s or 0.1)

    def tail_s(self, start: int) -> tuple[float, float]:
        """Return the seconds to compute the prompt from token ``start`` to the first new token, and the seconds by
        which these steps exceed the target latency, summed over the streams."""
        tokens, middle = self.end - start, (start + self.end) / 2
        _, token_s, sequence_s, read_s, pair_s = self.model
        # Not rounded up: a slightly higher load must never look cheaper.
        steps = max(1.0, tokens / self.tail_step_tokens)
        reads = steps * middle + tokens / 2
        seconds = steps * (self.base_s + sequence_s) + tokens * (token_s + pair_s * middle) + reads * read_s
        if not self.streams:
            return seconds, 0.0
        # With a target, only the excess over it is priced. Without one, pricing the streams' delay doubles the number
        # of simulated requests that meet their targets.
        has_target = self.component.target_itl_ms or self.component.target_itl_steps
        step_tokens = min(tokens, self.tail_step_tokens if has_target else self.max_step_tokens)
        step_s = self.base_s + self.model.chunk_s(self.end) + step_tokens * self.model.tail_token_s(self.end)
        return seconds, max(0.0, step_s - self.limit_s) * steps * self.streams


def route_s(prefill: PrefillSide | None, decode: DecodeSide, cached: int, split: int, fetch_s: float) -> float:
    """Return a route's cost in seconds: predicted time to first token, plus the running streams' delay.

    Args:
        prefill: the worker that computes the prompt's tokens cached .. split - 1; None if there are none.
        fetch_s: time to fetch blocks before anything is computed.
    """
    prefilled_s = fetch_s
    if split > cached and prefill is not None:
        prefilled_s = max(fetch_s, prefill.queue.own_wait_s(split - cached)) + prefill.range_s(cached, split)
    seconds, delay_s = decode.tail_s(split)
    return max(prefilled_s, decode.queue.own_wait_s(decode.end - split)) + seconds + delay_s


class FetchCost(NamedTuple):
    """Seconds of a fetch: per call, and per block."""

    call_s: float
    block_s: float

    def seconds(self, blocks: int) -> float:
        """Return the seconds to fetch ``blocks`` blocks; 0 for none."""
        return self.call_s + blocks * self.block_s if blocks > 0 else 0.0


def unmeasured(source: str, target: str) -> FetchCost | None:
    """Return None: the default of ClusterSnapshot.fetch_costs, without any measured fetch."""
