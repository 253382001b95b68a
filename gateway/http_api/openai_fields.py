"""Defines the fields of OpenAI's requests, with those that vLLM adds.

A field's type says what becomes of it, in the bodies of all APIs and in the objects within them:

Ignored[...]  it is accepted without effect, because it cannot change the answer; a header of the answer names it
Raw           it is refused by its name, because ignoring it would change the answer; a value that asks for what happens
              anyhow is let through, and clients do send such values
any other     it is carried out; the bare Raw fields of READ_LATER are, too

A field that no body has needs no declaration: it has no effect, and the header names it (body_reading.py). So only
fields are declared that are carried out, that an API documents, or that have to be refused.
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

# Larger integers have no use in a body, and their digits alone could be megabytes.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def sampling_body(api: str) -> Any:
    """Makes a struct of the sampling values that the bodies of one API (``api``) have, all of which may be left
    out."""
    mine = ((name, one) for name, one in SAMPLING_OPTIONS.items() if api in one.apis)
    values = [(name, (Int if one.whole else float) | None, None) for name, one in mine]
    return msgspec.defstruct("SamplingBody", values, bases=(StructureBody,), kw_only=True, forbid_unknown_fields=True)


if TYPE_CHECKING:

    class CompletionSampling(StructureBody, kw_only=True):
        """Holds the sampling values of chats and completions; the code reads these by name."""

        min_tokens: int | None = None
        n: int | None = None
        best_of: int | None = None
        prompt_logprobs: int | None = None
        truncate_prompt_tokens: int | None = None

    class ResponsesSampling(StructureBody, kw_only=True):
        """Holds the sampling values of a response; the code reads these by name."""

        temperature: float | None = None
        top_p: float | None = None

else:
    CompletionSampling, ResponsesSampling = sampling_body("completions"), sampling_body("responses")


# These are the efforts of reasoning that OpenAI names, and those that models' templates know besides.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_LABEL_CHARS = 512
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL_CHARS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Sets options of a stream.

    Attributes:
        include_usage: whether one more event, with the usage, is sent at the end.
        continuous_usage_stats: whether the usage so far is sent with every event, as vLLM does.
        include_obfuscation: nothing is added to events.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored[Raw] = Raw()


class UsageOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Asks for the usage, as OpenRouter has it. An answer that is no stream always has it.

    Attributes:
        include: whether a stream ends with one more event, with the usage, as include_usage asks for.
    """

    include: bool | None = None


class _CommonBody(CompletionSampling, forbid_unknown_fields=True, kw_only=True):
    """Sets the fields of both kinds of completion; SamplingParams describes those of sampling.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        stream: whether the answer is sent as server-sent events while it grows.
        stream_options: options of that stream.
        timings: whether to report where the prompt's tokens and the request's time went, beside the usage, as the SDK's
            Timings has it; in a stream it comes with the last event. It needs a request of one prompt.
        priority: smaller is more urgent, from -100 to 100; default 0. A tenant needs a permission to be below 0.
        prompt_logprobs: number of alternatives that are reported with the log probabilities of the prompt's tokens, as
            vLLM does; it does not go with stream.
        cache_salt: only requests with the same salt share cached prefixes.
        kv_hints: vLLM's envelope of hints; KV is evicted in the pool's own order.
        return_token_ids: whether the answer has the ids of its own tokens and of the prompt's, as vLLM's has.
        return_tokens_as_token_ids: whether log probabilities name a token "token_id:" with its id.
        usage: whether the usage is wanted, in OpenRouter's words.
        user, metadata: labels; nothing is stored.
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
    """Describes the body of POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either; each prompt gets answers of its own.
        max_tokens: most tokens to generate; default 16. With 0 nothing is generated, for log probabilities of the
            prompt.
        echo: whether each answer begins with its prompt.
        logprobs: number of alternatives that are reported with the log probabilities of the answer's tokens; with echo
            also with those of the prompt's.
    """

    prompt: Raw
    echo: bool | None = None
    logprobs: Int | None = None


class ThinkingSwitch(msgspec.Struct, forbid_unknown_fields=True):
    """Says whether a model thinks before it answers, as other servers have it.

    Attributes:
        type: "enabled", "disabled", or "adaptive", which leaves it to the model.
        budget_tokens: how long it may think; nothing is cut.
    """

    type: Literal["enabled", "disabled", "adaptive"] = "enabled"
    budget_tokens: Ignored[Raw] = Raw()


class ChatBody(_CommonBody, forbid_unknown_fields=True, kw_only=True):
    """Describes the body of POST /v1/chat/completions.

    Attributes:
        messages: the conversation, oldest message first.
        max_completion_tokens: most tokens to generate; default: what the context has left.
        max_tokens: the older name of max_completion_tokens.
        logprobs: whether to report log probabilities of the answer's tokens.
        top_logprobs: number of alternatives that are reported with each token.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        chat_template_args: another name of chat_template_kwargs.
        enable_thinking: a variable of the template that some models know.
        thinking: sets the variables enable_thinking and thinking of the template.
        reasoning_effort: a variable of the template that some models know.
        include_reasoning: false leaves out what the model thought; log probabilities and token ids, which tell it, too.
        separate_reasoning: false leaves what the model thought in the content, between <think> and </think>.
        echo: whether each answer begins with the last message, where that is the assistant's, as vLLM does.
        safety_identifier: a label; nothing is stored.
        prompt_cache_key: prefixes are found by their tokens, wherever they were computed; cache_salt separates them.
        prompt_cache_retention, prompt_cache_options: prefixes stay as long as there is room for them.
        prediction: a guess of the answer; guesses change only how fast it comes.
        audio, web_search_options: options of what no answer here has.
        verbosity: a wish for a longer or shorter answer; no model's template knows it, so say it in a message.
        tools: functions and custom tools that the model may call, at most 128.
        tool_choice: "auto" (the default), "none", "required", the one tool that has to be called, or the tools that may
            be called.
        parallel_tool_calls: whether one answer may call several tools; default true.
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
    """Holds a part of what an assistant thought, as Mistral's server writes it.

    Attributes:
        type: it has no effect.
        text: the text.
    """

    type: str = "text"
    text: str = ""


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """Holds a part of a message's content, of any type, in a chat or in an item of Responses.

    Attributes:
        type: "text", "input_text", "output_text", "refusal" or "thinking", and Anthropic's "tool_use" of an assistant
            and "tool_result" of a user. Of other types an image or the like in a user's message is refused, and so is
            what has no text in the last one.
        text: the text.
        refusal: a text as well.
        thinking: what the assistant thought; most templates leave it out.
        id, name, input: id, tool and arguments of a "tool_use".
        tool_use_id, content, is_error: a "tool_result": the call's id, a text or parts, and whether the tool failed.
        image_url, input_audio, file, file_id, detail: what the model cannot see; of an image in what a tool gave back
            it is told.
        logprobs, annotations: what stood beside an earlier answer's text.
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
    """Describes a function as it was called.

    Attributes:
        name: the function's name.
        arguments: a JSON object, as text or as it is. What is no object, as of a call that was cut short, is the
            model's to read.
    """

    name: str
    arguments: AnyJson = Raw()


class CalledCustom(msgspec.Struct, forbid_unknown_fields=True):
    """Describes a custom tool as it was called.

    Attributes:
        name: the tool's name.
        input: the text.
    """

    name: str
    input: str


class CallBody(msgspec.Struct, forbid_unknown_fields=True):
    """Describes a call that a message of the assistant made.

    Attributes:
        id: the id that the message with its result names; without one, results belong to calls in their order.
        type: "function", the default, or "custom".
        function: name and arguments.
        custom: name and input of a custom tool.
    """

    id: str = ""
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    type: str = "function"


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    """Holds one message of a conversation; an assistant's may be sent back as it was received.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool"; "function" is an older name of "tool". The model's
            own template may know more.
        content: a text, or parts that are joined by line ends. All but the last message may do without.
        tool_calls: calls that a message of the assistant made.
        function_call: an older form of such a call.
        tool_call_id: the call that a message of role "tool" brings the result of.
        name: who speaks.
        reasoning_content: what the assistant thought; most templates leave it out.
        reasoning: another name of reasoning_content.
        refusal: the text of an answer without content.
        annotations, audio: what stood beside an earlier answer's text.
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
    """Describes the body of POST /tokenize, as vLLM has it: a prompt, or messages.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        prompt: a text.
        messages: a conversation.
        tools: functions that the model may call, at most 128.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        return_token_strs: whether the text of each token is given too.
        add_special_tokens: whether the tokenizer's own beginning of a text is added to a prompt; default: true.
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
    """Describes the body of POST /detokenize, as vLLM has it.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        tokens: the ids.
    """

    model: str = ""
    tokens: Raw


# These fields, by body, would make the answer another one if they had no effect. INSTEAD says what a client misses, or
# sends in their place, and HARMLESS has the values of them that are let through. vLLM's fields that are no part of its
# API any more, or change only how fast an answer comes (early_stopping, kv_transfer_params, mm_processor_kwargs), are
# fields that nobody knows.
_UNSUPPORTED = {
    CompletionBody: "use_beam_search add_special_tokens suffix",
    ChatBody: "use_beam_search chat_template documents function_call functions modalities moderation",
    TokenizeBody: "chat_template",
}
# These values of unsupported fields, and of fields without effect, ask for what happens anyhow, as null does. So do
# those of NOTHING, except of the fields of FALSE_ASKS.
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
# Names of one field at several APIs and servers. A body takes each of them as its own, which comes first of those that
# it has.
SAME_FIELDS = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"),
    ("stop", "stop_sequences"),
    ("repetition_penalty", "repeat_penalty"),
)
FALSE_ASKS = frozenset({"add_special_tokens", "normalize"})
NOTHING: tuple[Any, ...] = (False, "", [])
_WHOLE = "nothing is stored here: send the whole conversation as input, whose beginning is cached"
# For refused fields and types of items, this says what a client sends in their place.
INSTEAD: Mapping[str, str] = {
    "add_special_tokens": "a text begins as its tokenizer says; send token ids for another beginning",
    "chat_template": "the model's own template is used, or that of --chat-template",
    "documents": "write them into a message; templates are not given documents",
    "function_call": "OpenAI has taken this name away; send tool_choice",
    "functions": "OpenAI has taken this name away; send tools",
    "modalities": "answers are texts",
    "moderation": "nothing is moderated here",
    "suffix": "a text is continued at its end, and not filled in",
    "use_beam_search": "answers are sampled; there are no beams",
    "previous_response_id": _WHOLE,
    "conversation": _WHOLE,
    "prompt": "nothing is stored here: send the text itself, as instructions or input",
    "thread": "nothing is stored here: send the whole conversation as messages",
    "background": "nothing is stored here: read the answer as a stream, or send it as a batch (/v1/batches)",
}
# These fields are read in the second step, as these types; every other field that is bare Raw is not supported.
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
    """Returns the body's type with its unsupported fields, which are read raw."""
    fields = [(name, Raw, Raw()) for name in names.split()]
    return msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True)


# The JSON of a call is parsed as these types, which also know the unsupported fields.
READ_AS: Mapping[Any, type[Any]] = {kind: _with_unsupported(kind, names) for kind, names in _UNSUPPORTED.items()}
