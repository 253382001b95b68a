"""Fields that vLLM, SGLang and llama.cpp add to OpenAI's, with scripted peers: values at workers and in answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.openai_requests import chat_request, completion_request
from pillion.types import MAX_ALLOWED_TOKEN_IDS, SamplingParams, StructuredOutputs
from tests.support.fake_components import EOS, MAX_LEN, FakeCluster, running_fake_cluster
from tests.support.http import call

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CODEC = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return list(CODEC.encode(text).ids)


def complete(**fields: Any):
    return completion_request(json.dumps({"prompt": "x", **fields}).encode(), "r")


def chat(**fields: Any):
    return chat_request(json.dumps({"messages": MESSAGES, **fields}).encode(), "r")


def refusal(read: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    return caught.value


@contextlib.asynccontextmanager
async def clients(answer: str = "The answer.", **flags: Any) -> AsyncIterator[tuple[FakeCluster, openai.AsyncOpenAI]]:
    async with running_fake_cluster(answer, **flags) as fakes:
        url = f"http://{fakes.gateway.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            yield fakes, client
        await fakes.settled()


@pytest.mark.parametrize("read", [complete, chat])
@pytest.mark.parametrize(
    ("sent", "read_as"),
    [
        ({"allowed_token_ids": [5, 7]}, {"allowed_token_ids": (5, 7)}),
        ({"bad_words": ["sea", " land"]}, {"bad_words": ("sea", " land")}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, {"truncation_side": "right"}),
        ({"truncate_prompt_tokens": 9}, {"truncate_prompt_tokens": 9}),
    ],
)
def test_vllm_sampling_fields_are_parsed(read: Any, sent: dict[str, Any], read_as: dict[str, Any]) -> None:
    sampling = read(**sent).requests[0].sampling
    assert {name: getattr(sampling, name) for name in read_as} == read_as
    assert read(**dict.fromkeys(sent)).requests[0].sampling == read().requests[0].sampling


STRUCTURES = [
    ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, {"json": '{"a":1}'}, "response_format.schema"),
    ({"json_schema": {"type": "object"}}, {"json": '{"type":"object"}'}, "json_schema"),
    ({"json_schema": '{"type": "object"}'}, {"json": '{"type": "object"}'}, "json_schema"),
    ({"regex": "a+"}, {"regex": "a+"}, "regex"),
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}, "grammar"),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}, "ebnf"),
]


@pytest.mark.parametrize("read", [complete, chat])
@pytest.mark.parametrize(("sent", "structure", "field"), STRUCTURES)
def test_vllm_names_of_structured_outputs_are_accepted(
    read: Any, sent: dict[str, Any], structure: dict[str, str], field: str
) -> None:
    asked, (kind,) = read(**sent), structure
    assert asked.requests[0].sampling.structured_outputs == StructuredOutputs(**structure)
    assert asked.names[0][f"sampling.structured_outputs.{kind}"] == field
    twice = refusal(read, structured_outputs={"choice": ["a"]}, **sent)
    assert "also requests a structure" in twice.message


@pytest.mark.parametrize(
    ("sent", "variables"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"chat_template_args": {"enable_thinking": True, "n": 1}}, {"enable_thinking": True, "n": 1}),
        ({"enable_thinking": True, "chat_template_kwargs": {"n": 1}}, {"enable_thinking": True, "n": 1}),
    ],
)
def test_switches_of_thinking_are_variables_of_the_template(
    sent: dict[str, Any], variables: dict[str, Any] | None
) -> None:
    text = chat(**sent).requests[0].chat.chat_template_kwargs
    assert (json.loads(text) if text else None) == variables


def test_switches_that_contradict_each_other_are_refused() -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert refusal(chat, enable_thinking=True, **kwargs).param == "enable_thinking"
    assert refusal(chat, thinking=True, **kwargs).param == "thinking"
    assert refusal(chat, chat_template_args={}, **kwargs).param == "chat_template_args"
    assert refusal(complete, allowed_token_ids=[]).param == "allowed_token_ids"
    assert refusal(complete, allowed_token_ids=[7] * (MAX_ALLOWED_TOKEN_IDS * 20)).param == "allowed_token_ids"


async def test_vocabulary_restrictions_are_parsed() -> None:
    async with clients() as (fakes, client):
        for words in (["ab", " ab", "c"], []):
            await client.completions.create(
                model="toy", prompt="x", extra_body={"allowed_token_ids": [65, 66, EOS], "bad_words": words}
            )
        first, second = fakes.decode.submits
        assert list(first.sampling.allowed_token_ids) == [65, 66, EOS]
        banned = [ids_of("ab"), ids_of(" ab"), ids_of("c"), ids_of(" c")]
        assert [list(one.token_ids) for one in first.bad_words] == banned
        assert not second.bad_words
        # Text-only options are not sent to workers.
        assert not first.sampling.bad_words
        for wrong, param in (
            ({"allowed_token_ids": [5, 100_000]}, "allowed_token_ids[1]"),
            ({"allowed_token_ids": [1] * (MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids"),
            ({"bad_words": ["a"] * 257}, "bad_words"),
            ({"bad_words": ["a", ""]}, "bad_words[1]"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"truncate_prompt_tokens": -1, "max_tokens": 100_000}, "truncate_prompt_tokens"),
            ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
            ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ):
            refused = await call(fakes.gateway.http_address, "/v1/completions", {"prompt": "x", **wrong})
            assert (refused.status, refused.error["param"]) == (400, param), wrong
        every = await call(fakes.gateway.http_address, "/v1/completions", {"prompt": "x", "prompt_logprobs": -1})
        assert "-1 asks for all 259 tokens of the vocabulary; at most 20 are reported" in every.error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ({}, "The answer."),
        ({"stop": ["swe"]}, "The an"),
        ({"stop": ["swe"], "include_stop_str_in_output": True}, "The answe"),
        ({"stop_token_ids": ids_of("w"), "max_tokens": 8}, "The ans"),
        ({"stop_token_ids": ids_of("w"), "include_stop_str_in_output": True, "max_tokens": 8}, "The answ"),
        # EOS is a special token, shown if special tokens are.
        ({"include_stop_str_in_output": True}, "The answer."),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "The answer.<end>"),
        ({"skip_special_tokens": False}, "The answer."),
        ({"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 12}, "The answer.<end>"),
    ],
)
async def test_stop_strings_and_special_tokens_may_be_included(sent: dict[str, Any], text: str, stream: bool) -> None:
    """In completions, chats and the SDK, for each of two answers."""
    async with clients() as (fakes, client):
        text = text.replace("<end>", CODEC.id_to_token(EOS))
        fields = {"max_tokens": 20} | sent
        got = [["", ""], ["", ""]]
        for n, (create, prompt) in enumerate(
            ((client.completions.create, {"prompt": "x"}), (client.chat.completions.create, {"messages": MESSAGES}))
        ):
            answer: Any = await create(model="toy", n=2, stream=stream, extra_body=fields, **prompt)
            if not stream:
                got[n] = [one.text if n == 0 else one.message.content for one in answer.choices]
                continue
            async for chunk in answer:
                for choice in chunk.choices:
                    got[n][choice.index] += (choice.text if n == 0 else choice.delta.content) or ""
        assert got == [[text, text], [text, text]]
        sampling = SamplingParams(
            **{name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()}
        )
        (output,) = await fakes.client.batch(["x"], sampling=sampling)
        assert output.outputs[0].text == text


async def test_detokenize_false_returns_no_text() -> None:
    async with clients() as (fakes, _):
        (output,) = await fakes.client.batch(["x"], sampling=SamplingParams(detokenize=False))
        assert (output.outputs[0].text, tuple(output.outputs[0].token_ids)) == ("", fakes.decode.script)
        with pytest.raises(Exception, match="detokenize"):
            await fakes.client.batch(["x"], sampling=SamplingParams(detokenize=False, stop=("a",)))


LONG = "".join(map(chr, range(ord("a"), ord("z") + 1))) * 20


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, LONG[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, LONG[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, LONG[:5]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 16}, LONG[16 - MAX_LEN :]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 16, "truncation_side": "right"}, LONG[: MAX_LEN - 16]),
    ],
)
@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_is_cut(sent: dict[str, Any], kept: str, as_ids: bool) -> None:
    async with clients() as (fakes, client):
        prompt: Any = ids_of(LONG) if as_ids else LONG
        extra: dict[str, Any] = {**sent, "return_token_ids": True}
        answer: Any = await client.completions.create(model="toy", prompt=prompt, echo=True, extra_body=extra)
        assert answer.choices[0].prompt_token_ids == ids_of(kept)
        assert answer.choices[0].text == f"{kept}The answer."
        assert answer.usage.prompt_tokens == len(kept)
        (submit,) = fakes.decode.submits
        assert list(submit.token_ids) == ids_of(kept)
        chatted: Any = await client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": LONG}], extra_body=extra
        )
        assert len(chatted.prompt_token_ids) == len(kept)
        whole = ids_of(f"<bos>[user] {LONG}\n[assistant] ")
        cut = whole[: len(kept)]
        if sent.get("truncation_side") != "right":
            cut = [whole[0], *whole[1 - len(kept) :]]
        assert chatted.prompt_token_ids == cut


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned_with_texts(stream: bool) -> None:
    async with clients() as (fakes, client):
        script = list(fakes.decode.script)
        asked: Any = {"model": "toy", "n": 2, "stream": stream, "extra_body": {"return_token_ids": True}}
        prompts: Any = ["one", "two!"]
        answer: Any = await client.completions.create(prompt=prompts, **asked)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        ids: dict[int, list[int]] = {n: [] for n in range(4)}
        before: dict[int, list[list[int]]] = {n: [] for n in range(4)}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            ids[choice.index] += choice.token_ids
            before[choice.index] += [found] if (found := getattr(choice, "prompt_token_ids", None)) else []
        assert ids == dict.fromkeys(range(4), script)
        assert before == {n: [ids_of(prompts[n // 2])] for n in range(4)}
        answer = await client.chat.completions.create(messages=MESSAGES, **asked)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        ids = {0: [], 1: []}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            ids[choice.index] += getattr(choice, "token_ids", None) or []
        assert ids == {0: script, 1: script}
        wanted = (await call(fakes.gateway.http_address, "/tokenize", {"messages": MESSAGES})).json["tokens"]
        found = [chunk.prompt_token_ids for chunk in chunks if getattr(chunk, "prompt_token_ids", None)]
        assert found == [wanted] * (2 if stream else 1)
        plain: Any = await client.completions.create(model="toy", prompt="x", logprobs=1)
        assert not hasattr(plain.choices[0], "token_ids")


async def test_log_probabilities_may_name_tokens_by_id() -> None:
    async with clients("Größe") as (fakes, client):
        script = list(fakes.decode.script)
        extra = {"return_tokens_as_token_ids": True}
        text = await client.completions.create(model="toy", prompt="x", logprobs=1, extra_body=extra)
        assert text.choices[0].logprobs.tokens == [f"token_id:{one}" for one in script]
        assert [len(one) for one in text.choices[0].logprobs.top_logprobs] == [1] * len(script)
        said = await client.chat.completions.create(
            model="toy", messages=MESSAGES, logprobs=True, top_logprobs=1, extra_body=extra
        )
        content = said.choices[0].logprobs.content
        assert [one.token for one in content] == [f"token_id:{one}" for one in script]
        assert [one.top_logprobs[0].token for one in content] == [one.token for one in content]


@pytest.mark.parametrize("stream", [False, True])
async def test_text_offsets_count_the_emitted_text(stream: bool) -> None:
    """A token of a partial character begins where the character does; special tokens have no text."""
    async with clients("é!") as (_, client):
        special = CODEC.id_to_token(EOS)
        for prompt, offsets in (
            ("Größe", [0, 1, 2, 2, 3, 3, 4, 5, 5, 6, 7]),
            ([*ids_of("ab"), EOS, *ids_of("c")], [0, 1, 2, 2, 3, 3, 4, 5]),
            (f"a{special}b", [0, 1, 1 + len(special), *(2 + len(special) + n for n in (0, 0, 1, 2))]),
        ):
            answer: Any = await client.completions.create(
                model="toy", prompt=prompt, echo=True, logprobs=0, max_tokens=9, stream=stream
            )
            chunks = [chunk async for chunk in answer] if stream else [answer]
            columns = [one for chunk in chunks for one in chunk.choices[0].logprobs.text_offset]
            assert columns == offsets, prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_message_is_echoed(stream: bool) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "It is "}]
    on = {"continue_final_message": True, "add_generation_prompt": False}
    async with clients() as (_, client):
        for messages, fields, wanted in (
            (begun, on, "It is The answer."),
            (begun, {}, "It is The answer."),
            (MESSAGES, {}, "The answer."),
            (MESSAGES, {"add_generation_prompt": False}, "hiThe answer."),
        ):
            answer: Any = await client.chat.completions.create(
                model="toy", messages=messages, n=2, stream=stream, extra_body={"echo": True, **fields}
            )
            if not stream:
                assert [one.message.content for one in answer.choices] == [wanted] * 2
                continue
            texts = ["", ""]
            async for chunk in answer:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            assert texts == [wanted] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_omitted_or_kept_in_the_content(stream: bool) -> None:
    async with clients("<think>\nHm, hm.\n</think>\n\nThe sea.", reasoning_parser="qwen3") as (_, client):
        for fields, content, reasoning in (
            ({}, "The sea.", "Hm, hm."),
            ({"include_reasoning": False}, "The sea.", None),
            ({"separate_reasoning": False}, "<think>\nHm, hm.\n</think>\n\nThe sea.", None),
        ):
            extra = {**fields, "return_token_ids": True}
            answer: Any = await client.chat.completions.create(
                model="toy", messages=MESSAGES, logprobs=True, stream=stream, extra_body=extra
            )
            chunks = [chunk async for chunk in answer] if stream else [answer]
            parts = [choice.delta if stream else choice.message for chunk in chunks for choice in chunk.choices]
            assert "".join(part.content or "" for part in parts) == content
            thought = [text.strip() for part in parts if (text := getattr(part, "reasoning_content", None))]
            assert (" ".join(thought) or None) == (reasoning if not stream or not reasoning else " ".join(thought))
            shown = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
            ids = [choice for chunk in chunks for choice in chunk.choices if getattr(choice, "token_ids", None)]
            # They would reveal the reasoning.
            assert bool(shown) == bool(ids) == (fields != {"include_reasoning": False})


async def test_stream_chunks_have_usage_only_on_request() -> None:
    """The role chunk counts no tokens, and chunks have usage only on request."""
    async with clients() as (fakes, client):
        for options in ({}, {"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
            body = {"messages": MESSAGES, "stream": True, "stream_options": options}
            for event in (await call(fakes.gateway.http_address, "/v1/chat/completions", body)).events:
                assert "usage" not in event
        both: Any = {"include_usage": True, "continuous_usage_stats": True}
        for create, prompt in (
            (client.chat.completions.create, {"messages": MESSAGES}),
            (client.completions.create, {"prompt": "x", "echo": True}),
        ):
            stream: Any = await create(model="toy", n=2, stream=True, stream_options=both, **prompt)
            first: dict[int, int] = {}
            async for chunk in stream:
                for choice in chunk.choices:
                    first.setdefault(choice.index, chunk.usage.completion_tokens)
                assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
            assert first == {0: 0, 1: 0}
        once: Any = {"include_usage": True}
        body = {"messages": MESSAGES, "stream": True, "stream_options": once}
        *earlier, last = (await call(fakes.gateway.http_address, "/v1/chat/completions", body)).events
        assert {event["usage"] for event in earlier} == {None}
        assert last["usage"]["completion_tokens"] == len(fakes.decode.script)


async def test_a_replay_keeps_the_vocabulary_restrictions() -> None:
    """After a worker loss amid the answer the next worker gets the same fields, and the text continues."""
    async with clients() as (fakes, client):
        fakes.decode.break_after = 4
        extra: Any = {"allowed_token_ids": [*range(200), EOS], "bad_words": ["sea"], "return_token_ids": True}
        answer: Any = await client.completions.create(
            model="toy", prompt="x", n=2, seed=5, stop=["."], extra_body=extra | {"include_stop_str_in_output": True}
        )
        assert [choice.text for choice in answer.choices] == ["The answer."] * 2
        assert [choice.token_ids for choice in answer.choices] == [list(fakes.decode.script[:-1])] * 2
        first, *others = fakes.decode.submits
        assert any(len(submit.token_ids) > submit.prompt_tokens for submit in others)
        for submit in others:
            assert submit.sampling.allowed_token_ids == first.sampling.allowed_token_ids
            assert submit.bad_words == first.bad_words
