"""Fields of Anthropic's requests. A field's type decides how it is handled (openai_fields.py).

Every list in a body contains strings, or objects with field names. So the number of strings, which are counted before
parsing, bounds the number of objects. JSON that is passed on, e.g. a tool's schema, is not parsed.
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
    """A breakpoint: the prompt up to the end of its block is pinned, within the tenant's quota.

    Attributes:
        type: only "ephemeral".
        ttl: time to live, restarted by each request with the breakpoint; default: "5m".
        scope: without effect; a prefix is shared by all requests of its tenant and cache_salt.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Ignored[Raw] = Raw()


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text.

    Attributes:
        text: the text.
        cache_control: a breakpoint after the text.
        citations: citations of an earlier answer.
    """

    text: str
    cache_control: CacheControl | None = None
    citations: Ignored[Raw] = Raw()


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """The assistant's thinking; most models' templates omit it from later prompts.

    Attributes:
        thinking: the text.
        signature: contains the text if display was "omitted"; another server's is accepted without effect.
    """

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A tool call of the assistant.

    Attributes:
        id: the id that the call's result names.
        name: the tool's name.
        input: the arguments. Anything but an object is passed to the model as it is.
        cache_control: a breakpoint after the call.
        caller: metadata of an earlier answer.
    """

    id: str
    name: str
    input: AnyJson = Raw()
    cache_control: CacheControl | None = None
    caller: Ignored[Raw] = Raw()


class OtherBlock(msgspec.Struct, tag_field="type", tag=OTHER, forbid_unknown_fields=True):
    """A block of any other type, e.g. a server-side tool call, its result, or a document. The model reads its text.
    Without text it is dropped, or refused in the last user turn.

    Attributes:
        sent_type: the block's type.
        text, content, source, tool_name: fields that may contain its text.
        cache_control: a breakpoint after the block.
    """

    sent_type: str = ""
    text: AnyJson = Raw()
    content: AnyJson = Raw()
    source: AnyJson = Raw()
    tool_name: AnyJson = Raw()
    cache_control: CacheControl | None = None


class ImageBlock(msgspec.Struct, tag_field="type", tag="image", forbid_unknown_fields=True):
    """An image. One in a tool result is replaced by a note that the model cannot see it; a user's is refused.

    Attributes:
        source: the image.
        cache_control: a breakpoint after the note.
    """

    source: Ignored[Raw] = Raw()
    cache_control: CacheControl | None = None


ResultPart = TextBlock | ImageBlock | OtherBlock


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """A tool's result.

    Attributes:
        tool_use_id: the id of the call.
        content: a text, or blocks; images are replaced by a note that the model cannot see them.
        is_error: whether the tool failed; "Error: " then precedes the content.
        cache_control: a breakpoint after the result.
    """

    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | OtherBlock


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message. If the last one is the assistant's, the answer continues it.

    Attributes:
        role: the author. "developer" and "tool" are those of chat completions.
        tool_calls, tool_call_id: an assistant's calls, and the call of a tool result, as in chat completions.
        content: a text, or blocks, whose texts are joined by newlines. Required in the user's last message.
    """

    role: Literal["user", "assistant", "system", "developer", "tool"]
    content: str | list[Block] = []
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None


class AnthropicTool(ToolBody, forbid_unknown_fields=True, kw_only=True):
    """A tool in any supported form; one of a type like "bash_20250124" is not offered to the model.

    Attributes:
        cache_control: a breakpoint after the system prompt, where templates write tools.
    """

    cache_control: CacheControl | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model thinks before it answers, if its template has the choice.

    Attributes:
        type: "enabled" and "disabled" set the template's variables enable_thinking and thinking; "adaptive" sets none.
        budget_tokens: not enforced; max_tokens bounds thinking and text together.
        display: "omitted" omits the text of thinking blocks; their signatures carry it through the conversation.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored[Raw] = Raw()
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(FormatHolder, forbid_unknown_fields=True):
    """Further options of an answer.

    Attributes:
        effort: the variable reasoning_effort of the model's chat template.
        task_budget: not passed to the model; max_tokens bounds each answer.
    """

    effort: ReasoningEffort | None = None
    task_budget: Ignored[Raw] = Raw()


class CountTokensBody(StructureBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens, as Anthropic defines it.

    Attributes:
        model: name of the served model; may be omitted if only one is served.
        messages: the conversation, oldest message first.
        system: instructions before the conversation: a text, or blocks that are joined by newlines.
        tools: tools that the model may call.
        tool_choice: how they may be called.
        parallel_tool_calls: whether an answer may have several calls, as in chat completions; default true.
        thinking: whether the model thinks before it answers.
        output_config: further options of the answer.
        cache_control: a breakpoint after the last message.
        speed: there is one speed; see priority.
        context_management, compaction: a conversation is never shortened; one that is too long is refused.
        mcp_servers, container: server-side tools are not offered to the model.
        fallbacks, fallback_credit_token: the named model answers, or the call fails.
        billing_policy, user_profile_id, workspace_id: for Anthropic's billing; --api-keys identifies callers here.
        functions, function_call: refused; use tools and tool_choice.
        inference_geo: answers are computed where this cluster is.
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
    """Body of POST /v1/messages, as Anthropic defines it; SamplingParams describes the sampling fields.

    Attributes:
        max_tokens: max tokens to generate, thinking included.
        stop_sequences: texts that end the answer and are not part of it.
        stream: whether to send the answer as server-sent events while it is generated.
        metadata: a label; not stored.
        service_tier: all requests are of one tier; see priority.
        diagnostics: the usage reports the prompt's cached tokens.
        priority: smaller is more urgent, from -100 to 100; default 0. Below 0 needs a permission of the tenant.
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
