"""The values that callers pass and get back: plain frozen dataclasses, free of protobuf and of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# The roles of components that run the model.
WORKERS = ("prefill", "decode")


class FinishReason(Enum):
    """Why a stream ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The shape that an answer must have: exactly one field is set. The names are vLLM's.

    Attributes:
        json: a JSON schema, as JSON text.
        json_object: whether any JSON object will do.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these texts.
        grammar: a grammar in Lark's notation, or in GBNF's.
        structural_tag: free text with parts of a given shape between given marks; JSON text, as vLLM reads it.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structural_tag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. ``None`` is "not set": the gateway resolves it before any worker sees it.

    The defaults of temperature, top_p, top_k, min_p and the penalties are the model's own (``ModelInfo.sampling``);
    where it recommends none, they are those that are given here.

    Attributes:
        temperature: 0 is greedy; default 1.0.
        top_p: nucleus mass in (0, 1]; default 1.0.
        top_k: keep the k most likely tokens; 0 or -1 keeps all (the default).
        seed: any 64-bit number; the gateway draws one when it is not given (I6).
        max_tokens: most tokens to generate; default: what the context has left. 0 computes the prompt alone.
        stop: texts that end the stream and are not part of it.
        stop_token_ids: ids that end the stream, besides the model's own.
        ignore_eos: go on past the model's end-of-text token.
        min_p: keep tokens at least this many times as likely as the most likely one; default 0.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens in prompt or answer; default 1.
        presence_penalty, frequency_penalty: taken from the logits of tokens in the answer, once or per occurrence;
            default 0.
        logit_bias: added to the logits, by token id.
        min_tokens: no stop before so many tokens; default 0.
        logprobs: report log probabilities of the answer's tokens and of this many alternatives; None reports none.
        n: answers to the prompt; default 1.
        best_of: generate so many and give the best n; default n.
        structured_outputs: the shape that every answer must have.
        prompt_logprobs: report log probabilities of the prompt's tokens but the first, and of this many alternatives.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int | None = None
    logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token, before temperature, penalties and bias: natural logarithms.

    ``top_ids`` are the most likely tokens in its place, falling; the token itself may be among them. ``rank``, of a
    prompt's token alone, is 1 where no token was likelier; 0: not known.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. ``arguments`` is a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call.

    Attributes:
        name, description: what the model reads of it.
        parameters: the JSON schema of its arguments, as JSON text; "" is any object.
        strict: whether the arguments of its calls always fit ``parameters``; None leaves it to the gateway.
    """

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The tools of a conversation and how they may be called.

    Attributes:
        tools: those that may be called.
        choice: "auto" (the default where there are tools), "none", "required", or "named".
        name: the tool that a named choice asks for.
        parallel_tool_calls: whether one answer may call several; None is true.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = ""
    name: str = ""
    parallel_tool_calls: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of call ``index`` of an answer. ``id`` and ``name`` come with its first part."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: "system", "user", "assistant" or "tool"; the model's own template may know more.
        content: its text.
        tool_calls: calls that this message of the assistant made.
        tool_call_id: the call that this message of role "tool" brings the result of.
        name: who speaks, or the tool whose result it is.
        reasoning: what the assistant thought before it answered.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class StreamOrigin:
    """What resuming a stream needs beside its tokens; see ``StreamOrigin`` in gateway.proto for each field."""

    seed: int
    digest: bytes
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """What one answer of a broken stream has brought, and its finish reason where it has ended."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """How a client goes on with a broken stream: its origin, and what each answer has brought, by index.

    ``scored_tokens`` log probabilities of the prompt have come.
    """

    origin: StreamOrigin
    answers: tuple[AnswerSoFar, ...]
    scored_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt. The names are vLLM's, and so is what they mean.

    Attributes:
        add_generation_prompt: end the prompt where the assistant's next message begins; default: true, unless the last
            message is continued.
        continue_final_message: end the prompt within the last message, which the answer then continues.
        chat_template_kwargs: further variables of the model's chat template, such as enable_thinking; a JSON object,
            as text. "" is none.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: str = ""

    @property
    def begins_message(self) -> bool:
        """Whether the prompt ends where the assistant's next message begins."""
        chosen = self.add_generation_prompt
        return not self.continue_final_message if chosen is None else chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A client's request. Exactly one of ``text``, ``token_ids`` and ``messages`` is the prompt; ``chat`` and
    ``tools`` go with messages alone.

    ``resume`` goes on with a broken stream; the clients set it by themselves.
    """

    model: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    chat: ChatOptions = ChatOptions()
    tools: ToolOptions = ToolOptions()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    request_id: str = ""
    priority: int = 0
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    ``cached_tokens`` are the prompt's tokens whose KV was found, ``reasoning_tokens`` those of the completion that were
    reasoning, where the gateway tells it from the answer. Decode workers guessed ``guessed_tokens``, of which
    ``accepted_tokens`` were right.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        """The counts of two requests together."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.guessed_tokens + other.guessed_tokens,
            self.accepted_tokens + other.accepted_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the prompt and the time of a request went, and what computed it; see ``Timings`` in common.proto for each
    field."""

    cached_tokens: int = 0
    prefilled_tokens: int = 0
    prefill_chunks: int = 0
    tail_tokens: int = 0
    tail_steps: int = 0
    admission_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_queue_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    total_ms: float = 0.0
    replays: int = 0
    preemptions: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    plan_reason: str = ""
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    system_fingerprint: str = ""
    fetched_tokens: int = 0
    restored_tokens: int = 0
    bucket_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """One message of a stream: the next text of answer ``index``, as far as it cannot change any more.

    The last message of an answer has a finish reason; the last one of the stream also has usage and timings.
    ``logprobs`` has one entry for each of ``token_ids``, if they were asked for. ``reasoning`` and ``tool_calls`` are
    what the model thought and the tools that it called; neither is part of ``text``. ``stop_string`` is, in the last
    message of an answer, the stop string that ended it, and "" where none did. ``prompt_logprobs`` are those of the
    prompt's next tokens, from its second one on; they come once, for all answers, in messages of their own. ``parsed``
    is made by a client that was given a schema: the value of an answer, in its last message.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_string: str = ""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    parsed: Any = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that live workers serve.

    The parsers are the formats in which it calls tools and reasons, or "none". An adapter has the name of its model as
    ``parent``, and the digest of its content as ``adapter``; another name of a model has that model's as ``alias_of``.
    ``weights`` says how the model's weights are kept, such as
    "awq, 4 bits in groups of 128"; where they are plain it is the type of arithmetic. ``sampling`` has the values that
    hold where a request gives none; its ``max_tokens``, where there is one, bounds every answer.
    """

    name: str
    max_model_len_tokens: int
    fingerprint: str
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    parent: str = ""
    adapter: str = ""
    weights: str = ""
    alias_of: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """A prompt whose KV leaves its node's pool behind everything that nobody has pinned.

    Attributes:
        name: by which its tenant lists and drops it.
        model: the model, or the adapter.
        tokens: of the prompt.
        blocks, present_blocks: its whole blocks, which are pinned, and those of them that are in the pool now.
        expires_in_s: when it lapses.
        hits: prompts that began with all of its blocks, and found them in the pool when they were admitted there, since
            it was pinned.
        node_id: the KV node that has it.
        ephemeral: whether a cache_control of the Messages API made it.
    """

    name: str
    model: str = ""
    tokens: int = 0
    blocks: int = 0
    present_blocks: int = 0
    expires_in_s: int = 0
    hits: int = 0
    node_id: str = ""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class WarmedPrefix:
    """What warming a prompt took: its tokens that were computed and that were found, and its pin, if one was asked."""

    computed_tokens: int
    found_tokens: int
    pin: PinnedPrefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentStatus:
    """One component of the cluster as its last heartbeat described it; block counts are a KV node's.

    ``kernels``: what a worker computes with, such as "cpu/avx512_bf16" or "torch"; ``tensor_parallel_size``: the
    processes over which it splits its model. ``queued_tokens``, ``free_seqs``:
    prompt tokens that a worker has yet to compute, and how many more sequences would run at once.
    ``fenced_components``: workers that a node has fenced. ``adapters``: digests of those that are ready on a worker.
    ``address``: where its gRPC service is reached, host:port or unix:path, from its own machine or the cluster's.
    ``steps``, ``steps_ms``, ``step_*_tokens``: a worker's steps since its process started, the time that they took,
    and what filled their token budgets. ``pinned_blocks``: those of a node's ``committed_blocks`` that are pinned;
    ``disk_blocks``: blocks in its disk tier. ``trouble``: why a component whose role is "down" does not run.
    """

    component_id: str
    role: str
    model: str = ""
    node_id: str = ""
    running_requests: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    committed_blocks: int = 0
    quarantined_blocks: int = 0
    block_size_tokens: int = 0
    heartbeat_age_ms: int = 0
    kernels: str = ""
    queued_tokens: int = 0
    free_seqs: int = 0
    fenced_components: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    steps: int = 0
    steps_ms: float = 0.0
    step_decode_tokens: int = 0
    step_tail_tokens: int = 0
    step_prefill_tokens: int = 0
    step_speculative_tokens: int = 0
    step_forced_tokens: int = 0
    step_idle_tokens: int = 0
    pinned_blocks: int = 0
    disk_blocks: int = 0
    trouble: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The whole cluster, as ``pillion status`` shows it."""

    version: str
    components: tuple[ComponentStatus, ...]
    active_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    index_available: bool
