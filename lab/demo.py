"""The demo: a real cluster, a few questions, and a table of where each prompt's tokens were computed (`make demo`).

A long prompt is sent once per split policy, named by an operator's header. Each time it has another cache salt, so that
it hits no cache.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
from rich import box
from rich.table import Table

from pillion.cli.app import run_command, takes_model, with_model
from pillion.cli.console import Notices, table_console
from pillion.cli.flags import FlagCommand, flag_options, option_name
from pillion.client.async_client import AsyncClient
from pillion.config import ServeFlags
from pillion.errors import ConfigError, Unavailable
from pillion.observability.log_format import set_up_logging
from pillion.supervisor.component_process import require_server_packages, run_unless, stop_on_signals
from pillion.supervisor.local_cluster import LocalCluster
from pillion.types import ChatMessage, SamplingParams, Timings, Usage

QUESTION = "What is the capital of France?"
FOLLOW_UP = "Write one sentence about that city."
LONG_PROMPT_CHARACTERS = 5000
SHORT_ANSWER_TOKENS = 64
LONG_ANSWER_TOKENS = 48
# Generous, since the cluster has just started and the model may still be paged in from disk.
REQUEST_TIMEOUT_S = 300.0
TABLE_WIDTH = 80
# Turns of the first conversation.
TURNS = 2
# Split policies of the long prompt; the last run uses the flags' own.
POLICIES = ("colocated", "disaggregated")
EXIT_INTERRUPTED = 130


@dataclass(slots=True)
class DemoAnswer:
    """One request as its client saw it. ``token_times_s``: one monotonic time per token."""

    title: str
    text: str = ""
    token_times_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def first_token_ms(self) -> float:
        return (self.token_times_s[0] - self.began_s) * 1000 if self.token_times_s else 0.0

    @property
    def inter_token_ms(self) -> float:
        """Median gap between tokens; 0 with fewer than two gaps."""
        pauses = [after - before for before, after in itertools.pairwise(self.token_times_s)]
        return statistics.median(pauses) * 1000 if pauses else 0.0


@contextmanager
def timed(stages: dict[str, float], name: str) -> Iterator[None]:
    """Measure the block's seconds into ``stages[name]``."""
    began = time.monotonic()
    try:
        yield
    finally:
        stages[name] = time.monotonic() - began


@click.command(cls=FlagCommand)
@takes_model
@flag_options(ServeFlags, placement=False)
def demo(**values: Any) -> int:
    """Start a cluster, send it a few prompts, and stop it.

    A table shows where the tokens of each prompt went; a long one is asked with several split policies.
    """
    for name in ("api_keys", "api_key", "tls_cert"):
        if values[name]:
            raise ConfigError(
                f"the demonstration asks its own cluster and takes no {option_name(name)}: use pillion serve"
            )
    ctx, default = click.get_current_context(), click.core.ParameterSource.DEFAULT
    # Avoid another cluster's ports.
    for name, value in {"http_port": 0, "grpc_port": 0, "max_model_len": 4096}.items():
        if ctx.get_parameter_source(name) is default:
            values[name] = value
    flags = with_model(ServeFlags, values)
    require_server_packages()
    set_up_logging(flags.log_level, flags.log_format, "pillion")
    return asyncio.run(_demo(flags, Notices(form=flags.log_format)))


async def _demo(flags: ServeFlags, notices: Notices) -> int:
    stop, stages = asyncio.Event(), dict[str, float]()
    stop_on_signals(stop)
    # It ends before a standby could be of use.
    cluster = LocalCluster(flags, notices, standby=False)
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
        policies = dict.fromkeys((*(POLICIES if cluster.flags.prefill_workers else ()), cluster.flags.split_policy))
        conversation = await run_unless(supervisor.failed(), converse(cluster.target, tuple(policies)))
        if not conversation:
            raise Unavailable(await supervisor.failed())
        return conversation.result()


async def converse(target: str, policies: Sequence[str]) -> list[DemoAnswer]:
    """Send all requests of the table: the long prompt per split policy, twice with the last."""
    first = [ChatMessage("user", QUESTION)]
    one = await ask(target, "first turn", first, SHORT_ANSWER_TOKENS)
    second = [*first, ChatMessage("assistant", one.text), ChatMessage("user", FOLLOW_UP)]
    answers = [one, await ask(target, "second turn", second, SHORT_ANSWER_TOKENS)]
    text = str(importlib.metadata.metadata("pillion").json["description"])[:LONG_PROMPT_CHARACTERS]
    long = [ChatMessage("user", f"{text}\n\nSay in one sentence what this text describes.")]
    for policy in policies:
        answers.append(await ask(target, policy, long, LONG_ANSWER_TOKENS, policy))
    return [*answers, await ask(target, f"{policies[-1]} again", long, LONG_ANSWER_TOKENS, policies[-1])]


async def ask(target: str, title: str, messages: list[ChatMessage], max_tokens: int, policy: str = "") -> DemoAnswer:
    """Send one greedy chat request and print its text as it streams. KV is shared only between requests of the same
    ``policy``. Raises PillionError."""
    asked = messages[-1].content
    shown = asked if len(asked) < 200 else f"({len(asked):,} characters of README.md) {asked.rpartition(chr(10))[2]}"
    print(f"\n{title} > {shown}")
    answer = DemoAnswer(title, began_s=time.monotonic())
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    async with AsyncClient(target, plan=f"policy={policy}" if policy else "") as client:
        deltas = client.chat(messages, sampling=sampling, cache_salt=policy, timeout_s=REQUEST_TIMEOUT_S)
        async for delta in deltas:
            now = time.monotonic()
            answer.token_times_s += [now] * len(delta.token_ids)
            answer.text += delta.text
            answer.usage, answer.timings = delta.usage or answer.usage, delta.timings or answer.timings
            print(delta.text, end="", flush=True)
    print()
    return answer


def table_of(answers: list[DemoAnswer]) -> Table:
    """Make a table with one row per request: prompt = cached + prefilled + decode worker's, and its times."""
    table = Table(
        title="Where each prompt's tokens were computed, and when the answer's tokens came",
        caption="Tokens from the cache were not computed. The rows below the line are one long prompt: without"
        " anything in the cache as each split policy has it, and once more. The hand-off is the time from the last"
        " prefill chunk to the prompt's first step at the decode worker.",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("")
    # Fits in 80 columns.
    tokens = ("\nprompt", "= from\ncache", "+ prefill\n(chunks)", "+ decode\nworker")
    for name in (*tokens, "prefill\nms", "hand-off\nms", "first\nms", "between\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    for answer in answers:
        t, usage = answer.timings or Timings(), answer.usage or Usage(0, 0, 0)
        split = t.prefill_chunks > 0
        table.add_row(
            answer.title,
            str(usage.prompt_tokens),
            str(t.cached_tokens),
            f"{t.prefilled_tokens} ({t.prefill_chunks})" if split else "0",
            str(t.tail_tokens),
            f"{t.prefill_ms:.0f}" if split else "",
            f"{t.decode_queue_ms:.1f}" if split else "",
            f"{answer.first_token_ms:.0f}",
            f"{answer.inter_token_ms:.1f}",
            end_section=answer is answers[TURNS - 1],
        )
    return table


if __name__ == "__main__":
    run_command(demo, None, "python -m lab.demo")
