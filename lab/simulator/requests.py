"""The client of one simulated request, which compares the answer with the reference, token by token.

waits until it is due -> sends -> deltas, each the next part of the reference -> complete, or a clear error
                                  +-> disconnects midway, if scheduled
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from lab.simulator.hash_model import reference, reference_reports
from lab.simulator.schedule import FaultKind, SimRequest
from pillion.client.async_client import AsyncClient
from pillion.errors import DeadlineExceeded, Internal, Overloaded, PillionError, Unavailable
from pillion.gateway.request.validation import answer_seed
from pillion.types import Delta, FinishReason, SamplingParams


class WrongToken(Exception):  # noqa: N818  (a finding, which is noted)
    """Ends the check of an answer at its first wrong token."""


# Faults after which a request may run out of attempts. All others only cost time: requests wait for restarts, and lost
# blocks are recomputed.
EXCUSES = {
    FaultKind.DRAIN,
    FaultKind.RESET,
    FaultKind.CUT,
    FaultKind.HALF_CUT,
}


class RequestRun:
    """One request. ``note`` is called with lines of the history, ``find`` with violations. ``faults``: kinds in this
    world; ``repeats``: answers repeat."""

    def __init__(
        self,
        request: SimRequest,
        note: Callable[[str], None],
        find: Callable[[str], None],
        faults: frozenset[FaultKind],
        *,
        repeats: bool = False,
    ) -> None:
        self.request = request
        self.ending = "not sent"
        self._note = note
        self._find = find
        self._calm = not faults
        self._excused = bool(faults & EXCUSES)
        self._workers_lost = bool(faults & {FaultKind.KILL, *EXCUSES})
        stop_ids = frozenset(request.stop_ids)
        self._wanted = [
            reference(
                request.prompt, request.max_tokens, answer_seed(request.seed, index), request.greedy, stop_ids, repeats
            )
            for index in range(request.answers)
        ]
        self._scores = 0
        self._got: list[list[int]] = [[] for _ in self._wanted]
        self._reasons: list[FinishReason | None] = [None] * len(self._wanted)
        self._ends = 0

    @property
    def tokens(self) -> int:
        """Tokens received over all answers of the request."""
        return sum(map(len, self._got))

    async def run(self, client: AsyncClient) -> None:
        """Send the request when it is due, and read its answers to the end."""
        await asyncio.sleep(self.request.at_s)
        self._note(str(self.request))
        self.ending = "open"
        try:
            await self._ask(client)
        except PillionError as error:
            self.ending = f"{type(error).__name__}: {error.message}"
            self._judge(error)
        except WrongToken:
            self.ending = "wrong"
        self._note(f"request {self.request.number} ends: {self.ending}, {self.tokens} tokens")

    async def _ask(self, client: AsyncClient) -> None:
        request = self.request
        sampling = SamplingParams(
            temperature=0.0 if request.greedy else 1.0,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_ids,
            n=request.answers,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )
        deltas: Any = client.generate(
            list(request.prompt),
            sampling=sampling,
            request_id=f"request-{request.number}",
            cache_salt=request.salt,
            priority=request.priority,
            timeout_s=request.timeout_s,
        )
        async with contextlib.aclosing(deltas):
            if request.cancel_after == 0:
                # Do not wait for the first delta, which may take long.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await anext(deltas)
                self.ending = "left"
                return
            async for delta in deltas:
                self._take(delta)
                if 0 < request.cancel_after <= self.tokens:
                    self.ending = "left"
                    return
        self._whole()

    def _take(self, delta: Delta) -> None:
        number, index = self.request.number, delta.index
        got, wanted = self._got[index], self._wanted[index]
        self._judge_reports(delta, len(got))
        if delta.token_ids and self._reasons[index] is not None:
            self._find(f"request {number}: tokens after the end of answer {index}")
        got.extend(delta.token_ids)
        if got != wanted[: len(got)]:
            at = next((n for n, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))
            self._find(
                f"request {number}: token {at} of answer {index} is wrong ({got[at:][:3]} for {wanted[at:][:3]})"
            )
            raise WrongToken
        if delta.finish_reason is not None:
            if self._reasons[index] is not None:
                self._find(f"request {number}: answer {index} has two ends")
            self._reasons[index] = delta.finish_reason
        if delta.usage is not None:
            self._ends += 1
            if self._calm and self.request.salt.startswith("own") and delta.usage.cached_tokens:
                self._find(f"request {number} found {delta.usage.cached_tokens} tokens under a salt of its own")
            if self._calm and delta.timings is not None and delta.timings.replays:
                self._find(f"request {number} was replayed, where nothing goes wrong")

    def _judge_reports(self, delta: Delta, before: int) -> None:
        """Check that each token has its log probability if requested, that those of the prompt come once, and that
        there are no others. ``before``: tokens of the answer received before."""
        request = self.request
        prompt = list(request.prompt)
        told = [*prompt, *self._wanted[delta.index][:before], *delta.token_ids]
        asked, first = request.logprobs, len(prompt) + before
        reports = () if asked is None else reference_reports(told, first, asked)
        if list(delta.logprobs) != list(reports):
            self._find(f"request {request.number}: log probabilities of tokens {before}... are wrong: {delta.logprobs}")
        if delta.prompt_logprobs:
            asked, scored = request.prompt_logprobs, self._scores
            self._scores = after = scored + len(delta.prompt_logprobs)
            reports = () if asked is None else reference_reports(prompt, 1 + scored, asked)[: after - scored]
            if list(delta.prompt_logprobs) != list(reports):
                self._find(f"request {request.number}: log probabilities of the prompt are wrong from {1 + scored} on")

    def _whole(self) -> None:
        number = self.request.number
        self.ending = "whole"
        scores = 0 if self.request.prompt_logprobs is None else len(self.request.prompt) - 1
        if self._scores != scores:
            self._find(f"request {number} has {self._scores} log probabilities of its prompt, not {scores}")
        if self._ends != 1:
            self._find(f"request {number} ended without an error, and its usage came {self._ends} times")
        for index, (got, wanted, reason) in enumerate(zip(self._got, self._wanted, self._reasons, strict=True)):
            if got != wanted:
                self._find(f"request {number}: answer {index} has {len(got)} of {len(wanted)} tokens")
            stopped = bool(wanted) and wanted[-1] in self.request.stop_ids
            if reason is not (FinishReason.STOP if stopped else FinishReason.LENGTH):
                self._find(f"request {number}: answer {index} ended with {reason}")

    def _judge(self, error: PillionError) -> None:
        """Check that a request may end with this error."""
        number, timeout_s = self.request.number, self.request.timeout_s
        if isinstance(error, DeadlineExceeded) and timeout_s is not None:
            return
        if isinstance(error, Overloaded) and timeout_s is not None:
            # Refused after its time in the queue.
            return
        if isinstance(error, Internal) and "two workers were lost in a step" in error.message and self._workers_lost:
            return
        if not self._excused or not isinstance(error, Unavailable):
            self._find(f"request {number}: {type(error).__name__}: {error.message}")
