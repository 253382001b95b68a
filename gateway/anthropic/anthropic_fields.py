"""Defines the fields of Anthropic's requests; a field's type says what becomes of it (openai_fields.py).

Every list in a body has texts, or objects with names of fields in them. So the number of strings in a body, which are
counted before it is parsed, bounds how many objects are made of it. JSON that is passed on, such as a tool's schema, is
not parsed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import OTHER, AnyJson, Ignored
from pillion.gateway.http_api.openai_fields import CallBody, Int, ReasoningEffort
from pillion.gateway.http_api.structure_fields import FormatHolder, StructureBody
from pillion.gateway.http_api.tool_fields import ToolBody, ToolChoice


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
        role: who speaks. "developer" and "tool" are a chat's.
        tool_calls, tool_call_id: an assistant's calls, and the one that a tool answers, as a chat has them.
        content: a text, or blocks, whose texts are joined by line ends. What the user says last has to have some.
    """

    role: Literal["user", "assistant", "system", "developer", "tool"]
    content: str | list[Block] = []
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None


class AnthropicTool(ToolBody, forbid_unknown_fields=True, kw_only=True):
    """Describes a tool in any of its shapes; a tool of a type like "bash_20250124" is not offered to the model.

    Attributes:
        cache_control: a breakpoint after the system prompt, within which templates write tools.
    """

    cache_control: CacheControl | None = None


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


class OutputConfig(FormatHolder, forbid_unknown_fields=True):
    """Holds further options of an answer.

    Attributes:
        effort: the variable reasoning_effort of the model's chat template.
        task_budget: the model is not told; max_tokens bounds each answer.
    """

    effort: ReasoningEffort | None = None
    task_budget: Ignored[Raw] = Raw()


class CountTokensBody(StructureBody, forbid_unknown_fields=True, kw_only=True):
    """Describes the body of POST /v1/messages/count_tokens, as Anthropic has it.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        messages: the conversation, oldest message first.
        system: instructions before the conversation: a text, or blocks that are joined by line ends.
        tools: the tools that the model may call.
        tool_choice: how they may be called.
        parallel_tool_calls: whether an answer may have several calls, as in a chat; default true.
        thinking: whether the model thinks before it answers.
        output_config: further options of the answer.
        cache_control: a breakpoint after the last message.
        speed: there is one speed; see priority.
        context_management, compaction: nothing is left out of a conversation; one that is too long is refused.
        mcp_servers, container: the model is not told of tools that a server runs.
        fallbacks, fallback_credit_token: the named model answers, or the call fails.
        billing_policy, user_profile_id, workspace_id: whom Anthropic bills; --api-keys says who calls here.
        functions, function_call: refused; tools and tool_choice have replaced them.
        inference_geo: the answer is computed where this cluster is.
    """

    model: str = ""
    messages: list[AnthropicMessage]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
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
    functions: Raw = Raw()
    function_call: Raw = Raw()


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
    stop_sequences: str | list[str] | None = None
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
