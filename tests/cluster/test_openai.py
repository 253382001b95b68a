"""The real `openai` client against the real components on a small model: sync, async, streaming, errors, cancels."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
import pytest_asyncio
import torch
import transformers

from lab.testbed.conditions import until
from lab.testbed.tiny_model import BOS, EOS, save_model
from pillion.errors import InvalidRequest
from pillion.types import TenantUsage, Usage
from tests.support.components import Components, running_components
from tests.support.http import call

PROMPT = list(range(2, 91))
ASKED: dict[str, Any] = {"max_tokens": 8, "seed": 11, "extra_body": {"ignore_eos": True}}
UNFOLLOWED = {"properties": {"a": {"not": {"const": 1}}}}
WRONG_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNFOLLOWED}}
MESSAGES: Any = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def components(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Components]:
    folder = tmp_path_factory.mktemp("openai")
    model = {"model": str(save_model(folder / "tiny")), "dtype": "float32", "max_model_len": 512}
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        async with running_components(pathlib.Path(name), model=model, gateway={"chunk_size": 32}) as running:
            await until("the gateway to know the worker's model", running.client.models)
            yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


def client_of(components: Components, **options: Any) -> openai.AsyncOpenAI:
    url = f"http://{components.gateway.http_address}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=200, **options)


async def test_a_completion_equals_that_of_grpc(components: Components) -> None:
    asked = {"max_tokens": 8, "ignore_eos": True, "seed": 11, "logprobs": 2}
    deltas = [delta async for delta in components.client.generate(PROMPT, **asked)]
    async with client_of(components) as client:
        completion = await client.completions.create(model="tiny", prompt=PROMPT, logprobs=2, **ASKED)
        (choice,) = completion.choices
        assert choice.text == "".join(delta.text for delta in deltas)
        assert choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs == [one.logprob for delta in deltas for one in delta.logprobs]
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (
            89,
            8,
            97,
        )
        assert completion.usage.prompt_tokens_details.cached_tokens == 80
        salted = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"cache_salt": "mine"}
        )
        assert salted.usage.prompt_tokens_details.cached_tokens == 0
    await components.proven()


async def test_usage_and_timings_report_cached_and_computed_tokens(components: Components) -> None:
    """A prompt is computed once and found the second time; the tenant's sums are those of its requests."""
    asked = {"model": "tiny", "prompt": [3, *PROMPT[1:]], "max_tokens": 8, "ignore_eos": True}
    address = components.gateway.http_address
    (before,) = (await components.client.status()).tenants or (TenantUsage("", Usage(0, 0, 0)),)
    first, second = [(await call(address, "/v1/completions", asked | {"timings": True})).json for _ in range(2)]
    held = [one["usage"]["kv_byte_seconds"] for one in (first, second)]
    assert [one["usage"]["computed_tokens"] for one in (first, second)] == [89, 9]
    assert held[0]["computed"] > 0 == held[0]["pool"]
    assert held[1]["pool"] > held[1]["computed"] > 0
    assert all(one[tier] == 0 for one in held for tier in ("fetched", "restored", "bucket"))
    assert (
        not {"computed_tokens", "kv_byte_seconds"}
        & (await call(address, "/v1/completions", asked)).json["usage"].keys()
    )
    last = [delta async for delta in components.client.generate(asked["prompt"], max_tokens=8, ignore_eos=True)][-1]
    assert last.usage.computed_tokens == 9
    assert last.usage.kv_pool_byte_seconds > 0
    (after,) = (await components.client.status()).tenants
    assert after.tenant == ""
    assert after.usage.computed_tokens - before.usage.computed_tokens == 89 + 3 * 9
    assert after.usage.kv_pool_byte_seconds > before.usage.kv_pool_byte_seconds + held[1]["pool"]


async def test_a_stream_is_the_whole_answer(components: Components) -> None:
    async with client_of(components) as client:
        asked: Any = {"model": "tiny", "messages": MESSAGES, "n": 2, "temperature": 0.8, **ASKED}
        whole = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
        texts, tokens, usage = {0: "", 1: ""}, {0: [], 1: []}, None
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            **asked, logprobs=True, top_logprobs=1, stream=True, stream_options=options
        )
        async for event in stream:
            usage = event.usage or usage
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
        assert texts == {choice.index: choice.message.content for choice in whole.choices}
        assert texts[0] != texts[1]
        for choice in whole.choices:
            assert [one.logprob for one in tokens[choice.index]] == [one.logprob for one in choice.logprobs.content]
            assert len(choice.logprobs.content) == 8
        assert usage.completion_tokens == whole.usage.completion_tokens == 16
        assert whole._request_id
    await components.proven()


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return transformers' log probabilities [vocabulary] for each prompt token but the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        save_model(tmp_path_factory.mktemp("oracle") / "tiny"), dtype=torch.float32
    )

    @torch.inference_mode()
    def score(prompt: list[int]) -> list[tuple[int, torch.Tensor]]:
        rows = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
        return list(zip(prompt[1:], rows[:-1], strict=True))

    return score


async def test_log_probabilities_of_a_prompt(components: Components, scores: Any) -> None:
    asked: Any = {"max_tokens": 4, "ignore_eos": True, "seed": 11, "logprobs": 1}
    plain = [delta async for delta in components.client.generate(PROMPT, **asked, n=3)]
    # The prompt is cached now, but scoring uses no cache, whatever the split.
    (output,) = await components.client.batch([PROMPT], **asked, n=3, prompt_logprobs=3)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert (output.usage.prompt_tokens, output.usage.cached_tokens, output.usage.completion_tokens) == (89, 0, 12)
    assert output.timings.prefilled_tokens == 0
    for found, (token, row) in zip(output.prompt_logprobs[1:], scores(PROMPT), strict=True):
        top = row.topk(3)
        assert next(iter(found)) == token
        assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert found[token].rank == int((row > row[token]).sum()) + 1
        alternatives = sorted((one.rank, one.logprob) for one in found.values() if one.rank <= 3)
        assert [logprob for _, logprob in alternatives] == pytest.approx(top.values.tolist(), abs=1e-4)
    for answer in output.outputs:
        tokens = [token for delta in plain if delta.index == answer.index for token in delta.token_ids]
        assert (answer.token_ids, len(answer.logprobs)) == (tokens, 4)
    await components.proven()


async def test_prompt_scores_of_lm_eval_requests(components: Components, scores: Any) -> None:
    async with client_of(components) as client:
        # The older form requests no token, the newer one a token that it drops.
        for tokens in (0, 1):
            asked: Any = {"prompt": [PROMPT, PROMPT[::-1]], "max_tokens": tokens, "logprobs": 1, "temperature": 0}
            whole = await client.completions.create(model="tiny", echo=True, seed=1234, **asked)
            assert whole.usage.completion_tokens == 2 * tokens
            for choice, prompt in zip(whole.choices, (PROMPT, PROMPT[::-1]), strict=True):
                shown = choice.logprobs
                assert choice.finish_reason == "length"
                assert shown.token_logprobs[0] is shown.top_logprobs[0] is None
                assert len(shown.tokens) == len(shown.text_offset) == len(prompt) + tokens
                for found, top, (token, row) in zip(
                    shown.token_logprobs[1:], shown.top_logprobs[1:], scores(prompt), strict=not tokens
                ):
                    assert found == pytest.approx(float(row[token]), abs=1e-4)
                    assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
            stream = await client.completions.create(model="tiny", echo=True, seed=1234, stream=True, **asked)
            texts, columns = ["", ""], [[], []]
            async for event in stream:
                (choice,) = event.choices
                texts[choice.index] += choice.text
                columns[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
            assert texts == [choice.text for choice in whole.choices]
            assert columns == [choice.logprobs.token_logprobs for choice in whole.choices]
        silent = await client.completions.create(model="tiny", prompt="one", echo=True, max_tokens=0, n=2)
        assert [(one.text, one.finish_reason) for one in silent.choices] == [("one", "length")] * 2
    await components.proven()


async def test_prompt_logprobs_match_vllm(components: Components) -> None:
    async with client_of(components) as client:
        asked: Any = {"model": "tiny", "max_tokens": 2, "n": 2, "extra_body": {"prompt_logprobs": 2}}
        whole = await client.completions.create(prompt=PROMPT, **asked)
        one, other = (choice.prompt_logprobs for choice in whole.choices)
        assert one == other
        assert (one[0], len(one)) == (None, len(PROMPT))
        for token, found in zip(PROMPT[1:], one[1:], strict=True):
            assert next(iter(found)) == str(token)
            assert set(found[str(token)]) == {"logprob", "rank", "decoded_token"}
            assert sorted(entry["rank"] for entry in found.values())[:2] == [1, 2]
        chat = await client.chat.completions.create(messages=MESSAGES, **asked)
        assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
        shape = {"prompt_logprobs": 2, "structured_outputs": {"choice": ["yes"]}}
        for tokens, text in ((8, "yes"), (0, "")):
            forced: Any = await client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=tokens, extra_body=shape
            )
            assert (forced.choices[0].text, forced.choices[0].prompt_logprobs) == (text, one)
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
            await client.completions.create(prompt=PROMPT, **asked, stream=True)
        with pytest.raises(openai.BadRequestError, match=r"logprobs: 21 is not in \[0, 20\]"):
            await client.completions.create(model="tiny", prompt=PROMPT, echo=True, logprobs=21)
    await components.proven()


async def test_the_blocking_client(components: Components) -> None:
    def ask() -> None:
        url = f"http://{components.gateway.http_address}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=200) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            assert client.models.retrieve("tiny").object == "model"
            whole = client.completions.create(model="tiny", prompt=["one", "two"], echo=True, temperature=0, **ASKED)
            stream = client.completions.create(
                model="tiny", prompt=["one", "two"], echo=True, temperature=0, stream=True, **ASKED
            )
            texts = ["", ""]
            for event in stream:
                texts[event.choices[0].index] += event.choices[0].text
            assert texts == [choice.text for choice in whole.choices]
            assert [text[:3] for text in texts] == ["one", "two"]

    await asyncio.to_thread(ask)
    await components.proven()


async def test_sampling_fields_change_the_answer(components: Components) -> None:
    async with client_of(components) as client:

        async def text(**fields: Any) -> str:
            body = {"ignore_eos": True, **fields.pop("extra_body", {})}
            options = {"temperature": 0, "max_tokens": 8, **fields}
            answer = await client.completions.create(model="tiny", prompt=PROMPT, extra_body=body, **options)
            return answer.choices[0].text

        greedy = await text()
        assert await text(seed=5) == greedy
        hot = {"temperature": 2.0, "seed": 3}
        sampled = await text(**hot)
        assert sampled not in (greedy, await text(temperature=2.0, seed=4))
        assert await text(**hot, top_p=0.0001) == greedy
        assert await text(**hot, extra_body={"top_k": 1}) == greedy
        assert await text(**hot, extra_body={"min_p": 1.0}) == greedy
        assert await text(logit_bias={"40": 100}) == await text(logit_bias={"40": 100}, seed=9) != greedy
        # A bias decides the first token, and penalties forbid its repetition.
        bias = {"logit_bias": {"40": 3}}
        biased = await text(**bias)
        assert await text(**bias, presence_penalty=2, frequency_penalty=2) != biased
        assert await text(**bias, extra_body={"repetition_penalty": 5}) != biased
        forced = {"logit_bias": {"40": 100}}
        assert await text(**forced, extra_body={"stop_token_ids": [40]}) == ""
        assert await text(**forced, extra_body={"stop_token_ids": [40], "min_tokens": 3}) != ""
        letter = (await text(**forced))[0]
        assert await text(**forced, stop=letter * 3) == ""
        assert await text(**forced, max_tokens=2) == letter * 2
    await components.proven()


async def test_a_continued_chat_is_the_same_over_http_grpc_and_as_text(components: Components) -> None:
    """A continued chat has one prompt, and so one greedy answer, over HTTP, over gRPC and as plain text."""
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "It is "}]
    asked: Any = {"temperature": 0, "max_tokens": 6}
    text = f"{BOS}system\nAnswer.{EOS}\n{BOS}user\n{MESSAGES[1]['content']}{EOS}\n{BOS}assistant\nIt is "
    options = {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    async with client_of(components) as client:
        plain = await client.completions.create(model="tiny", prompt=text, extra_body={"ignore_eos": True}, **asked)
        continued = await client.chat.completions.create(
            model="tiny",
            messages=begun,
            metadata={"team": "a"},
            reasoning_effort="low",
            store=False,
            user="me",
            extra_body={**options, "add_generation_prompt": False, "ignore_eos": True},
            **asked,
        )
        assert continued.choices[0].message.content == plain.choices[0].text
        assert continued.usage.prompt_tokens == plain.usage.prompt_tokens
        deltas = [delta async for delta in components.client.chat(begun, **options, **asked, ignore_eos=True)]
        assert "".join(delta.text for delta in deltas) == plain.choices[0].text
        for extra, param in (
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
            ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="tiny", messages=begun, extra_body=extra)
            assert caught.value.param == param
        with pytest.raises(InvalidRequest, match=r"chat\.chat_template_kwargs"):
            await anext(components.client.chat(begun, chat_template_kwargs={"messages": []}))
        with pytest.raises(InvalidRequest, match="not JSON serializable"):
            components.client.chat(begun, chat_template_kwargs={"a": object()})
    tokens = await call(
        components.gateway.http_address, "/tokenize", {"messages": begun, "continue_final_message": True}
    )
    assert tokens.json["count"] == plain.usage.prompt_tokens
    await components.proven()


async def test_errors_raise_the_matching_openai_classes(components: Components) -> None:
    async with client_of(components) as client:
        wrong: list[tuple[type[openai.APIStatusError], str | None, dict[str, Any]]] = [
            (openai.BadRequestError, "temperature", {"temperature": -1}),
            (openai.BadRequestError, "response_format.json_schema.schema", {"response_format": WRONG_FORMAT}),
            (openai.BadRequestError, "max_completion_tokens", {"max_completion_tokens": -2}),
            (openai.BadRequestError, "messages", {"messages": [{"role": "user", "content": "x" * 600}]}),
            (openai.BadRequestError, "temprature", {"extra_body": {"temprature": 1}}),
            (openai.NotFoundError, "model", {"model": "gpt-4"}),
        ]
        for kind, param, fields in wrong:
            with pytest.raises(kind) as caught:
                await client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})
            assert caught.value.param == param
            assert caught.value.request_id
        # Clients send these fields by default.
        usual: Any = {"user": "me", "store": False, "n": 1, "tools": None, "parallel_tool_calls": True, "stop": None}
        usual |= {"response_format": {"type": "text"}, "service_tier": "auto", "modalities": ["text"]}
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, **usual)
        assert chat.choices[0].finish_reason in ("length", "stop")
    await components.proven()


async def test_a_client_that_disconnects_frees_everything(components: Components) -> None:
    async with client_of(components) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        await components.proven()
        endless = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=400, extra_body={"ignore_eos": True}
        )
        waiting = asyncio.create_task(endless)
        await until("the request to begin", lambda: components.gateway.gateway.active_requests)
        waiting.cancel()
        await components.proven()


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: Annotated[int, pydantic.Field(ge=-99, le=99)]


async def test_structured_outputs_over_the_openai_api(components: Components) -> None:
    """The model is random, so only the grammar shapes its answers."""
    async with client_of(components) as client:
        parsed = await client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Weather, n=3, max_tokens=200
        )
        assert [choice.finish_reason for choice in parsed.choices] == ["stop"] * 3
        assert all(isinstance(choice.message.parsed, Weather) for choice in parsed.choices)
        stream = await client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=20,
            stream=True,
            extra_body={"structured_outputs": {"regex": "a{3}b"}},
        )
        assert "".join([event.choices[0].text async for event in stream if event.choices]) == "aaab"
        choices = {"choice": ["yes", "no", 'may "be"']}
        chosen = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=20, extra_body={"structured_outputs": choices}
        )
        assert chosen.choices[0].message.content in choices["choice"]
        cut = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=3,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"minLength": 9, "type": "string"}},
            },
        )
        assert cut.choices[0].finish_reason == "length"
    *_, last = [delta async for delta in components.client.chat(MESSAGES, schema=Weather, max_tokens=200)]
    assert isinstance(last.parsed, Weather)
    [output] = await components.client.batch([PROMPT], schema={"enum": [7, 8]}, max_tokens=20)
    assert output.outputs[0].parsed in (7, 8)
    await components.proven()


async def test_heartbeats_report_the_composition_of_steps(components: Components) -> None:
    """A prompt's tokens and an answer's are found again in the totals of the worker that computed them."""

    async def worker(name: str) -> Any:
        return {one.component_id: one for one in (await components.client.status()).components}[name]

    (output,) = await components.client.batch([[*PROMPT, 7]], max_tokens=8, ignore_eos=True, cache_salt="steps")
    timings = output.timings
    assert (timings.prefilled_tokens > 0, timings.tail_tokens > 0) == (True, True)
    ran = components.decode.worker.describe().steps

    async def told() -> bool:
        return (await worker("decode-0")).steps >= ran and (await worker("prefill-0")).step_prefill_tokens > 0

    await until("the next heartbeats to reach the gateway", told)
    found = await worker("decode-0")
    assert found.steps_ms > 0
    assert found.step_decode_tokens >= 7
    assert found.step_tail_tokens >= timings.tail_tokens
    assert found.step_prefill_tokens == 0
