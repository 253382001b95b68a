"""Defaults: a model's own sampling values, and the rest of the context as max_tokens, at every API. The model
recommends temperature 0, so its answers are greedy wherever the recommendation applies."""

from __future__ import annotations

import asyncio
import json
import pathlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from lab.testbed.conditions import until
from lab.testbed.tiny_model import save_model
from pillion import LLM, FinishReason, SamplingParams
from tests.support.components import Components, running_components

TOKENS = 12
CONTEXT = 256
PROMPT = "Once upon a time"
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = save_model(tmp_path_factory.mktemp("defaults") / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_k": 50}))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def components(tiny: pathlib.Path) -> AsyncIterator[Components]:
    model = {"model": str(tiny), "dtype": "float32", "max_model_len": CONTEXT}
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        gateway = {"batch_path": str(folder / "batches")}
        async with running_components(folder, model=model, gateway=gateway) as running:
            await until("the gateway to know the worker's model", running.client.models)
            yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


def http(components: Components) -> openai.AsyncOpenAI:
    url = f"http://{components.gateway.http_address}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


async def text_of(stream: Any) -> str:
    return "".join([delta.text async for delta in stream])


async def batched(client: openai.AsyncOpenAI) -> str:
    """Return the chat's answer by a batch of one line."""
    body = {"model": "tiny", "messages": CHAT, "max_tokens": TOKENS}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = await client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

    async def ended() -> Any:
        found = await client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed") else None

    done = await until("the batch to end", ended)
    assert done.output_file_id is not None
    written = json.loads((await client.files.content(done.output_file_id)).text)
    return str(written["response"]["body"]["choices"][0]["message"]["content"])


async def test_the_models_default_temperature_applies_to_every_api(components: Components, tiny: pathlib.Path) -> None:
    client = components.client
    greedy = await text_of(client.chat(CHAT, temperature=0, max_tokens=TOKENS))
    plain = await text_of(client.generate(PROMPT, temperature=0, max_tokens=TOKENS))
    # A shared seed would also give equal answers, but none is given, and each API draws its own.
    assert await text_of(client.chat(CHAT, max_tokens=TOKENS)) == greedy
    assert await text_of(client.generate(PROMPT, max_tokens=TOKENS)) == plain
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS}
    async with http(components) as api:
        chat = await api.chat.completions.create(messages=CHAT, **asked)
        completion = await api.completions.create(prompt=PROMPT, **asked)
        response = await api.responses.create(model="tiny", input=PROMPT, max_output_tokens=TOKENS)
        other = await api.responses.create(model="tiny", input=PROMPT, max_output_tokens=TOKENS, top_p=0.5)
        batch = await batched(api)
    async with anthropic.AsyncAnthropic(
        base_url=f"http://{components.gateway.http_address}", api_key="none", max_retries=0
    ) as api:
        message = await api.messages.create(messages=CHAT, **asked)
    assert completion.choices[0].text == plain
    texts = [chat.choices[0].message.content, response.output_text, batch, message.content[0].text]  # type: ignore[union-attr]
    assert texts == [greedy] * 4
    assert (response.temperature, response.top_p) == (0.0, 1.0)
    assert (other.temperature, other.top_p) == (0.0, 0.5)

    def offline() -> tuple[str, str]:
        with LLM(str(tiny), dtype="float32", max_model_len=CONTEXT, kv_pool_bytes="64MiB") as llm:
            (spoken,) = llm.chat(CHAT, SamplingParams(max_tokens=TOKENS), use_tqdm=False)
            (continued,) = llm.generate(PROMPT, SamplingParams(max_tokens=TOKENS), use_tqdm=False)
            return spoken.outputs[0].text, continued.outputs[0].text

    assert await asyncio.to_thread(offline) == (greedy, plain)
    await components.proven()


async def test_models_are_listed_with_default_sampling_params(components: Components) -> None:
    async with http(components) as api:
        listed = await api.models.retrieve("tiny")
    values = {"temperature": 0.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}
    values |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert listed.default_sampling_params == values  # type: ignore[attr-defined]
    (info,) = await components.client.models()
    assert info.sampling == SamplingParams(**values)


async def test_flags_ignore_or_override_the_models_generation_config(components: Components) -> None:
    greedy = await text_of(components.client.chat(CHAT, max_tokens=TOKENS))
    async with components.another_gateway(generation_config="vllm") as client:
        drawn = {await text_of(client.chat(CHAT, max_tokens=TOKENS, seed=seed)) for seed in range(3)}
        assert len(drawn | {greedy}) > 2
    async with components.another_gateway(override_generation_config='{"max_new_tokens": 3}') as client:
        last = [delta async for delta in client.chat(CHAT, max_tokens=TOKENS, ignore_eos=True)][-1]
        assert (last.usage.completion_tokens, last.finish_reason) == (3, FinishReason.LENGTH)  # type: ignore[union-attr]


async def test_max_tokens_is_capped_to_the_remaining_context(components: Components) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 10**6}
    extra = {"extra_body": {"ignore_eos": True}}
    async with http(components) as api:
        chat = await api.chat.completions.with_raw_response.create(messages=CHAT, **asked, **extra)
        completion = await api.completions.with_raw_response.create(prompt=PROMPT, **asked, **extra)
        response = await api.responses.with_raw_response.create(
            model="tiny", input=PROMPT, max_output_tokens=10**6, **extra
        )
        streamed = await api.chat.completions.with_raw_response.create(messages=CHAT, stream=True, **asked, **extra)
        within = await api.chat.completions.with_raw_response.create(messages=CHAT, model="tiny", max_tokens=3)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
            await api.completions.create(prompt="a" * 2000, **asked)
    for raw in (chat, completion):
        parsed = raw.parse()
        assert parsed.usage.total_tokens == CONTEXT
        assert int(raw.headers["x-max-tokens"]) == parsed.usage.completion_tokens
        assert parsed.choices[0].finish_reason == "length"
    whole = response.parse()
    assert whole.usage is not None
    assert whole.usage.total_tokens == CONTEXT
    assert int(response.headers["x-max-tokens"]) == whole.usage.output_tokens
    assert (whole.status, whole.max_output_tokens) == ("incomplete", 10**6)
    assert streamed.headers["x-max-tokens"] == chat.headers["x-max-tokens"]
    assert "x-max-tokens" not in within.headers
    async with anthropic.AsyncAnthropic(
        base_url=f"http://{components.gateway.http_address}", api_key="none", max_retries=0
    ) as api:
        message = await api.messages.with_raw_response.create(model="tiny", messages=CHAT, max_tokens=20_000, **extra)
    assert message.headers["x-max-tokens"] == chat.headers["x-max-tokens"]
    last = [delta async for delta in components.client.chat(CHAT, max_tokens=10**6, ignore_eos=True)][-1]
    assert last.usage is not None
    assert last.usage.prompt_tokens + last.usage.completion_tokens == CONTEXT
    await components.proven()
