"""Share of an agent's last turn that the next one finds in the prefix cache, in whole blocks."""

from __future__ import annotations

import json
import pathlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.tokens.test_tool_templates import QWEN
from tests.support import fake_components
from tests.support.agent_turns import AgentTurns, compact, hermes_call, shared
from tests.support.fake_components import TEMPLATE, FakeCluster, running_fake_cluster, script_of
from tests.support.http import call

BODIES = pathlib.Path(__file__).parents[2] / "clients" / "bodies"
# A harness that sends only texts has no turns.
CLIENTS = sorted(path.stem for path in BODIES.glob("*.json") if path.stem != "lm_eval")
BLOCK = 16
# A template with tools and reasoning, and one without, for which the gateway writes tools as text.
TEMPLATES = {"qwen": QWEN, "generic": TEMPLATE}
# Turns per conversation; clients with many turns suffice, since clients differ in the first ones.
TURNS, MANY_TURNS = 8, 40
LONG = [
    *(("qwen", client, MANY_TURNS if client == "claude_code" else TURNS) for client in CLIENTS),
    ("generic", "opencode", MANY_TURNS),
]
FEW = [
    ("qwen", "claude_code", 11),
    ("qwen", "codex", 11),
    ("generic", "claude_code", 11),
    ("generic", "vercel_ai_sdk", 11),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TEMPLATES)
async def templated(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, FakeCluster]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fake_components, "MAX_LEN", 65_536)
        async with running_fake_cluster(template=TEMPLATES[request.param], split_policy="colocated") as running:
            yield request.param, running


async def check_hits(templated: tuple[str, FakeCluster], client: str, turns: int) -> None:
    """The next turn's prompt begins with the whole blocks of this turn's prompt and answer."""
    template, fakes = templated
    sent = json.loads((BODIES / f"{client}.json").read_text())
    talk, known, found, most = AgentTurns(sent), (), 0, 0
    for _ in range(turns):
        text = ("<think>\nIt is a file.\n</think>\n\n" if template == "qwen" else "") + "I look."
        if talk.calls:
            text += "\n" + hermes_call(*talk.call())
        fakes.decode.script = script_of(text)
        answer = await call(fakes.gateway.http_address, talk.path, compact(talk.body).encode(), sent["headers"])
        assert answer.status == 200, answer.body
        prompt = tuple(fakes.decode.submits[-1].token_ids)
        if known:
            found += shared(known, prompt) // BLOCK
            most += min(len(known), len(prompt)) // BLOCK
        known = prompt + fakes.decode.script[:-1]
        talk.answered(answer.json)
    assert found == most > 0, f"{found} of {most} blocks"
    await fakes.settled()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_next_turn_hits_the_cache_of_the_last(templated: tuple[str, FakeCluster]) -> None:
    for template, client, turns in FEW:
        if template == templated[0]:
            await check_hits(templated, client, turns)


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("templated", "client", "turns"), LONG, indirect=["templated"])
async def test_each_turn_of_a_long_conversation_hits_the_cache(
    templated: tuple[str, FakeCluster], client: str, turns: int
) -> None:
    await check_hits(templated, client, turns)
