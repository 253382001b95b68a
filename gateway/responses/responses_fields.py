"""Fields of POST /v1/responses. A field's type decides how it is handled (openai_fields.py).

As in Anthropic's requests, the number of strings in a body bounds the number of objects, and JSON that is passed on is
not parsed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import AnyJson, Ignored
from pillion.gateway.http_api.openai_fields import CallBody, Int, Label, ReasoningEffort, ResponsesSampling
from pillion.gateway.http_api.tool_fields import ToolBody, ToolChoice


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the conversation; items of an earlier response may be sent back unchanged.

    Attributes:
        type: "message" (the default) has role and content, "function_call" has call_id, name and arguments,
            "function_call_output" has call_id and output, "custom_tool_call" has call_id, name and input,
            "custom_tool_call_output" has call_id and output, "reasoning" has content or a summary. Of an item of any
            other type the model reads its text; without text it is dropped.
        role: "user", "system", "developer" or "assistant"; "tool" with a tool_call_id is a result, as in chat
            completions.
        content: a text, or parts that are joined by newlines.
        call_id: the id that links a call and its result.
        tool_calls, tool_call_id: an assistant's calls, and the call of a result, as in chat completions.
        name: the tool's name.
        namespace: the name of the tool's namespace.
        arguments: a JSON object, as text. Anything else, e.g. of a truncated call, is passed to the model as it is.
        input: the input of a custom tool's call.
        output: the tool's result.
        summary: parts of reasoning, read if it has no content.
        id, status, phase, caller: metadata of an earlier answer.
        encrypted_content: reasoning that only OpenAI can decrypt.
    """

    type: str = "message"
    role: Literal["user", "system", "developer", "assistant", "tool"] | None = None
    content: AnyJson = Raw()
    call_id: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: AnyJson = Raw()
    input: AnyJson = Raw()
    output: AnyJson = Raw()
    summary: AnyJson = Raw()
    id: Ignored[Raw] = Raw()
    status: Ignored[Raw] = Raw()
    encrypted_content: Ignored[Raw] = Raw()
    phase: Ignored[Raw] = Raw()
    caller: Ignored[Raw] = Raw()

    def __post_init__(self) -> None:
        # Checked while parsing so that every item has a string, which bounds their number: megabytes of {} would be
        # millions of items.
        if self.type == "message" and self.role is None:
            raise ValueError("Object missing required field `role`")


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Options of reasoning.

    Attributes:
        effort: the variable reasoning_effort of the model's chat template.
        summary, generate_summary: reasoning items always have their whole text, and no summary.
        context, mode: the model's template decides which earlier reasoning is in the prompt.
    """

    effort: ReasoningEffort | None = None
    summary: Ignored[str | None] = None
    generate_summary: Ignored[Raw] = Raw()
    context: Ignored[Raw] = Raw()
    mode: Ignored[Raw] = Raw()


class ResponsesBody(ResponsesSampling, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses; SamplingParams describes the sampling fields.

    Attributes:
        model: name of the served model; may be omitted if only one is served.
        input: a text, or the items of a conversation.
        instructions: a system message before the conversation.
        max_output_tokens: max tokens to generate, reasoning included; default: the rest of the context.
        tools: functions and custom tools that the model may call, possibly in namespaces.
        tool_choice: "auto" (the default with tools), "none", "required", the tool to call, or the allowed tools.
        parallel_tool_calls: whether one answer may have several calls; default true.
        reasoning: options of reasoning.
        include: "message.output_text.logprobs" requests log probabilities; requests for reasoning, which always has its
            text, or for items of OpenAI's own tools have no effect.
        top_logprobs: number of alternatives per token, if log probabilities are requested.
        stream: whether to send the answer as server-sent events while it is generated.
        stream_options: the stream's events have no options.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        truncation: a conversation that is too long is refused, also with "auto".
        metadata: labels, at most 16 of 64 and 512 characters; returned with the response.
        user, safety_identifier: labels of at most 512 characters; returned with the response.
        prompt_cache_key: prefixes are identified by their tokens alone; cache_salt separates them.
        prompt_cache_retention, prompt_cache_options: prefixes are cached until they are evicted.
        client_metadata: Codex's data about itself, its turn and its window.
        context_management: a conversation is never shortened; one that is too long is refused.
        max_tool_calls: bounds server-side tool calls, of which there are none.
        service_tier: all requests are of one tier; see priority.
        store: nothing is stored.
        access_programs, moderation: texts of users and models are not moderated.
        image: no answer has images.
        functions, function_call: refused; use tools and tool_choice.
        background, conversation, previous_response_id, prompt: refused, because nothing is stored.
        priority: smaller is more urgent, from -100 to 100; default 0. Below 0 needs a permission of the tenant.
        cache_salt: only requests with the same salt share cached prefixes.
    """

    model: str = ""
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    stream: bool | None = None
    stream_options: Ignored[Raw] = Raw()
    truncation: Ignored[Raw] = Raw()
    metadata: Raw = Raw()
    user: Ignored[Label | None] = None
    safety_identifier: Ignored[Label | None] = None
    prompt_cache_key: Ignored[Label | None] = None
    prompt_cache_options: Ignored[Raw] = Raw()
    prompt_cache_retention: Ignored[Raw] = Raw()
    client_metadata: Ignored[Raw] = Raw()
    context_management: Ignored[Raw] = Raw()
    max_tool_calls: Ignored[Int | None] = None
    service_tier: Ignored[Raw] = Raw()
    store: Ignored[Raw] = Raw()
    stop: Raw = Raw()
    ignore_eos: bool | None = None
    chat_template_kwargs: Raw = Raw()
    priority: Int | None = None
    cache_salt: str | None = None
    access_programs: Ignored[Raw] = Raw()
    image: Ignored[Raw] = Raw()
    moderation: Ignored[Raw] = Raw()
    functions: Raw = Raw()
    function_call: Raw = Raw()
    background: Raw = Raw()
    conversation: Raw = Raw()
    previous_response_id: Raw = Raw()
    # "prompt" is a field with a meaning in another API's body.
    stored_prompt: Raw = msgspec.field(name="prompt", default=Raw())
