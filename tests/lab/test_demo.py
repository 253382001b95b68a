"""`make demo`: its table, its requests, and the flags that it refuses."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console

from lab.demo import LONG_PROMPT_CHARACTERS, POLICIES, DemoAnswer, converse, demo, table_of
from pillion import AsyncClient, ChatMessage, Delta
from pillion.errors import ConfigError
from pillion.types import Timings, Usage
from pillion.wire.public import PLAN_HEADER


def test_the_table_fits_into_80_columns() -> None:
    tokens = {"cached_tokens": 1024, "prefilled_tokens": 4096, "prefill_chunks": 16, "tail_tokens": 511}
    timings = Timings(**tokens, prefill_ms=12489.6, decode_queue_ms=100.25)
    answer = DemoAnswer("disaggregated again", usage=Usage(5631, 1024, 100), timings=timings)
    answer.token_times_s = [answer.began_s + 12.5, answer.began_s + 13.75, answer.began_s + 15.0]
    console = Console(width=80, file=io.StringIO())
    console.print(table_of([answer] * 3))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in written
    figures = ("disaggregated", "5631", "1024", "4096 (16)", "511", "12490", "100.2", "12500", "1250.0")
    assert all(text in written for text in figures)


async def test_the_long_prompt_is_sent_cold_per_policy_and_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int, str]] = []

    def chat(client: AsyncClient, messages: list[ChatMessage], *, cache_salt: str, **_: Any) -> Any:
        plan = dict(client._connection.metadata()).get(PLAN_HEADER, "")
        asked.append((plan, len(messages[-1].content), cache_salt))
        return told()

    async def told() -> AsyncIterator[Delta]:
        yield Delta("", "Paris", (1,))

    monkeypatch.setattr(AsyncClient, "chat", chat)
    answers = await converse("unix:nobody", (*POLICIES, "auto"))
    assert [answer.title for answer in answers] == [
        *("first turn", "second turn"),
        *("colocated", "disaggregated", "auto", "auto again"),
    ]
    assert [(plan, salt) for plan, _, salt in asked] == [
        *[("", "")] * 2,
        ("policy=colocated", "colocated"),
        ("policy=disaggregated", "disaggregated"),
        *[("policy=auto", "auto")] * 2,
    ]
    assert all(answer.text == "Paris" and len(answer.token_times_s) == 1 for answer in answers)
    long = {size for _, size, salt in asked if salt}
    assert len(long) == 1
    assert long.pop() > LONG_PROMPT_CHARACTERS


@pytest.mark.parametrize("flag", ["--api-keys=x", "--tls-cert=x"])
def test_keys_and_certificates_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="use pillion serve"):
        demo.main([flag], standalone_mode=False)
