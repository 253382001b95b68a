"""The fields of Anthropic's requests. Any other field is refused by its name; bare Raw fields are not supported.

Every list in a body is one of texts, or of objects with names of fields in them. So the strings of a body, which are
counted before it is parsed, bound what is made of it. JSON that is passed on, such as a tool's schema, is not parsed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import JsonObject
from pillion.gateway.http_api.openai_fields import Int


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """A breakpoint: the prompt up to the end of what has it is pinned, as far as the tenant's quota goes.

    Attributes:
        type: only "ephemeral" is known.
        ttl: how long, from each request that has the breakpoint on; default: "5m".
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Text.

    Attributes:
        text: the text.
        cache_control: a breakpoint behind the text.
    """

    text: str
    cache_control: CacheControl | None = None
    citations: Raw = Raw()


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """What the assistant thought; most models' templates leave it out of later prompts.

    Attributes:
        thinking: the text.
        signature: without effect.
    """

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A call of a tool by the assistant.

    Attributes:
        id: its name in the result.
        name: the tool's name.
        input: the arguments.
        cache_control: a breakpoint behind the call.
    """

    id: str
    name: str
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: Raw = Raw()
    toolset_name: Raw = Raw()


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """What a tool gave back.

    Attributes:
        tool_use_id: the id of the call.
        content: a text, or blocks of text.
        is_error: whether the tool failed; the model then reads "Error: " before the content.
        cache_control: a breakpoint behind the result.
    """

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Raw = Raw()


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message. Where the last one is the assistant's, the answer goes on within it.

    Attributes:
        role: who speaks.
        content: a text, or blocks, whose texts are joined by line ends.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that the model may call.

    Attributes:
        type: only "custom" is supported: the client runs its tools.
        name, description: what the model reads of it.
        input_schema: the JSON schema of its arguments.
        strict: whether the arguments of its calls always fit the schema.
        eager_input_streaming: without effect: arguments are always streamed as they come.
        cache_control: a breakpoint behind the system prompt, within which templates write tools.
    """

    name: str
    input_schema: JsonObject
    type: Literal["custom"] | None = None
    description: str = ""
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: Raw = Raw()
    defer_loading: Raw = Raw()
    input_examples: Raw = Raw()


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """How tools may be called.

    Attributes:
        type: "auto", "any" for at least one call, "tool" for a call of ``name``, or "none".
        name: the tool that has to be called.
        disable_parallel_tool_use: whether an answer has at most one call.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model thinks before it answers, where its template leaves the choice.

    Attributes:
        type: "enabled" and "disabled" set the template's variables enable_thinking and thinking; "adaptive" sets none.
        budget_tokens: at least 1024 and less than max_tokens; thinking and text together are bounded by max_tokens.
        display: "omitted" leaves the text of thinking blocks out.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutput(msgspec.Struct, forbid_unknown_fields=True):
    """The shape of an answer.

    Attributes:
        type: only "json_schema" is known.
        schema: the JSON schema that the answer fits.
    """

    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Further options of an answer.

    Attributes:
        effort: the variable reasoning_effort of the model's chat template.
        format: the shape of the answer.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class CallerLabels(msgspec.Struct, forbid_unknown_fields=True):
    """Labels of a request.

    Attributes:
        user_id: at most 512 characters, without effect.
    """

    user_id: str | None = None


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens, as Anthropic has it.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        messages: the conversation, oldest message first.
        system: instructions before it: a text, or blocks that are joined by line ends.
        tools: the tools that the model may call.
        tool_choice: how they may be called.
        thinking: whether the model thinks before it answers.
        output_config: further options of the answer.
        cache_control: a breakpoint behind the last message.
        speed: only "standard" is supported.
    """

    model: str = ""
    messages: list[AnthropicMessage]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    container: Raw = Raw()
    context_management: Raw = Raw()
    mcp_servers: Raw = Raw()
    user_profile_id: Raw = Raw()
    workspace_id: Raw = Raw()


class MessagesBody(CountTokensBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages, as Anthropic has it; the fields of sampling are described in SamplingParams.

    Attributes:
        max_tokens: most tokens to generate, thinking included.
        stop_sequences: texts that end the answer and are not part of it.
        stream: send the answer as server-sent events while it grows.
        metadata: labels, without effect: nothing is stored.
        service_tier: without effect: there is one tier.
        priority: smaller is more urgent, from -100 to 100; default 0. A tenant needs a permission to be below 0.
        cache_salt: only requests with the same salt share cached prefixes.
    """

    max_tokens: Int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stream: bool | None = None
    metadata: CallerLabels | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    seed: Int | None = None
    ignore_eos: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    diagnostics: Raw = Raw()
    inference_geo: Raw = Raw()
