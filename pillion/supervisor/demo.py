"""`pillion demo` runs the real cluster, asks the model three questions, and shows in a table where each prompt's tokens
went.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from pillion.cli.console import Notices, table_console
from pillion.client.async_client import AsyncClient
from pillion.config import ServeFlags
from pillion.errors import Unavailable
from pillion.observability.log_format import set_up_logging
from pillion.supervisor.component_process import require_server_packages, run_unless, stop_on_signals
from pillion.supervisor.local_cluster import LocalCluster
from pillion.types import ChatMessage, Timings, Usage

QUESTION = "What is the capital of France?"
FOLLOW_UP = "Write one sentence about that city."
LONG_PROMPT_CHARACTERS = 5000
SHORT_ANSWER_TOKENS = 64
LONG_ANSWER_TOKENS = 48
# The cluster has just started, and the model's pages may still be read from disk.
REQUEST_TIMEOUT_S = 300.0
TABLE_WIDTH = 80
EXIT_INTERRUPTED = 130


@dataclass(slots=True)
class DemoAnswer:
    """Records one request as its client saw it. ``token_times_s`` has one entry per token, on a monotonic clock."""

    title: str
    text: str = ""
    token_times_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def first_token_ms(self) -> float:
        """Gives the time from the call to the first token."""
        return (self.token_times_s[0] - self.began_s) * 1000 if self.token_times_s else 0.0

    @property
    def inter_token_ms(self) -> float:
        """Gives the median of the pauses between tokens; 0 where there are fewer than two."""
        pauses = [after - before for before, after in itertools.pairwise(self.token_times_s)]
        return statistics.median(pauses) * 1000 if pauses else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Gives the tokens per second while decoding. The first token is not counted, because its time is that of the
        prompt."""
        times = self.token_times_s
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0


@contextmanager
def timed(stages: dict[str, float], name: str) -> Iterator[None]:
    """Measures the block's seconds as ``stages[name]``."""
    began = time.monotonic()
    try:
        yield
    finally:
        stages[name] = time.monotonic() - began


def run_demo(flags: ServeFlags) -> int:
    """Runs the demonstration; returns the exit status. Raises PillionError."""
    require_server_packages()
    set_up_logging(flags.log_level, flags.log_format, "pillion")
    return asyncio.run(_demo(flags, Notices(form=flags.log_format)))


async def _demo(flags: ServeFlags, notices: Notices) -> int:
    stop, stages = asyncio.Event(), dict[str, float]()
    stop_on_signals(stop)
    cluster = LocalCluster(flags, notices)
    try:
        work = await run_unless(stop.wait(), _run(cluster, notices, stages))
        if not work:
            return EXIT_INTERRUPTED
        answers = work.result()
    finally:
        with timed(stages, "stop"):
            await cluster.stop()
    console = table_console(TABLE_WIDTH)
    console.print()
    console.print(table_of(answers))
    left = cluster.left_behind()
    notices.say("times: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items()))
    if left:
        notices.say(f"left behind: {', '.join(left)}", "bold red")
        return 1
    notices.say("stopped: no process, shared memory or file is left behind", "bold green")
    return 0


async def _run(cluster: LocalCluster, notices: Notices, stages: dict[str, float]) -> list[DemoAnswer]:
    with timed(stages, "model ready"):
        await cluster.prepare()
    with timed(stages, "cluster ready"), notices.progress("starting redis, kvnode, prefill, decode and gateway"):
        supervisor = await cluster.start()
    notices.say(f"cluster ready after {stages['cluster ready']:.1f} s, gRPC {cluster.target}", "bold green")
    with timed(stages, "answers"):
        async with AsyncClient(cluster.target) as client:
            conversation = await run_unless(supervisor.failed(), _converse(client))
            if not conversation:
                raise Unavailable(await supervisor.failed())
            return conversation.result()


async def _converse(client: AsyncClient) -> list[DemoAnswer]:
    first = [ChatMessage("user", QUESTION)]
    one = await ask(client, "first turn", first, SHORT_ANSWER_TOKENS)
    second = [*first, ChatMessage("assistant", one.text), ChatMessage("user", FOLLOW_UP)]
    two = await ask(client, "second turn", second, SHORT_ANSWER_TOKENS)
    text = str(importlib.metadata.metadata("pillion").json["description"])[:LONG_PROMPT_CHARACTERS]
    prompt = f"{text}\n\nSay in one sentence what this text describes."
    three = await ask(client, "long prompt", [ChatMessage("user", prompt)], LONG_ANSWER_TOKENS)
    return [one, two, three]


async def ask(client: AsyncClient, title: str, messages: list[ChatMessage], max_tokens: int) -> DemoAnswer:
    """Sends one greedy chat request, and writes its text as it comes. Raises PillionError."""
    asked = messages[-1].content
    shown = asked if len(asked) < 200 else f"({len(asked):,} characters of README.md) {asked.rpartition(chr(10))[2]}"
    print(f"\n> {shown}")
    answer = DemoAnswer(title, began_s=time.monotonic())
    async for delta in client.chat(messages, temperature=0.0, max_tokens=max_tokens, timeout_s=REQUEST_TIMEOUT_S):
        now = time.monotonic()
        answer.token_times_s += [now] * len(delta.token_ids)
        answer.text += delta.text
        answer.usage, answer.timings = delta.usage or answer.usage, delta.timings or answer.timings
        print(delta.text, end="", flush=True)
    print()
    return answer


def table_of(answers: list[DemoAnswer]) -> Table:
    """Makes a table with one row per request: prompt = cached + prefilled + prompt tail, and its latencies."""
    table = Table(title="Where each prompt's tokens went, and when the answer's came", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("", no_wrap=True)
    # The table fits into 80 columns.
    tokens = ("\nprompt", "\n= cached", "+ prefilled\n(chunks)", "+ prompt\ntail", "\nanswer")
    for name in (*tokens, "first\n(ms)", "between\n(ms)", "tokens\nper s"):
        table.add_column(name, justify="right", no_wrap=True)
    for answer in answers:
        t, usage = answer.timings or Timings(), answer.usage or Usage(0, 0, 0)
        chunks = f"{t.prefilled_tokens} ({t.prefill_chunks})"
        table.add_row(
            answer.title,
            str(usage.prompt_tokens),
            str(t.cached_tokens),
            chunks if t.prefill_chunks else "0",
            str(t.tail_tokens),
            str(usage.completion_tokens),
            f"{answer.first_token_ms:.0f}",
            f"{answer.inter_token_ms:.1f}",
            f"{answer.tokens_per_s:.1f}",
        )
    return table
