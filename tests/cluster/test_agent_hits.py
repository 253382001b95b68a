"""Agents' conversations on real components: what `usage` says that each turn finds of the one before."""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import pytest

from lab.testbed.conditions import until
from lab.testbed.tiny_model import save_model
from tests.support.agent_turns import AgentTurns, compact
from tests.support.components import running_components
from tests.support.http import call

BODIES = pathlib.Path(__file__).parents[1] / "clients" / "bodies"
BLOCK, TURNS = 16, 7
WORD = {"type": "string", "pattern": '^[a-z"]{120}$'}
SCHEMA = {"type": "object", "properties": {"command": WORD}, "required": ["command"], "additionalProperties": False}
# Each API's fields for a tool and for a forced call.
APIS: dict[str, tuple[dict[str, Any], Any]] = {
    "claude_code": ({"name": "run", "input_schema": SCHEMA}, {"type": "any", "disable_parallel_tool_use": True}),
    "codex": ({"type": "function", "name": "run", "parameters": SCHEMA}, "required"),
    "opencode": ({"type": "function", "function": {"name": "run", "parameters": SCHEMA}}, "required"),
}


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens of a prompt, those of them that were cached, and tokens of the answer."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    found = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + found, found, usage["output_tokens"]


@pytest.mark.long
async def test_turns_hit_the_cache_of_earlier_turns(tmp_path: pathlib.Path) -> None:
    model = {
        "model": str(save_model(tmp_path / "tiny", max_position_embeddings=16_384)),
        "dtype": "float32",
        "max_model_len": 16_384,
    }
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        node = {"kv_pool_bytes": 64 * 2**20}
        async with running_components(pathlib.Path(short), model=model, node=node) as components:
            await until("the gateway to know the worker's model", components.client.models)
            for name, (tool, choice) in APIS.items():
                sent = json.loads((BODIES / f"{name}.json").read_text())
                sent["body"] |= {"model": "tiny", "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
                if name == "claude_code":
                    del sent["body"]["parallel_tool_calls"]
                turns, found, most, known = AgentTurns(sent), 0, 0, 0
                for _ in range(TURNS):
                    body = compact(turns.body).encode()
                    answer = await call(components.gateway.http_address, turns.path, body, sent["headers"])
                    assert answer.status == 200, answer.body
                    prompt, cached, written = counts(answer.json["usage"])
                    found, most = found + cached // BLOCK, most + known // BLOCK
                    # Neither the final token nor the last one before it has KV.
                    known = prompt + written - 2
                    turns.answered(answer.json)
                assert found >= 0.99 * most > 0, f"{name}: {found} of {most} blocks"
            await components.proven()
