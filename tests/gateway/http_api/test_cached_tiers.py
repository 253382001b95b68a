"""Tiers of cached tokens, as the client libraries of each API read them."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from pillion.types import Delta, FinishReason, Timings, Usage
from tests.support.fake_components import running_fake_cluster
from tests.support.scripted import ScriptedGateway

USED = Usage(100, 64, 9, fetched_tokens=8, restored_tokens=16, bucket_tokens=24)
TIERS = {"pool_tokens": 16, "fetched_tokens": 8, "restored_tokens": 16, "bucket_tokens": 24}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_api_reports_the_tiers_of_cached_tokens(stream: bool) -> None:
    async with running_fake_cluster("") as fakes:
        scripted, url = ScriptedGateway(fakes), f"http://{fakes.gateway.http_address}"
        scripted.script = [Delta("r", "yes", (), FinishReason.STOP, USED, Timings())]
        scripted.usage = USED
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as openai_client:
            more: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answers = [
                await openai_client.chat.completions.create(model="toy", messages=HI, **more),
                await openai_client.completions.create(model="toy", prompt="hi", **more),
            ]
            for answer in answers:
                last = [event async for event in answer][-1] if stream else answer
                details = last.usage.prompt_tokens_details
                assert (details.cached_tokens, details.cached_tokens_details) == (64, TIERS)
            response: Any = await openai_client.responses.create(model="toy", input="hi", stream=stream)
            if stream:
                response = [event async for event in response][-1].response
            assert response.usage.input_tokens_details.cached_tokens == 64
            assert response.usage.input_tokens_details.cached_tokens_details == TIERS
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            message: Any = await client.messages.create(model="toy", max_tokens=9, messages=HI, stream=stream)
            if stream:
                message = [event async for event in message][-2]
            assert message.usage.cache_read_input_tokens == 64
            assert message.usage.cached_tokens_details == TIERS
