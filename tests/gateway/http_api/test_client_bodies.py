"""Bodies of agents and their libraries, from tests/clients/bodies, at the APIs that they use.

Recorded from clients of a cluster, with texts and lists cut short. Written by hand: the bodies of Cline and Zed, the
reasoning in those of Codex and Claude Code, what these two send to their own servers only (`image_generation`,
`eager_input_streaming`), and those with turns and fields of other servers (`litellm_claude`, `openrouter`,
`mistral_sdk`, `old_openai`, `lm_eval`, `anthropic_server_tools`, `openai_server_tools`).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.fake_components import FakeCluster, running_fake_cluster
from tests.support.http import call

BODIES = pathlib.Path(__file__).parents[2] / "clients" / "bodies"
# Describes tools briefly, for the toy model's short context.
TEMPLATE = (
    "{# <tool_call> #}{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}{% for m in messages %}"
    "[{{ m.role[0] }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
)
CLIENTS = {
    *("codex", "claude_code", "opencode", "cline", "aider", "continue", "zed", "openai_agents_sdk", "instructor"),
    *("langchain", "litellm", "llamaindex", "vercel_ai_sdk"),
    *("litellm_claude", "openrouter", "mistral_sdk", "old_openai", "lm_eval"),
    *("anthropic_server_tools", "openai_server_tools"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fakes() -> AsyncIterator[FakeCluster]:
    async with running_fake_cluster(template=TEMPLATE) as running:
        yield running


def test_each_client_has_a_body() -> None:
    assert {path.stem for path in BODIES.glob("*.json")} == CLIENTS


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", sorted(CLIENTS))
async def test_a_body_is_answered_and_ignored_fields_are_named(fakes: FakeCluster, name: str) -> None:
    sent: dict[str, Any] = json.loads((BODIES / f"{name}.json").read_text())
    answer = await call(fakes.gateway.http_address, sent["path"], sent["body"], sent["headers"])
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-pillion-ignored", "") == sent["ignored"]
    kind = "text/event-stream; charset=utf-8" if sent["body"].get("stream") else "application/json"
    assert answer.headers["content-type"] == kind
    if sent["path"] == "/v1/messages":
        counted = {one: value for one, value in sent["body"].items() if one not in ("max_tokens", "stream", "metadata")}
        count = await call(fakes.gateway.http_address, f"{sent['path']}/count_tokens", counted, sent["headers"])
        assert count.status == 200, count.body
    await fakes.settled()
