"""The fields of POST /v1/responses. Any other field is refused by its name; bare Raw fields are not supported.

As at Anthropic's door, the strings of a body bound what is made of it, and JSON that is passed on is not parsed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import AnyJson, JsonObject
from pillion.gateway.http_api.openai_fields import Int, JsonObjectFormat, ReasoningEffort, TextFormat


class ItemPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an item's content; its text is what is read.

    Attributes:
        type: "input_text" of users, "output_text" of the assistant, "reasoning_text" and "summary_text" of reasoning.
        text: the text.
        logprobs: without effect: an answer may be sent back as it was received.
    """

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    logprobs: AnyJson = Raw()
    annotations: Raw = Raw()


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the conversation; those of an earlier response may be sent back as they were received.

    Attributes:
        type: "message" (the default) has role and content, "function_call" has call_id, name and arguments,
            "function_call_output" has call_id and output, "reasoning" has content or a summary.
        role: "user", "system", "developer" or "assistant".
        content: a text, or parts that are joined by line ends.
        call_id: what joins a call and its result.
        name: the function's name.
        arguments: a JSON object, as text.
        output: what the function gave back.
        summary: parts of reasoning, read where it has no content.
        id, status: without effect.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "system", "developer", "assistant"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    caller: Raw = Raw()
    encrypted_content: Raw = Raw()
    namespace: Raw = Raw()
    phase: Raw = Raw()

    def __post_init__(self) -> None:
        # At once, so that the strings of a body bound its items: megabytes of {} would be millions of them.
        if self.type == "message" and self.role is None:
            raise ValueError("Object missing required field `role`")


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call.

    Attributes:
        type: only "function" is supported: the client runs its tools.
        name, description: what the model reads of it.
        parameters: the JSON schema of its arguments; null or none is any object.
        strict: whether the arguments of its calls always fit the schema.
    """

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject = Raw()
    strict: bool | None = None
    allowed_callers: Raw = Raw()
    defer_loading: Raw = Raw()
    output_schema: Raw = Raw()


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """The function that has to be called.

    Attributes:
        type: only "function" is supported.
        name: its name.
    """

    type: Literal["function"]
    name: str


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, omit_defaults=True):
    """JSON that fits a schema.

    Attributes:
        name, description, strict: without effect: every answer fits the schema.
        schema: the JSON schema.
    """

    name: str
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Options of the answer's text.

    Attributes:
        format: its shape.
    """

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Raw = Raw()


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Options of reasoning.

    Attributes:
        effort: the variable reasoning_effort of the model's chat template.
        summary: only "auto" is taken: reasoning items always have their whole text, and no summary.
    """

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    context: Raw = Raw()
    generate_summary: Raw = Raw()
    mode: Raw = Raw()


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: Raw = Raw()


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses; the fields of sampling are described in SamplingParams.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        input: a text, or the items of a conversation.
        instructions: a system message before it.
        max_output_tokens: most tokens to generate, reasoning included; default: what the context has left.
        tools: the functions that the model may call.
        tool_choice: "auto" (the default where there are tools), "none", "required", or the function to call.
        parallel_tool_calls: whether one answer may have several calls; default true.
        text: options of the answer's text.
        reasoning: options of reasoning.
        include: "message.output_text.logprobs" asks for log probabilities; "reasoning.encrypted_content" is without
            effect: reasoning items always have their text.
        top_logprobs: report so many alternatives with each token.
        stream: send the answer as server-sent events while it grows.
        stream_options: options of that stream.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        truncation: only "disabled" is supported: a conversation that is too long is refused.
        metadata: labels, at most 16 of 64 and 512 characters; they come back with the response.
        user, safety_identifier, prompt_cache_key: labels of at most 512 characters, without effect.
        priority: smaller is more urgent, from -100 to 100; default 0. A tenant needs a permission to be below 0.
        cache_salt: only requests with the same salt share cached prefixes.
    """

    model: str = ""
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    metadata: Raw = Raw()
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: Raw = Raw()
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    chat_template_kwargs: Raw = Raw()
    priority: Int | None = None
    cache_salt: str | None = None
    access_programs: Raw = Raw()
    background: Raw = Raw()
    context_management: Raw = Raw()
    conversation: Raw = Raw()
    image: Raw = Raw()
    max_tool_calls: Raw = Raw()
    moderation: Raw = Raw()
    previous_response_id: Raw = Raw()
    prompt_cache_options: Raw = Raw()
    prompt_cache_retention: Raw = Raw()
    service_tier: Raw = Raw()
    store: Raw = Raw()
