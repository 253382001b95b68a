"""Defines the fields of POST /v1/responses; a field's type says what becomes of it (openai_fields.py).

The number of strings in a body bounds how many objects are made of it, as in Anthropic's requests, and JSON that is
passed on is not parsed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import AnyJson, Ignored
from pillion.gateway.http_api.openai_fields import CallBody, Int, Label, ReasoningEffort, ResponsesSampling
from pillion.gateway.http_api.tool_fields import ToolBody, ToolChoice


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """Holds an item of the conversation; items of an earlier response may be sent back as they were received.

    Attributes:
        type: "message" (the default) has role and content, "function_call" has call_id, name and arguments,
            "function_call_output" has call_id and output, "custom_tool_call" has call_id, name and input,
            "custom_tool_call_output" has call_id and output, "reasoning" has content or a summary. An item of any other
            type is told by its text, or left out.
        role: "user", "system", "developer" or "assistant"; "tool" with a tool_call_id is a result, as a chat has it.
        content: a text, or parts that are joined by line ends.
        call_id: the id that joins a call and its result.
        tool_calls, tool_call_id: an assistant's calls, and the one that is answered, as a chat has them.
        name: the tool's name.
        namespace: the name of the tool's namespace.
        arguments: a JSON object, as text. What is no object, as of a call that was cut short, is the model's to read.
        input: the text that a custom tool was called with.
        output: what the tool gave back.
        summary: parts of reasoning, read where it has no content.
        id, status, phase, caller: what an earlier answer said of the item.
        encrypted_content: reasoning that only OpenAI can read.
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
        # The role is checked at once, so that every item has a string, and their number is bounded: megabytes of {}
        # would be millions of items.
        if self.type == "message" and self.role is None:
            raise ValueError("Object missing required field `role`")


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Sets options of reasoning.

    Attributes:
        effort: the variable reasoning_effort of the model's chat template.
        summary, generate_summary: reasoning items always have their whole text, and no summary.
        context, mode: the model reads of earlier reasoning what its template shows.
    """

    effort: ReasoningEffort | None = None
    summary: Ignored[str | None] = None
    generate_summary: Ignored[Raw] = Raw()
    context: Ignored[Raw] = Raw()
    mode: Ignored[Raw] = Raw()


class ResponsesBody(ResponsesSampling, forbid_unknown_fields=True, kw_only=True):
    """Describes the body of POST /v1/responses; SamplingParams describes the fields of sampling.

    Attributes:
        model: the served model's name; may be left out where one model is served.
        input: a text, or the items of a conversation.
        instructions: a system message before the conversation.
        max_output_tokens: most tokens to generate, reasoning included; default: what the context has left.
        tools: the functions and custom tools that the model may call, alone or in namespaces.
        tool_choice: "auto" (the default where there are tools), "none", "required", the tool to call, or the tools that
            may be called.
        parallel_tool_calls: whether one answer may have several calls; default true.
        reasoning: options of reasoning.
        include: "message.output_text.logprobs" asks for log probabilities; what asks for more of reasoning, which
            always has its text, or of items of OpenAI's own tools, has no effect.
        top_logprobs: number of alternatives that are reported with each token, where log probabilities are asked for.
        stream: whether the answer is sent as server-sent events while it grows.
        stream_options: nothing is added to the events of that stream.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; at most 16 KiB.
        truncation: a conversation that is too long is refused, also with "auto".
        metadata: labels, at most 16 of 64 and 512 characters; they come back with the response.
        user, safety_identifier: labels of at most 512 characters; they come back with the response.
        prompt_cache_key: prefixes are found by their tokens, wherever they were computed; cache_salt separates them.
        prompt_cache_retention, prompt_cache_options: prefixes stay as long as there is room for them.
        client_metadata: what Codex says of itself, its turn and its window.
        context_management: nothing is left out of a conversation; one that is too long is refused.
        max_tool_calls: it bounds the calls of tools that a server runs, of which there are none.
        service_tier: all requests are of one tier; see priority.
        store: nothing is stored.
        access_programs, moderation: nothing that a user or a model says is judged.
        image: no answer has images.
        functions, function_call: refused; tools and tool_choice have replaced them.
        background, conversation, previous_response_id, prompt: refused, because nothing is stored.
        priority: smaller is more urgent, from -100 to 100; default 0. A tenant needs a permission to be below 0.
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
    # A body of another API has a field "prompt" that is read.
    stored_prompt: Raw = msgspec.field(name="prompt", default=Raw())
