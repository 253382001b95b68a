"""Defines the fields of Anthropic's requests; a field's type says what becomes of it (openai_fields.py).

Every list in a body has texts, or objects with names of fields in them. So the number of strings in a body, which are
counted before it is parsed, bounds how many objects are made of it. JSON that is passed on, such as a tool's schema, is
not parsed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import OTHER, AnyJson, Ignored, JsonObject
from pillion.gateway.http_api.openai_fields import Int, ReasoningEffort


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """Marks a breakpoint: the prompt up to the end of its block is pinned, as far as the tenant's quota goes.

    Attributes:
        type: only "ephemeral" is known.
        ttl: how long, from each request that has the breakpoint on; default: "5m".
        scope: a prefix is found by all requests of its tenant and cache_salt.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Ignored[Raw] = Raw()


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Holds a text.

    Attributes:
        text: the text.
        cache_control: a breakpoint after the text.
        citations: what stood beside an earlier answer's text.
    """

    text: str
    cache_control: CacheControl | None = None
    citations: Ignored[Raw] = Raw()


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """Holds what the assistant thought; most models' templates leave it out of later prompts.

    Attributes:
        thinking: the text.
        signature: the text, where the answer came with display "omitted"; another server's is accepted without effect.
    """

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """Describes a call of a tool by the assistant.

    Attributes:
        id: the id that the result of the call names.
        name: the tool's name.
        input: the arguments. What is no object is the model's to read.
        cache_control: a breakpoint after the call.
        caller: what an earlier answer said of the call.
    """

    id: str
    name: str
    input: AnyJson = Raw()
    cache_control: CacheControl | None = None
    caller: Ignored[Raw] = Raw()


class OtherBlock(msgspec.Struct, tag_field="type", tag=OTHER, forbid_unknown_fields=True):
    """Holds a block of any other type, such as a call of a tool that a server runs, its result, or a document. The
    model reads its text. One without text is left out, or refused in what the user says last.

    Attributes:
        sent_type: the block's type.
        text, content, source, tool_name: what may have its text.
        cache_control: a breakpoint after the block.
    """

    sent_type: str = ""
    text: AnyJson = Raw()
    content: AnyJson = Raw()
    source: AnyJson = Raw()
    tool_name: AnyJson = Raw()
    cache_control: CacheControl | None = None


class ImageBlock(msgspec.Struct, tag_field="type", tag="image", forbid_unknown_fields=True):
    """Holds an image. In the place of one that a tool gave back the model reads that it cannot see it; a user's is
    refused.

    Attributes:
        source: the image.
        cache_control: a breakpoint after what the model reads.
    """

    source: Ignored[Raw] = Raw()
    cache_control: CacheControl | None = None


ResultPart = TextBlock | ImageBlock | OtherBlock


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """Holds what a tool gave back.

    Attributes:
        tool_use_id: the id of the call.
        content: a text, or blocks, in the place of whose images the model reads that it cannot see them.
        is_error: whether the tool failed; the model then reads "Error: " before the content.
        cache_control: a breakpoint after the result.
    """

    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | OtherBlock


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Holds one message. Where the last one is the assistant's, the answer goes on within it.

    Attributes:
        role: who speaks.
        content: a text, or blocks, whose texts are joined by line ends. What the user says last has to have some.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] = []


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True):
    """Describes a tool that the model may call.

    Attributes:
        type: "custom", the default. Of a tool of another type, which a server runs or only Anthropic's models know, the
            model is not told.
        name, description: what the model reads of it.
        input_schema: the JSON schema of its arguments.
        strict: whether the arguments of its calls always fit the schema.
        eager_input_streaming: arguments are always streamed as they come.
        defer_loading: the model knows every tool from the beginning, and need not search for it.
        input_examples: the model is not told; say it in the description.
        cache_control: a breakpoint after the system prompt, within which templates write tools.
        allowed_callers: the model itself calls every tool.
    """

    name: str = ""
    input_schema: JsonObject = Raw()
    type: str | None = None
    description: str = ""
    strict: bool | None = None
    eager_input_streaming: Ignored[Raw] = Raw()
    cache_control: CacheControl | None = None
    defer_loading: Ignored[Raw] = Raw()
    input_examples: Ignored[Raw] = Raw()
    allowed_callers: Ignored[Raw] = Raw()

    @property
    def is_told(self) -> bool:
        """Says whether the model is told of the tool."""
        return self.type in (None, "custom")

    def __post_init__(self) -> None:
        # Every tool has to have a string, so that their number is bounded.
        if self.is_told and not self.name:
            raise ValueError("Object missing required field `name`")


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Says how tools may be called.

    Attributes:
        type: "auto", "any" for at least one call, "tool" for a call of ``name``, or "none".
        name: the tool that has to be called.
        disable_parallel_tool_use: whether an answer has at most one call.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Says whether the model thinks before it answers, where its template leaves the choice.

    Attributes:
        type: "enabled" and "disabled" set the template's variables enable_thinking and thinking; "adaptive" sets none.
        budget_tokens: nothing is cut at it; max_tokens bounds thinking and text together.
        display: "omitted" leaves the text of thinking blocks out; their signatures bring it back with the
            conversation.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored[Raw] = Raw()
    display: Literal["summarized", "omitted"] | None = None


class JsonOutput(msgspec.Struct, forbid_unknown_fields=True):
    """Says which structure an answer has.

    Attributes:
        type: only "json_schema" is known.
        schema: the JSON schema that the answer fits.
    """

    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Holds further options of an answer.

    Attributes:
        effort: the variable reasoning_effort of the model's chat template.
        format: the structure of the answer.
        task_budget: the model is not told; max_tokens bounds each answer.
    """

    effort: ReasoningEffort | None = None
    format: JsonOutput | None = None
    task_budget: Ignored[Raw] = Raw()


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Describes the body of POST /v1/messages/count_tokens, as Anthropic has it.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        messages: the conversation, oldest message first.
        system: instructions before the conversation: a text, or blocks that are joined by line ends.
        tools: the tools that the model may call.
        tool_choice: how they may be called.
        thinking: whether the model thinks before it answers.
        output_config: further options of the answer.
        output_format: an older name of output_config.format.
        cache_control: a breakpoint after the last message.
        speed: there is one speed; see priority.
        context_management, compaction: nothing is left out of a conversation; one that is too long is refused.
        mcp_servers, container: the model is not told of tools that a server runs.
        fallbacks, fallback_credit_token: the named model answers, or the call fails.
        billing_policy, user_profile_id, workspace_id: whom Anthropic bills; --api-keys says who calls here.
        inference_geo: the answer is computed where this cluster is.
    """

    model: str = ""
    messages: list[AnthropicMessage]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None
    cache_control: CacheControl | None = None
    speed: Ignored[Raw] = Raw()
    context_management: Ignored[Raw] = Raw()
    compaction: Ignored[Raw] = Raw()
    mcp_servers: Ignored[Raw] = Raw()
    container: Ignored[Raw] = Raw()
    fallbacks: Ignored[Raw] = Raw()
    fallback_credit_token: Ignored[Raw] = Raw()
    billing_policy: Ignored[Raw] = Raw()
    user_profile_id: Ignored[Raw] = Raw()
    workspace_id: Ignored[Raw] = Raw()
    inference_geo: Ignored[Raw] = Raw()
    thread: Raw = Raw()


class MessagesBody(CountTokensBody, forbid_unknown_fields=True, kw_only=True):
    """Describes the body of POST /v1/messages, as Anthropic has it; SamplingParams describes the fields of sampling.

    Attributes:
        max_tokens: most tokens to generate, thinking included.
        stop_sequences: texts that end the answer and are not part of it.
        stream: whether the answer is sent as server-sent events while it grows.
        metadata: a label; nothing is stored.
        service_tier: all requests are of one tier; see priority.
        diagnostics: the usage says how much of the prompt was cached.
        priority: smaller is more urgent, from -100 to 100; default 0. A tenant needs a permission to be below 0.
        cache_salt: only requests with the same salt share cached prefixes.
    """

    max_tokens: Int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stream: bool | None = None
    metadata: Ignored[Raw] = Raw()
    service_tier: Ignored[Raw] = Raw()
    seed: Int | None = None
    ignore_eos: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    diagnostics: Ignored[Raw] = Raw()
