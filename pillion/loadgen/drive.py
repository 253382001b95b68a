"""Sends sessions at their times and records the answers.

    open loop     a session begins at its time, however slow the server is; a cap may delay its requests
    closed loop   a fixed number of sessions at any time; the next begins when one ends
    turns         each is due a pause after the previous answer's end, in which the user reads

Time zero is the begin of the run. Every wait is limited: a request that exceeds its timeout ends its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from pillion.loadgen.figures import OK, Record, Run
from pillion.loadgen.load import LoadSession, Turn, text_of
from pillion.loadgen.target import AnswerRequest, LoadTarget, Message, TargetError, TokenCounts
from pillion.tasks import end_tasks

# Period of the timer that measures stalls of the event loop.
STALL_PERIOD_S = 0.05


@dataclass
class LoadDriver:
    """Drives one run against one target. Use an instance once.

    Attributes:
        concurrency: sessions at any time in a closed loop; None: each session begins at its own time.
        max_concurrency: limit of requests in flight; None for none.
        timeout_s: timeout of one request, from when it was sent.
        as_chat: send each prompt of token ids as a chat message of words.
        on_done: called after each request.
    """

    target: LoadTarget
    sessions: Sequence[LoadSession]
    _: KW_ONLY
    concurrency: int | None = None
    max_concurrency: int | None = None
    timeout_s: float = 600.0
    as_chat: bool = False
    on_done: Callable[[Record], None] = lambda record: None

    def __post_init__(self) -> None:
        self._cap = asyncio.Semaphore(self.max_concurrency or sys.maxsize)
        self._records: list[Record] = []
        self._begin = 0.0

    async def run(self) -> Run:
        """Send all sessions, and return the run when every request has ended. Cancelling it cancels all requests."""
        stalls: list[float] = []
        watching = asyncio.create_task(_watch_loop(stalls))
        cpu, self._begin = time.process_time(), time.perf_counter()
        try:
            await (self._open() if self.concurrency is None else self._closed(self.concurrency))
            duration_s, cpu_s = self._now(), time.process_time() - cpu
        finally:
            await end_tasks(watching)
        turns = sum(len(session.turns) for session in self.sessions)
        records = tuple(sorted(self._records, key=lambda record: (record.due_s, record.session, record.turn)))
        return Run(records, duration_s, cpu_s, tuple(stalls), turns - len(records))

    async def _open(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, session in enumerate(self.sessions):
                await self._sleep_until(session.at_s)
                group.create_task(self._session(number, session, session.at_s))

    async def _closed(self, concurrency: int) -> None:
        waiting = iter(enumerate(self.sessions))

        async def client() -> None:
            for number, session in waiting:
                await self._session(number, session, self._now())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())

    async def _session(self, number: int, session: LoadSession, due_s: float) -> None:
        history: list[Message] = [{"role": "system", "content": session.system}] if session.system else []
        for turn_number, turn in enumerate(session.turns):
            if turn_number:
                due_s += turn.think_s
                await self._sleep_until(due_s)
            request = self._request_of(turn, history)
            record, text = await self._send(number, turn_number, request, due_s)
            self._records.append(record)
            self.on_done(record)
            if not record.ok:
                return
            due_s = record.ended_s
            history = [*request.messages, {"role": "assistant", "content": text}]

    def _request_of(self, turn: Turn, history: list[Message]) -> AnswerRequest:
        if turn.ids and not self.as_chat:
            return AnswerRequest(turn.output_tokens, ids=turn.ids)
        message = {"role": "user", "content": turn.text or text_of(turn.ids)}
        return AnswerRequest(turn.output_tokens, messages=(*history, message))

    async def _send(self, session: int, turn: int, request: AnswerRequest, due_s: float) -> tuple[Record, str]:
        messages: list[tuple[float, int]] = []
        texts: list[str] = []
        counts: TokenCounts | None = None
        status, error = OK, ""
        arrived_s = self._now()
        async with self._cap:
            sent_s = self._now()
            try:
                async with (
                    asyncio.timeout(self.timeout_s),
                    contextlib.aclosing(self.target.stream(request)) as stream,
                ):
                    async for message in stream:
                        if message.tokens:
                            messages.append((self._now(), message.tokens))
                        texts.append(message.text)
                        counts = message.counts or counts
            except TargetError as failure:
                status, error = failure.status, failure.message
            except TimeoutError:
                status, error = "timeout", f"no complete answer within {self.timeout_s:g} s"
            if status == OK and not messages:
                status, error = "empty", "the answer has no token"
        received_tokens = sum(tokens for _, tokens in messages)
        record = Record(
            number=len(self._records),
            session=session,
            turn=turn,
            due_s=due_s,
            held_s=sent_s - arrived_s,
            sent_s=sent_s,
            ended_s=self._now(),
            messages=tuple(messages),
            prompt_tokens=counts.prompt if counts else len(request.ids),
            cached_tokens=counts.cached if counts else 0,
            output_tokens=counts.output if counts else received_tokens,
            asked_tokens=request.output_tokens,
            status=status,
            error=error,
        )
        return record, "".join(texts)

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    async def _sleep_until(self, at_s: float) -> None:
        # Sleep even if late: the loop then sends pending requests before new ones are created.
        await asyncio.sleep(max(0.0, at_s - self._now()))


async def _watch_loop(stalls: list[float]) -> None:
    """Record how late a timer of the event loop fires; messages are read with the same delay."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(STALL_PERIOD_S)
        stalls.append(max(0.0, time.perf_counter() - before - STALL_PERIOD_S))
