"""An agent's conversation in real components beside other tenants' prompts, in a pool that is too small for all: what
its next turn finds, with and without retentions."""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import pytest

from lab.testbed.conditions import until
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion.kvstore import assemble
from pillion.kvstore.retentions.node_retentions import NodeRetentions
from tests.support.components import Components, running_components
from tests.support.http import call

BLOCK, SLOTS = 16, 224
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 16 * 4
WORD = {"type": "string", "pattern": "^[a-z]{8}$"}
SCHEMA = {"type": "object", "properties": {"command": WORD}, "required": ["command"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "run", "parameters": SCHEMA}}
# Each of the other tenants' prompts takes some forty blocks, and comes so many seconds after the one before it, on the
# clock of the pool's retentions. A tool takes as long as OTHERS of them. Others' blocks have rested for BETWEEN_S at
# least when they are in the way, and what is kept for the agent is worth more.
OTHER_TOKENS, OTHERS, BETWEEN_S, WORTH = 645, 6, 10.0, 1 / 5
TURNS = 3


class PoolTime:
    """The time of a pool's retentions, which moves by the test alone."""

    def __init__(self, components: Components) -> None:
        retentions = components.kvnode.pool.retentions
        assert isinstance(retentions, NodeRetentions)
        self.policy = retentions.retaining
        self.now_s = 1000.0
        self.policy._clock = lambda: self.now_s
        # The node gives the times of a wish by its own clock.
        retain = self.policy.retain

        def retained(owner: str, hashes: list[bytes], steps: list[tuple[float, float]], until_s: float) -> bool:
            self.asked = True
            return retain(owner, hashes, [(self.now_s, WORTH)], self.now_s + 4 * OTHERS * BETWEEN_S)

        self.policy.retain = retained  # type: ignore[method-assign, assignment]
        self.asked = False


async def found_by_turns(components: Components, hints: list[Any]) -> list[tuple[int, int]]:
    """Runs an agent's conversation whose every answer calls a tool, with other tenants' prompts before each result;
    returns how many whole blocks each turn after the first found, of how many that the turn before it had left."""
    time = PoolTime(components)
    found, known, others = [], 0, 100
    messages: list[Any] = [{"role": "user", "content": "x" * 300}]
    for turn in range(TURNS):
        time.asked = False
        body = {"model": "tiny", "messages": messages, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
        body |= {"max_tokens": 200, "kv_hints": hints[turn]} if hints[turn] else {"max_tokens": 200}
        answer = await call(components.gateway.http_address, "/v1/chat/completions", json.dumps(body).encode())
        assert answer.status == 200, answer.body
        [choice] = answer.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        usage = answer.json["usage"]
        if turn:
            found.append((usage["prompt_tokens_details"]["cached_tokens"] // BLOCK, known))
        known = (usage["prompt_tokens"] - 1) // BLOCK
        if hints[turn] is None:
            await until("the node to be told", lambda: time.asked)
        await until("the request's ticket to end", lambda: not components.kvnode.pool.ledger.tickets)
        messages += [choice["message"], {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"]}]
        messages[-1]["content"] = "done " * 10
        for _ in range(OTHERS):
            time.now_s += BETWEEN_S
            others += 1
            prompt = byte_prompt(others, OTHER_TOKENS)
            async for _ in components.client.generate(prompt, temperature=0.0, max_tokens=2, ignore_eos=True):
                pass
    return found


async def conversation(tmp_path: pathlib.Path, percent: int, hints: list[Any]) -> list[tuple[int, int]]:
    model = {"model": str(save_model(tmp_path / "tiny", max_position_embeddings=4096)), "dtype": "float32"}
    model |= {"max_model_len": 1536}
    node = {"kv_pool_bytes": SLOTS * BLOCK_BYTES}
    with tempfile.TemporaryDirectory(prefix="pil-") as short, pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "MAX_RETAINED_PERCENT", percent)
        patch.setattr(assemble, "MAX_TENANT_RETAINED_PERCENT", 80)
        async with running_components(
            pathlib.Path(short), model=model, node=node, gateway={"split_policy": "colocated"}
        ) as components:
            assert components.kvnode.pool.ledger.num_slots == SLOTS
            await until("the gateway to know the worker's model", components.client.models)
            found = await found_by_turns(components, hints)
            await components.proven()
            return found


@pytest.mark.long
async def test_a_turn_finds_its_conversation_after_its_tools_gap(tmp_path: pathlib.Path) -> None:
    kept = await conversation(tmp_path, 80, [None] * TURNS)
    assert all(blocks >= known > 10 for blocks, known in kept), kept


@pytest.mark.long
async def test_without_room_for_retentions_or_by_a_hint_it_is_computed_again(tmp_path: pathlib.Path) -> None:
    for percent, evict in ((0, False), (80, True)):
        hint = {"action_id": "a", "action_type": "kv.evict", "action_version": "0.1", "payload": {}}
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": [hint]} if evict else None
        lost = await conversation(tmp_path, percent, [hints] * TURNS)
        assert all(blocks < known / 4 for blocks, known in lost), lost
