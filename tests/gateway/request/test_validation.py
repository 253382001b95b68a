"""Invalid requests: every invalid field is named, all at once, with the proto's paths."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lab.testbed.admitted import admitted_request
from pillion.errors import InvalidRequest, NotFound
from pillion.gateway.request import validation as v
from pillion.types import ChatMessage, ChatOptions, GenerateRequest, SamplingParams, StructuredOutputs

LIMITS = v.ModelLimits("toy", max_model_len_tokens=64, vocab_size=300)
GOOD = GenerateRequest(text="hello")
SHAPE = "sampling.structured_outputs"


def fields_of(request: GenerateRequest) -> list[str]:
    try:
        v.check_request(request, LIMITS)
    except InvalidRequest as error:
        return [violation.field for violation in error.violations]
    return []


def sampled(**fields: Any) -> GenerateRequest:
    return replace(GOOD, sampling=SamplingParams(**fields))


def chat(**fields: Any) -> GenerateRequest:
    return GenerateRequest(messages=(ChatMessage("user", "hi"),), chat=ChatOptions(**fields))


def shaped(**fields: Any) -> GenerateRequest:
    return sampled(structured_outputs=StructuredOutputs(**fields))


def biases(*token_ids: int) -> list[str]:
    return [f"sampling.logit_bias[{token_id}]" for token_id in token_ids]


GOOD_REQUESTS = [
    GOOD,
    GenerateRequest(token_ids=tuple(range(63))),
    GenerateRequest(messages=(ChatMessage("user", ""), ChatMessage("tool-2", "x"))),
    sampled(temperature=0, top_p=1, top_k=-1, seed=-(2**63), max_tokens=64),
    sampled(max_tokens=10**30),
    sampled(temperature=100, top_p=1e-9, top_k=10**6, seed=2**63 - 1, max_tokens=1),
    sampled(stop=("x" * 256,) * 16, stop_token_ids=(0, 299)),
    sampled(min_p=0, repetition_penalty=10, presence_penalty=-2, frequency_penalty=2, min_tokens=0, logprobs=0, n=1),
    sampled(min_p=1, repetition_penalty=1e-3, presence_penalty=2, frequency_penalty=-2, min_tokens=64, logprobs=20),
    sampled(logit_bias={0: -100.0, 299: 100.0}, n=128, best_of=128, max_tokens=5, min_tokens=5),
    sampled(best_of=3),
    sampled(structured_outputs=StructuredOutputs(choice=("x",) * 4096)),
    sampled(structured_outputs=StructuredOutputs(regex="ü" * 2**16)),
    replace(GOOD, priority=-100),
    replace(GOOD, priority=100),
    replace(GOOD, cache_salt="ü" * 256, request_id="a.b_c:d/e+f=g-" * 9),
]


@pytest.mark.parametrize("request_", GOOD_REQUESTS)
def test_good_requests(request_: GenerateRequest) -> None:
    assert fields_of(request_) == []


USER = (ChatMessage("user", "x"),)
BAD_ROLES = (ChatMessage("", "x"), ChatMessage("user<|im_end|>", "x"))
TOO_LONG = (ChatMessage("user", "x" * (v.MAX_PROMPT_CHARS // 2 + 1)),) * 2

BAD = {
    "empty": (GenerateRequest(), ["text"]),
    "two prompts": (replace(GOOD, token_ids=(1,)), ["text", "token_ids"]),
    "three prompts": (replace(GOOD, token_ids=(1,), messages=USER), ["text", "token_ids", "messages"]),
    "too many ids": (GenerateRequest(token_ids=(1,) * 64), ["token_ids"]),
    "ids outside": (GenerateRequest(token_ids=(1, 300, 2, -1)), ["token_ids[1]", "token_ids[3]"]),
    "text too long": (GenerateRequest(text="x" * (v.MAX_PROMPT_CHARS + 1)), ["text"]),
    "lone surrogate": (GenerateRequest(text="a\ud800"), ["text"]),
    "role": (GenerateRequest(messages=BAD_ROLES), ["messages[0].role", "messages[1].role"]),
    "role length": (GenerateRequest(messages=(ChatMessage("a" * 33, "x"),)), ["messages[0].role"]),
    "content": (GenerateRequest(messages=(ChatMessage("user", "\udfff"),)), ["messages[0].content"]),
    "many messages": (GenerateRequest(messages=(ChatMessage("user", ""),) * (v.MAX_MESSAGES + 1)), ["messages"]),
    "long messages": (GenerateRequest(messages=TOO_LONG), ["messages"]),
    "temperature": (sampled(temperature=-0.1), ["sampling.temperature"]),
    "temperature nan": (sampled(temperature=math.nan), ["sampling.temperature"]),
    "temperature inf": (sampled(temperature=math.inf), ["sampling.temperature"]),
    "temperature big": (sampled(temperature=100.5), ["sampling.temperature"]),
    "top_p below": (sampled(top_p=-0.01), ["sampling.top_p"]),
    "top_p nan": (sampled(top_p=math.nan), ["sampling.top_p"]),
    "top_p big": (sampled(top_p=1.01), ["sampling.top_p"]),
    "top_k": (sampled(top_k=-2), ["sampling.top_k"]),
    "seed": (sampled(seed=2**63), ["sampling.seed"]),
    "seed below": (sampled(seed=-(2**63) - 1), ["sampling.seed"]),
    "min_p": (sampled(min_p=-0.1), ["sampling.min_p"]),
    "min_p nan": (sampled(min_p=math.nan), ["sampling.min_p"]),
    "min_p big": (sampled(min_p=1.5), ["sampling.min_p"]),
    "repetition zero": (sampled(repetition_penalty=0.0), ["sampling.repetition_penalty"]),
    "repetition nan": (sampled(repetition_penalty=math.nan), ["sampling.repetition_penalty"]),
    "repetition big": (sampled(repetition_penalty=10.5), ["sampling.repetition_penalty"]),
    "presence": (sampled(presence_penalty=-2.5), ["sampling.presence_penalty"]),
    "presence nan": (sampled(presence_penalty=math.nan), ["sampling.presence_penalty"]),
    "frequency": (sampled(frequency_penalty=2.5), ["sampling.frequency_penalty"]),
    "frequency nan": (sampled(frequency_penalty=math.nan), ["sampling.frequency_penalty"]),
    "bias ids": (sampled(logit_bias={-1: 1.0, 299: 0.0, 300: 1.0}), biases(-1, 300)),
    "bias values": (sampled(logit_bias={3: 101.0, 4: math.nan, 5: -math.inf}), biases(3, 4, 5)),
    "many biases": (sampled(logit_bias=dict.fromkeys(range(1025), 1.0)), ["sampling.logit_bias"]),
    "logprobs": (sampled(logprobs=-1), ["sampling.logprobs"]),
    "many logprobs": (sampled(logprobs=21), ["sampling.logprobs"]),
    "no answers": (sampled(n=0), ["sampling.n"]),
    "many answers": (sampled(n=129, best_of=129), ["sampling.n", "sampling.best_of"]),
    "reported": (sampled(n=25, logprobs=20), ["sampling.logprobs"]),
    "best_of": (sampled(n=3, best_of=2), ["sampling.best_of"]),
    "negative min_tokens": (sampled(min_tokens=-1), ["sampling.min_tokens"]),
    "min_tokens": (sampled(min_tokens=6, max_tokens=5), ["sampling.min_tokens"]),
    "min_tokens context": (sampled(min_tokens=65), ["sampling.min_tokens"]),
    "priority": (replace(GOOD, priority=101), ["priority"]),
    "priority low": (replace(GOOD, priority=-101), ["priority"]),
    "no tokens": (sampled(max_tokens=-1), ["sampling.max_tokens"]),
    "negative tokens": (sampled(max_tokens=-5), ["sampling.max_tokens"]),
    "more tokens than the context": (sampled(min_tokens=65, max_tokens=10**9), ["sampling.min_tokens"]),
    "empty stop": (sampled(stop=("a", "")), ["sampling.stop[1]"]),
    "long stop": (sampled(stop=("x" * 4097,)), ["sampling.stop"]),
    "many stops": (sampled(stop=("x",) * 4097), ["sampling.stop"]),
    "broken stop": (sampled(stop=("\ud800",)), ["sampling.stop[0]"]),
    "stop ids": (sampled(stop_token_ids=(300, -1)), ["sampling.stop_token_ids[0]", "sampling.stop_token_ids[1]"]),
    "no shape": (shaped(), [SHAPE]),
    "two shapes": (shaped(json="{}", regex="a"), [SHAPE]),
    "empty shape": (shaped(regex=""), [f"{SHAPE}.regex"]),
    "empty choice": (shaped(choice=("a", "")), [f"{SHAPE}.choice[1]"]),
    "many choices": (shaped(choice=("a",) * 4097), [f"{SHAPE}.choice"]),
    "long choices": (shaped(choice=("a" * 2**16,) * 3), [f"{SHAPE}.choice"]),
    "long schema": (shaped(json="ü" * 2**16 + "a"), [f"{SHAPE}.json"]),
    "broken regex": (shaped(regex="\ud800"), [f"{SHAPE}.regex"]),
    "many stop ids": (sampled(stop_token_ids=(1,) * 65), ["sampling.stop_token_ids"]),
    "options of no chat": (
        replace(GOOD, chat=ChatOptions(continue_final_message=True, chat_template_kwargs='{"a": 1}')),
        ["chat.continue_final_message", "chat.chat_template_kwargs"],
    ),
    "not begun, no chat": (
        replace(GOOD, chat=ChatOptions(add_generation_prompt=False)),
        ["chat.add_generation_prompt"],
    ),
    "begin and continue": (
        chat(add_generation_prompt=True, continue_final_message=True),
        ["chat.continue_final_message"],
    ),
    "kwargs of no object": (chat(chat_template_kwargs="[1]"), ["chat.chat_template_kwargs"]),
    "kwargs of no JSON": (chat(chat_template_kwargs='{"a": }'), ["chat.chat_template_kwargs"]),
    "deep kwargs": (chat(chat_template_kwargs=f'{{"a": {"[" * 8000 + "]" * 8000}}}'), ["chat.chat_template_kwargs"]),
    "long kwargs": (chat(chat_template_kwargs='{"a": "' + "é" * 2**13 + '"}'), ["chat.chat_template_kwargs"]),
    "broken kwargs": (chat(chat_template_kwargs='{"a": "\ud800"}'), ["chat.chat_template_kwargs"]),
    "reserved kwargs": (chat(chat_template_kwargs='{"messages": [], "tools": []}'), ["chat.chat_template_kwargs"]),
    "salt": (replace(GOOD, cache_salt="x" * 257), ["cache_salt"]),
    "salt text": (replace(GOOD, cache_salt="\ud800"), ["cache_salt"]),
}  # fmt: skip


@pytest.mark.parametrize(("request_", "fields"), BAD.values(), ids=BAD)
def test_bad_requests(request_: GenerateRequest, fields: list[str]) -> None:
    assert fields_of(request_) == fields


def test_violations_are_reported_together_up_to_a_limit() -> None:
    request = replace(sampled(temperature=-1, top_p=2, max_tokens=-1), token_ids=(999,), priority=1000)
    assert fields_of(request) == [
        "text", "token_ids", "token_ids[0]",
        "sampling.temperature", "sampling.top_p", "sampling.max_tokens", "priority",
    ]  # fmt: skip
    assert len(fields_of(GenerateRequest(token_ids=(999,) * 63))) == v.MAX_VIOLATIONS


def test_long_lists_are_refused_unread() -> None:
    v.check_counts({"token_ids": v.MAX_PROMPT_IDS, "messages": v.MAX_MESSAGES, "sampling.logit_bias": v.MAX_MESSAGES})
    with pytest.raises(InvalidRequest) as failure:
        v.check_counts({"token_ids": v.MAX_PROMPT_IDS + 1, "messages": 0, "sampling.logit_bias": v.MAX_MESSAGES + 1})
    assert [violation.field for violation in failure.value.violations] == ["token_ids", "sampling.logit_bias"]


def test_unknown_models_are_refused_with_suggestions() -> None:
    assert v.check_model("", {"toy"}) == v.check_model("toy", {"toy", "other"}) == "toy"
    with pytest.raises(NotFound, match=r"'gpt' is not served here; known: other, toy"):
        v.check_model("gpt", {"toy", "other"})
    for name, near in (("tony", "toy"), ("styl", "style"), ("dem", "demo")):
        with pytest.raises(NotFound, match=f"; did you mean {near}\\?$"):
            v.check_model(name, {"toy", "other"}, ["style"], ["demo"])
    with pytest.raises(NotFound, match=r"known: toy; adapters: a, b$"):
        v.check_model("gpt", {"toy"}, ["b", "toy", "a"])
    many = [f"a{n:03}" for n in range(v.MAX_LISTED_ADAPTERS + 3)]
    with pytest.raises(NotFound, match=rf"known: toy; adapters: a000, .*, {many[-4]} and 3 more$"):
        v.check_model("gpt", {"toy"}, many)
    assert v.check_model("", {"toy"}, many) == "toy"
    with pytest.raises(InvalidRequest, match="several models"):
        v.check_model("", {"toy", "other"})


def test_prompts_beyond_the_context_length_are_refused() -> None:
    v.check_length(63, "text", LIMITS)
    most = "This model's maximum context length is 64 tokens"
    for tokens, field, given in (
        (
            65,
            "messages",
            f"{most}. However, your messages resulted in 65 tokens. Please reduce the length of the messages",
        ),
        (64, "messages", "resulted in 64 tokens. Please reduce the length of the messages. The answer needs one more"),
        (64, "text", f"{most}, however you requested 65 tokens \\(64 in your prompt; 1 for the completion\\)"),
        (0, "messages", "no tokens"),
    ):
        with pytest.raises(InvalidRequest, match=given) as failure:
            v.check_length(tokens, field, LIMITS)
        assert failure.value.violations[0].field == field


def test_every_sampling_default_is_resolved() -> None:
    sampling, _ = v.resolve(SamplingParams(), 60, (2, 7), LIMITS, drawn_seed=5)
    assert sampling == SamplingParams(
        stop_token_ids=(2, 7),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=5,
        max_tokens=4,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0,
        logprobs=None,
        n=1,
        best_of=1,
    )


def test_the_clients_values_are_kept() -> None:
    asked = SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=-1,
        seed=0,
        max_tokens=3,
        stop_token_ids=(9, 2),
        ignore_eos=True,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias={3: 1.0},
        min_tokens=2,
        logprobs=7,
        n=2,
        best_of=4,
    )
    sampling, _ = v.resolve(asked, 60, (2, 7), LIMITS, drawn_seed=5)
    assert sampling == replace(asked, top_k=0)
    longer, _ = v.resolve(replace(asked, max_tokens=50, min_tokens=50, ignore_eos=False), 60, (2,), LIMITS, 0)
    assert (longer.max_tokens, longer.min_tokens, longer.stop_token_ids) == (4, 4, (9, 2))


def test_top_p_zero_is_greedy_and_seed_minus_one_is_drawn() -> None:
    sampling, _ = v.resolve(SamplingParams(top_p=0, top_k=7, seed=-1), 10, (), LIMITS, 99)
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1, 99)
    v.check_request(sampled(top_p=0, seed=-1), LIMITS)


def test_the_models_values_are_defaults() -> None:
    own = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.0)
    sampling, recommended = v.resolve(SamplingParams(top_p=0.5), 10, (), LIMITS, 0, own)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.6, 0.5, 20, 1.0)
    # The model's recommended values are listed, so that other gateways use the same.
    assert recommended == (("temperature", 0.6), ("top_k", 20))
    sampling, recommended = v.resolve(SamplingParams(temperature=1.0, top_k=0), 10, (), LIMITS, 0, own)
    assert (sampling.temperature, sampling.top_k, recommended) == (1.0, 0, ())


def test_max_tokens_is_limited_by_the_context_and_the_model() -> None:
    def most(asked: int | None, own: int | None = None) -> tuple[int, bool]:
        sampling, _ = v.resolve(SamplingParams(max_tokens=asked), 60, (), LIMITS, 0, SamplingParams(max_tokens=own))
        request = GenerateRequest(sampling=SamplingParams(max_tokens=asked))
        admitted = replace(admitted_request(), asked=request, sampling=sampling)
        return admitted.max_tokens, admitted.cut

    assert (most(None), most(4), most(5), most(10**9)) == ((4, False), (4, False), (4, True), (4, True))
    assert (most(None, 3), most(2, 3), most(4, 3), most(4, 9)) == ((3, False), (2, False), (3, True), (4, False))


def test_the_best_answers_are_found_by_their_logprobs() -> None:
    def resolved(**given: Any) -> tuple[int | None, int | None, int | None]:
        sampling, _ = v.resolve(SamplingParams(**given), 60, (), LIMITS, 0)
        return sampling.n, sampling.best_of, sampling.logprobs

    assert resolved(n=3) == (3, 3, None)
    assert resolved(best_of=3) == (1, 3, 0)
    assert resolved(n=2, best_of=3, logprobs=5) == (2, 3, 5)
    assert resolved(n=3, best_of=3) == (3, 3, None)


def test_seeds_of_several_answers() -> None:
    assert [v.answer_seed(7, index) for index in range(3)] == [7, 8, 9]
    assert v.answer_seed(2**63 - 1, 1) == -(2**63)
    assert v.answer_seed(-1, 1) == 0
    assert v.answer_seed(-(2**63), 0) == -(2**63)
