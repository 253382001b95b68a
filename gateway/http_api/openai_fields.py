"""Fields of OpenAI's requests, with vLLM's additions.

A field's type decides how it is handled, in the bodies of all APIs and in the objects within them:

Ignored[...]  accepted without effect, because it cannot change the answer; a response header names it
Raw           refused by name, because ignoring it would change the answer; values that request the default behavior are
              accepted, since clients send them
any other     supported; so are the Raw fields in READ_LATER

An unknown field needs no declaration: it has no effect, and the header names it (body_reading.py). Only fields that are
supported, that an API documents, or that must be refused are declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import AnyJson, Ignored
from pillion.gateway.http_api.structure_fields import ShapeBody, StructureBody
from pillion.gateway.http_api.tool_fields import ToolBody, ToolChoice
from pillion.types import SAMPLING_OPTIONS

# 64 bits: larger integers are useless in a body, and may have megabytes of digits.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def sampling_body(api: str) -> Any:
    """Create a struct with the sampling fields of the API ``api``, all optional."""
    options = ((name, option) for name, option in SAMPLING_OPTIONS.items() if api in option.apis)
    fields = [(name, (Int if option.whole else float) | None, None) for name, option in options]
    return msgspec.defstruct("SamplingBody", fields, bases=(StructureBody,), kw_only=True, forbid_unknown_fields=True)


if TYPE_CHECKING:

    class CompletionSampling(StructureBody, kw_only=True):
        """Sampling fields of chats and completions that code accesses by name."""

        min_tokens: int | None = None
        n: int | None = None
        best_of: int | None = None
        prompt_logprobs: int | None = None
        truncate_prompt_tokens: int | None = None

    class ResponsesSampling(StructureBody, kw_only=True):
        """Sampling fields of Responses that code accesses by name."""

        temperature: float | None = None
        top_p: float | None = None

else:
    CompletionSampling, ResponsesSampling = sampling_body("completions"), sampling_body("responses")


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_LABEL_CHARS = 512
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL_CHARS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream.

    Attributes:
        include_usage: whether to send a last event with the usage.
        continuous_usage_stats: whether each event has the usage so far, as in vLLM.
        include_obfuscation: events are not padded.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored[Raw] = Raw()


class UsageOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Request for the usage, in OpenRouter's form. An answer without stream always has it.

    Attributes:
        include: whether to send a last event with the usage, like include_usage.
    """

    include: bool | None = None


class _CommonBody(CompletionSampling, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds of completion; SamplingParams describes the sampling fields.

    Attributes:
        model: name of the served model; may be omitted if only one is served.
        stream: whether to send the answer as server-sent events while it is generated.
        stream_options: options of that stream.
        timings: whether to report the sources of the prompt's tokens and the request's times, as the SDK's Timings,
            with the usage or a stream's last event. Needs a single prompt.
        priority: smaller is more urgent, from -100 to 100; default 0. Below 0 needs a permission of the tenant.
        prompt_logprobs: number of alternatives reported with the log probabilities of the prompt's tokens, as in vLLM;
            not with stream.
        cache_salt: only requests with the same salt share cached prefixes.
        kv_hints: vLLM's hints about KV; the pool's eviction order does not use them.
        return_token_ids: whether to return the token ids of answer and prompt, as vLLM does.
        return_tokens_as_token_ids: whether log probabilities name tokens as "token_id:" and the id.
        usage: whether to report the usage, in OpenRouter's form.
        user, metadata: labels; not stored.
        service_tier: all requests are of one tier; see priority.
        store: nothing is stored.
    """

    model: str = ""
    max_tokens: Int | None = None
    stop: Raw = Raw()
    stop_token_ids: Raw = Raw()
    ignore_eos: bool | None = None
    logit_bias: Raw = Raw()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    timings: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    kv_hints: Ignored[Raw] = Raw()
    allowed_token_ids: Raw = Raw()
    bad_words: Raw = Raw()
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: Ignored[Raw] = Raw()
    metadata: Ignored[Raw] = Raw()
    service_tier: Ignored[Raw] = Raw()
    store: Ignored[Raw] = Raw()


class CompletionBody(_CommonBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either; each prompt gets separate answers.
        max_tokens: max tokens to generate; default 16. 0 generates nothing, for log probabilities of the prompt.
        echo: whether each answer starts with its prompt.
        logprobs: number of alternatives reported with the log probabilities of the answer's tokens; with echo also with
            those of the prompt's.
    """

    prompt: Raw
    echo: bool | None = None
    logprobs: Int | None = None


class ThinkingSwitch(msgspec.Struct, forbid_unknown_fields=True):
    """Whether a model thinks before it answers, as in other servers.

    Attributes:
        type: "enabled", "disabled", or "adaptive", which leaves it to the model.
        budget_tokens: not enforced.
    """

    type: Literal["enabled", "disabled", "adaptive"] = "enabled"
    budget_tokens: Ignored[Raw] = Raw()


class ChatBody(_CommonBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions.

    Attributes:
        messages: the conversation, oldest message first.
        max_completion_tokens: max tokens to generate; default: the rest of the context.
        max_tokens: the older name of max_completion_tokens.
        logprobs: whether to report log probabilities of the answer's tokens.
        top_logprobs: number of alternatives reported with each token.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        chat_template_args: another name of chat_template_kwargs.
        enable_thinking: a variable of some models' templates.
        thinking: sets the template's variables enable_thinking and thinking.
        reasoning_effort: a variable of some models' templates.
        include_reasoning: false omits reasoning, and log probabilities and token ids, which would reveal it.
        separate_reasoning: false leaves reasoning in the content, between <think> and </think>.
        echo: whether each answer starts with the last message if that is the assistant's, as in vLLM.
        safety_identifier: a label; not stored.
        prompt_cache_key: prefixes are identified by their tokens alone; cache_salt separates them.
        prompt_cache_retention, prompt_cache_options: prefixes are cached until they are evicted.
        prediction: an expected answer, which would only change the speed.
        audio, web_search_options: answers have no audio and no search results.
        verbosity: no model's template has it; describe the wanted length in a message.
        tools: functions and custom tools that the model may call, at most 128.
        tool_choice: "auto" (the default), "none", "required", the tool to call, or the allowed tools.
        parallel_tool_calls: whether one answer may have several calls; default true.
    """

    messages: Raw
    tools: Raw = Raw()
    tool_choice: Raw = Raw()
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = Raw()
    chat_template_args: Raw = Raw()
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    echo: bool | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    reasoning_effort: ReasoningEffort | None = None
    safety_identifier: Ignored[Raw] = Raw()
    prompt_cache_key: Ignored[Raw] = Raw()
    prompt_cache_retention: Ignored[Raw] = Raw()
    prompt_cache_options: Ignored[Raw] = Raw()
    prediction: Ignored[Raw] = Raw()
    verbosity: Ignored[Raw] = Raw()
    audio: Ignored[Raw] = Raw()
    web_search_options: Ignored[Raw] = Raw()


class ThoughtPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an assistant's reasoning, in Mistral's form.

    Attributes:
        type: without effect.
        text: the text.
    """

    type: str = "text"
    text: str = ""


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content, of any type, in a chat or in an item of Responses.

    Attributes:
        type: "text", "input_text", "output_text", "refusal" or "thinking", and Anthropic's "tool_use" of an assistant
            and "tool_result" of a user. Of other types, an image or the like in a user's message is refused, and so is
            any part without text in the last one.
        text: the text.
        refusal: a text.
        thinking: the assistant's reasoning; most templates omit it.
        id, name, input: id, tool and arguments of a "tool_use".
        tool_use_id, content, is_error: a "tool_result": the call's id, a text or parts, and whether the tool failed.
        image_url, input_audio, file, file_id, detail: not visible to the model, which reads a note for an image in a
            tool's result.
        logprobs, annotations: metadata of an earlier answer.
    """

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[ThoughtPart] | None = None
    id: str | None = None
    name: str | None = None
    input: AnyJson = Raw()
    tool_use_id: str | None = None
    content: AnyJson = Raw()
    is_error: bool | None = None
    image_url: Ignored[Raw] = Raw()
    input_audio: Ignored[Raw] = Raw()
    file: Ignored[Raw] = Raw()
    file_id: Ignored[Raw] = Raw()
    detail: Ignored[Raw] = Raw()
    logprobs: Ignored[Raw] = Raw()
    annotations: Ignored[Raw] = Raw()


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function call.

    Attributes:
        name: the function's name.
        arguments: a JSON object, or its text. Anything else, e.g. of a truncated call, is passed to the model as it is.
    """

    name: str
    arguments: AnyJson = Raw()


class CalledCustom(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a custom tool.

    Attributes:
        name: the tool's name.
        input: the text.
    """

    name: str
    input: str


class CallBody(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call in a message of the assistant.

    Attributes:
        id: the id that the call's result names; without ids, results belong to calls in their order.
        type: "function", the default, or "custom".
        function: name and arguments.
        custom: name and input of a custom tool.
    """

    id: str = ""
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    type: str = "function"


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation; an assistant's may be sent back unchanged.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool"; "function" is an older name of "tool". The model's
            template may have further ones.
        content: a text, or parts that are joined by newlines. Required in the last message only.
        tool_calls: calls of the assistant.
        function_call: the older form of a call.
        tool_call_id: the call that a message of role "tool" answers.
        name: the author's name.
        reasoning_content: the assistant's reasoning; most templates omit it.
        reasoning: another name of reasoning_content.
        refusal: the text of an answer without content.
        annotations, audio: metadata of an earlier answer.
    """

    role: str
    content: str | list[ContentPart] | None = None
    annotations: Ignored[Raw] = Raw()
    audio: Ignored[Raw] = Raw()
    function_call: CalledFunction | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[CallBody] | None = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize, as in vLLM: a prompt, or messages.

    Attributes:
        model: name of the served model; may be omitted if only one is served.
        prompt: a text.
        messages: a conversation.
        tools: functions that the model may call, at most 128.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        return_token_strs: whether to return the text of each token.
        add_special_tokens: whether the tokenizer adds its special tokens to a prompt; default: true.
    """

    model: str = ""
    prompt: str | None = None
    messages: Raw = Raw()
    tools: Raw = Raw()
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = Raw()
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize, as in vLLM.

    Attributes:
        model: name of the served model; may be omitted if only one is served.
        tokens: the ids.
    """

    model: str = ""
    tokens: Raw


# Unsupported fields that would change the answer, by body. INSTEAD has the alternatives, HARMLESS the values that are
# accepted. vLLM's former fields, and those that only change the speed (early_stopping, kv_transfer_params,
# mm_processor_kwargs), are treated as unknown.
_UNSUPPORTED = {
    CompletionBody: "use_beam_search add_special_tokens suffix",
    ChatBody: "use_beam_search chat_template documents function_call functions modalities moderation",
    TokenizeBody: "chat_template",
}
# Field that is unsupported or without effect -> values that request the default behavior, as null does. EMPTY_VALUES do
# so, too, except for the fields in FALSE_MATTERS.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_callers": (["direct"],),
    "caller": ({"type": "direct"},),
    "function_call": ("none",),
    "modalities": (["text"],),
    "rank_fields": (["text"],),
    "speed": ("standard",),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "summary": ("none",),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
# Names of the same field in several APIs and servers. A body accepts all names of a tuple for the first one that it has
# as a field.
SAME_FIELDS = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"),
    ("stop", "stop_sequences"),
    ("repetition_penalty", "repeat_penalty"),
)
FALSE_MATTERS = frozenset({"add_special_tokens", "normalize"})
EMPTY_VALUES: tuple[Any, ...] = (False, "", [])
_SEND_CONVERSATION = "nothing is stored here: send the whole conversation as input, whose beginning is cached"
# Refused field or item type -> reason, or what to send instead.
INSTEAD: Mapping[str, str] = {
    "add_special_tokens": "the tokenizer adds its special tokens to a text; send token ids to avoid it",
    "chat_template": "the model's own template is used, or that of --chat-template",
    "documents": "write them into a message; templates do not receive documents",
    "function_call": "OpenAI has removed this name; send tool_choice",
    "functions": "OpenAI has removed this name; send tools",
    "modalities": "answers are texts",
    "moderation": "there is no moderation here",
    "suffix": "a text is continued at its end, not filled in",
    "use_beam_search": "answers are sampled; there are no beams",
    "previous_response_id": _SEND_CONVERSATION,
    "conversation": _SEND_CONVERSATION,
    "prompt": "nothing is stored here: send the text itself, as instructions or input",
    "thread": "nothing is stored here: send the whole conversation as messages",
    "background": "nothing is stored here: read the answer as a stream, or send it as a batch (/v1/batches)",
}
# Types of fields that are parsed in the second step; every other Raw field is unsupported.
READ_LATER: Mapping[str, Any] = {
    "prompt": str | list[str | Int | list[Int]],
    "input": str | list[str | Int | list[Int]],
    "messages": list[MessageBody],
    "tools": list[ToolBody],
    "tool_choice": ToolChoice,
    "stop": str | list[str],
    "stop_token_ids": list[Int],
    "allowed_token_ids": list[Int],
    "bad_words": list[str],
    "logit_bias": dict[Int, float],
    "metadata": dict[str, str],
    "structured_outputs": ShapeBody,
    "chat_template_kwargs": dict[str, Raw],
    "chat_template_args": dict[str, Raw],
    "tokens": list[Int],
}


def _with_unsupported(kind: Any, names: str) -> type[msgspec.Struct]:
    """Return a subclass of the body ``kind`` with its unsupported fields ``names`` as raw JSON."""
    fields = [(name, Raw, Raw()) for name in names.split()]
    return msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True)


# Body -> the type that it is parsed as, which also has its unsupported fields.
READ_AS: Mapping[Any, type[Any]] = {kind: _with_unsupported(kind, names) for kind, names in _UNSUPPORTED.items()}
