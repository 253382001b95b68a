"""Values that callers pass and receive: plain frozen dataclasses, free of protobuf and torch; and the ranges of
sampling parameters, against which gateways check clients' requests, and workers check gateways'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic

from pillion.errors import FieldViolation

if TYPE_CHECKING:
    # Every type checker includes this package. At run time it is not needed, nor is the default.
    from typing_extensions import TypeVar

    Value = TypeVar("Value", default=Any, covariant=True)
else:
    from typing import TypeVar

    Value = TypeVar("Value", covariant=True)

# Roles of workers.
WORKERS = ("prefill", "decode")


class FinishReason(Enum):
    """Why a stream ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The structure that an answer must have: exactly one field is set. The names are vLLM's.

    Attributes:
        json: a JSON schema, as JSON text.
        json_object: whether any JSON object is allowed.
        regex: a regular expression that the whole answer matches.
        choice: texts one of which is the answer.
        grammar: a grammar in Lark's notation, or in GBNF's.
        structural_tag: free text with structured parts between given marks; JSON text in vLLM's format.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structural_tag: str | None = None


MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``, both included; with ``above``, ``low`` is excluded."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """Return whether ``value`` is in the range. NaN, which compares false with everything, is in no range."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def complaint(self, value: float) -> str:
        """Describe what is wrong with a value outside of the range."""
        if self.high < MAX_INT32:
            return f"{value} is not in {self}"
        bits = 64 if self.high > MAX_INT32 else 32
        return f"{value} is below {self.low}" if -MAX_INT32 < self.low > value else f"does not fit {bits} bits"

    def __str__(self) -> str:
        return f"{'(' if self.above else '['}{self.low:g}, {self.high:g}]"


MAX_LOGPROBS = 20
# Max answers times log probabilities per token: they accumulate in the gateway while the client reads nothing.
MAX_REPORTED = 512


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """Properties of a numeric field of :class:`SamplingParams`, for all APIs and checks.

    Attributes:
        allowed: the valid values; None if they depend on the request, or any is valid.
        whole: whether it is an integer.
        neutral: the value if neither the client nor the model sets one; None if it differs by request.
        recommended_as: its key in a model's generation_config.json, "" if models recommend none.
        gguf: its key among the sampling values of GGUF files, "" if they have none.
        apis: HTTP bodies with a field of this name: "completions" (also of chat) and "responses".
        about: help text of the command-line option; "" if it has a separate one.
        of_rows: True if the field affects a token's whole distribution, so that each row of a step has a value.
        of_logits: True if it changes individual logits.
    """

    allowed: Range | None
    whole: bool = False
    neutral: float | None = None
    recommended_as: str = ""
    gguf: str = ""
    apis: tuple[str, ...] = ()
    about: str = ""
    of_rows: bool = False
    of_logits: bool = False


_COMPLETIONS = ("completions",)
_BOTH = ("completions", "responses")


# Metadata of fields that only gateways use; workers get the defaults.
_AT_GATEWAY = {"at_gateway": True}
# Metadata of non-numeric fields that change individual logits.
_OF_LOGITS = {"of_logits": True}


def _option(allowed: Range | None = None, *, metadata: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """Create a field of :class:`SamplingParams` with its option."""
    return field(default=None, metadata={"option": SamplingOption(allowed, **more), **(metadata or {})})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. ``None`` means "not set": the gateway replaces it by the default, except for numbers that
    no model recommends, which stay None and have no effect.

    The defaults of temperature, top_p, top_k, min_p and the penalties are the model's own (``ModelInfo.sampling``); if
    it recommends none, they are those given here.

    Attributes:
        temperature: 0 is greedy; default 1.0.
        top_p: nucleus mass in (0, 1]; default 1.0. The gateway treats 0 as the most likely token.
        top_k: keep the k most likely tokens; 0 or -1 keeps all (the default).
        seed: any 64-bit number; the gateway draws one if it is missing, or -1 (I6).
        max_tokens: maximum number of tokens to generate; default: the rest of the context. 0 computes the prompt alone.
        stop: texts that end the stream and are not part of it.
        stop_token_ids: ids that end the stream, in addition to the model's own.
        ignore_eos: continue past the model's end-of-text token.
        min_p: keep tokens at least this many times as likely as the most likely one; default 0.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens in prompt or answer; default 1.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer, once or per occurrence;
            default 0.
        logit_bias: added to the logits, by token id.
        min_tokens: minimum number of tokens before a stop; default 0.
        logprobs: report log probabilities of the answer's tokens and of this many alternatives; None reports none.
        n: number of answers to the prompt; default 1.
        best_of: generate this many answers and return the best n; default n.
        structured_outputs: the structure that every answer must have.
        prompt_logprobs: report log probabilities of all but the prompt's first token, and of this many alternatives.
        allowed_token_ids: only these tokens are chosen, end tokens too only if included; empty: all.
        bad_words: texts that the answer never contains, with or without a leading space.
        bad_words_token_ids: their tokens, set by the gateway; clients do not send them.
        skip_special_tokens: False shows the texts of special tokens in the answer's text; None is True.
        include_stop_str_in_output: include the stop string, or the text of the stop token, in the answer's text.
        detokenize: False returns tokens without text; None is True.
        truncate_prompt_tokens: truncate the prompt to this many tokens, -1 to what the context leaves for it; by
            default a prompt that is too long is rejected.
        truncation_side: "left" removes the prompt's beginning, "right" its end; "" is left.
    """

    temperature: float | None = _option(
        Range(0, 100),
        neutral=1.0,
        recommended_as="temperature",
        gguf="temp",
        apis=_BOTH,
        about="0 is greedy.",
        of_rows=True,
    )
    top_p: float | None = _option(
        Range(0, 1, above=True),
        neutral=1.0,
        recommended_as="top_p",
        gguf="top_p",
        apis=_BOTH,
        about="Nucleus mass.",
        of_rows=True,
    )
    top_k: int | None = _option(
        Range(-1, MAX_INT32),
        whole=True,
        neutral=0,
        recommended_as="top_k",
        gguf="top_k",
        apis=_BOTH,
        about="Keep only the k most likely tokens.",
        of_rows=True,
    )
    seed: int | None = _option(Range(-(2**63), 2**63 - 1), whole=True, apis=_BOTH, about="Makes sampling repeatable.")
    max_tokens: int | None = _option(whole=True, recommended_as="max_new_tokens")
    stop: tuple[str, ...] = field(default=(), metadata=_AT_GATEWAY)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float | None = _option(
        Range(0, 1),
        neutral=0.0,
        recommended_as="min_p",
        gguf="min_p",
        apis=_BOTH,
        about="Keep only tokens at least this many times as likely as the most likely one.",
        of_rows=True,
    )
    repetition_penalty: float | None = _option(
        Range(0, 10, above=True),
        neutral=1.0,
        recommended_as="repetition_penalty",
        gguf="penalty_repeat",
        apis=_BOTH,
        about="Divides the logits of tokens in prompt and answer; 1 has no effect.",
        of_logits=True,
    )
    presence_penalty: float | None = _option(
        Range(-2, 2),
        neutral=0.0,
        recommended_as="presence_penalty",
        apis=_BOTH,
        about="Subtracted once from the logits of tokens in the answer.",
        of_logits=True,
    )
    frequency_penalty: float | None = _option(
        Range(-2, 2),
        neutral=0.0,
        recommended_as="frequency_penalty",
        apis=_BOTH,
        about="Subtracted from the logits of tokens in the answer, per occurrence.",
        of_logits=True,
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata=_OF_LOGITS)
    min_tokens: int | None = _option(whole=True, apis=_COMPLETIONS, of_logits=True)
    logprobs: int | None = _option(Range(0, MAX_LOGPROBS), whole=True)
    n: int | None = _option(whole=True, apis=_COMPLETIONS)
    best_of: int | None = _option(whole=True, apis=_COMPLETIONS)
    structured_outputs: StructuredOutputs | None = field(default=None, metadata=_AT_GATEWAY)
    prompt_logprobs: int | None = _option(Range(0, MAX_LOGPROBS), whole=True, apis=_COMPLETIONS)
    allowed_token_ids: tuple[int, ...] = field(default=(), metadata=_OF_LOGITS)
    bad_words: tuple[str, ...] = field(default=(), metadata=_AT_GATEWAY)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default=(), metadata={"of_gateway": True} | _OF_LOGITS)
    skip_special_tokens: bool | None = field(default=None, metadata=_AT_GATEWAY)
    include_stop_str_in_output: bool = field(default=False, metadata=_AT_GATEWAY)
    detokenize: bool | None = field(default=None, metadata=_AT_GATEWAY)
    truncate_prompt_tokens: int | None = _option(
        Range(-1, MAX_INT32), whole=True, apis=_COMPLETIONS, metadata=_AT_GATEWAY
    )
    truncation_side: str = field(default="", metadata=_AT_GATEWAY)

    @property
    def changes_logits(self) -> bool:
        """True if a field that changes individual logits is set."""
        return any((value := getattr(self, name)) and value != neutral for name, neutral in _LOGIT_OPTIONS)


SAMPLING_OPTIONS: Mapping[str, SamplingOption] = {
    one.name: one.metadata["option"] for one in fields(SamplingParams) if "option" in one.metadata
}
# Names of the fields that change individual logits, and for each the value without effect, besides 0 and empty ones.
_LOGIT_OPTIONS = [
    *((name, one.neutral) for name, one in SAMPLING_OPTIONS.items() if one.of_logits),
    *((one.name, None) for one in fields(SamplingParams) if "of_logits" in one.metadata),
]
GATEWAY_OPTIONS: Mapping[str, Any] = {
    one.name: one.default for one in fields(SamplingParams) if "at_gateway" in one.metadata
}
PUBLIC_OPTIONS = tuple(one.name for one in fields(SamplingParams) if "of_gateway" not in one.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a text becomes a vector, in a request that generates nothing.

    Attributes:
        rows: positions of the prompt over whose hidden states the vector is the mean; None for the last token alone,
            which can use cached prefixes.
        logits_of: tokens whose logits after the last token are the vector; () for the hidden state itself.
        second_from: start of the second text of a pair, for encoders; 0 for a single text.
    """

    rows: range | None = None
    logits_of: tuple[int, ...] = ()
    second_from: int = 0


# Max log probabilities of a request's prompt: tokens times (alternatives + 1), times answers. Each takes about 150
# bytes in a gateway, and 64 in a response.
MAX_PROMPT_LOGPROBS = 2**18
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 2**14
# Max token sequences of a request's bad words, each with and without a leading space; max tokens per sequence.
MAX_BAD_SEQUENCES = 512
MAX_BAD_TOKENS = 2048


def range_violations(sampling: SamplingParams, vocab_size: int) -> Iterator[FieldViolation]:
    """Yield every field out of its range; a field that is not set is within it. Limits that depend on a request's
    length or on a model's context are not checked here."""
    for name, option in SAMPLING_OPTIONS.items():
        value = getattr(sampling, name)
        if value == -1 and name in ("logprobs", "prompt_logprobs"):
            text = f"-1 asks for all {vocab_size} tokens of the vocabulary; at most {MAX_LOGPROBS} are reported"
            yield FieldViolation(f"sampling.{name}", text)
        elif value is not None and option.allowed is not None and value not in option.allowed:
            yield FieldViolation(f"sampling.{name}", option.allowed.complaint(value))
    if sampling.allowed_token_ids:
        yield from _allowed_violations(sampling.allowed_token_ids, vocab_size)
    if sampling.logit_bias:
        yield from _bias_violations(sampling.logit_bias, vocab_size)


def id_violations(field: str, token_ids: Sequence[int], vocab_size: int) -> Iterator[FieldViolation]:
    """Yield the ids outside of the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        for n, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                yield FieldViolation(f"{field}[{n}]", f"{token_id} is not in [0, {vocab_size})")


def _bias_violations(logit_bias: Mapping[int, float], vocab_size: int) -> Iterator[FieldViolation]:
    if len(logit_bias) > MAX_LOGIT_BIASES:
        yield FieldViolation("sampling.logit_bias", f"{len(logit_bias)} tokens; at most {MAX_LOGIT_BIASES}")
        return
    allowed = Range(-100, 100)
    for token_id, bias in logit_bias.items():
        if not 0 <= token_id < vocab_size:
            yield FieldViolation(f"sampling.logit_bias[{token_id}]", f"{token_id} is not in [0, {vocab_size})")
        elif bias not in allowed:
            yield FieldViolation(f"sampling.logit_bias[{token_id}]", f"{bias} is not in {allowed}")


def _allowed_violations(token_ids: tuple[int, ...], vocab_size: int) -> Iterator[FieldViolation]:
    field = "sampling.allowed_token_ids"
    if len(token_ids) > MAX_ALLOWED_TOKEN_IDS:
        yield FieldViolation(field, f"{len(token_ids)} ids; at most {MAX_ALLOWED_TOKEN_IDS}")
    else:
        yield from id_violations(field, token_ids, vocab_size)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural) of a token by the model, before temperature, penalties and bias.

    ``top_ids`` are the most likely tokens at its position, in descending order, possibly including the token. ``rank``
    is known only for a prompt's tokens: 1 if no token was more likely, 0 if unknown.
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
        name, description: as the model reads them.
        parameters: the JSON schema of its arguments, as JSON text; "" is any object.
        strict: whether the arguments of its calls always match ``parameters``; None lets the gateway decide.
    """

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The tools of a conversation and how they may be called.

    Attributes:
        tools: the tools that may be called.
        choice: "auto" (the default if there are tools), "none", "required", or "named".
        name: the tool of a "named" choice.
        allowed: the names of the tools that may be called, if not all that the model reads.
        parallel_tool_calls: whether one answer may call several; None is true.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = ""
    name: str = ""
    parallel_tool_calls: bool | None = None
    allowed: tuple[str, ...] = ()

    @property
    def asks_for_calls(self) -> bool:
        """Whether answers may call tools."""
        return bool(self.tools) and self.choice != "none"


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
        role: "system", "user", "assistant" or "tool"; the model's template may know more.
        content: the message's text.
        tool_calls: calls that this message of the assistant made.
        tool_call_id: the call whose result this message of role "tool" is.
        name: the speaker, or the tool whose result it is.
        reasoning: the assistant's reasoning before its answer.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class StreamOrigin:
    """State needed to resume a stream, besides its tokens; ``StreamOrigin`` in gateway.proto explains each field."""

    seed: int
    digest: bytes
    cached_tokens: int
    answer_id: str = ""


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """The tokens received of one answer of a broken stream, and its finish reason if it has ended."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Request to resume a broken stream: its origin, and the received part of each answer, by index.

    ``scored_tokens`` is the number of log probabilities of the prompt that were received.
    """

    origin: StreamOrigin
    answers: tuple[AnswerSoFar, ...]
    scored_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt. The names and their meanings are vLLM's.

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
    """A client's request. Exactly one of ``text``, ``token_ids`` and ``messages`` is the prompt; ``chat`` and ``tools``
    apply to messages only.

    ``resume`` continues a broken stream; the clients set it themselves.
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

    ``cached_tokens`` are the prompt's tokens whose KV was cached; ``reasoning_tokens`` are the reasoning part of the
    completion, if the gateway distinguishes it. Decode workers drafted ``guessed_tokens``, of which ``accepted_tokens``
    were right. Of the cached tokens, ``fetched_tokens`` came from other nodes, ``restored_tokens`` from the node's own
    lower tiers (host memory, disk) and ``bucket_tokens`` from a bucket.

    The other fields are the receipt, which is complete when the request has ended: tokens computed before new ones,
    including those computed again after a loss, and the KV that the request occupied in pools, in bytes times seconds,
    by its source.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    fetched_tokens: int = 0
    restored_tokens: int = 0
    bucket_tokens: int = 0
    # Ignored by ==: these depend on timing, cache hits and retries.
    computed_tokens: int = field(default=0, compare=False)
    kv_computed_byte_seconds: int = field(default=0, compare=False)
    kv_pool_byte_seconds: int = field(default=0, compare=False)
    kv_fetched_byte_seconds: int = field(default=0, compare=False)
    kv_restored_byte_seconds: int = field(default=0, compare=False)
    kv_bucket_byte_seconds: int = field(default=0, compare=False)

    def __add__(self, other: Usage) -> Usage:
        """Add the counts of two requests."""
        return Usage(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Usage)})

    def cached_by_tier(self) -> dict[str, int]:
        """Return the cached tokens by the source of their KV, which is the pool unless it was fetched, restored or read
        from a bucket."""
        loaded = {name: getattr(self, name) for name in ("fetched_tokens", "restored_tokens", "bucket_tokens")}
        return {"pool_tokens": self.cached_tokens - sum(loaded.values()), **loaded}

    def kv_byte_seconds(self) -> dict[str, int]:
        """Return the KV that the request occupied in pools, in bytes times seconds, by its source."""
        tiers = ("computed", "pool", "fetched", "restored", "bucket")
        return {tier: getattr(self, f"kv_{tier}_byte_seconds") for tier in tiers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How a request's prompt was computed, durations, and the workers involved; ``Timings`` in common.proto explains
    each field."""

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
class Delta(Generic[Value]):
    """One message of a stream: the next text of answer ``index`` that cannot change any more.

    The last message of an answer has a finish reason; the last one of the stream also has usage and timings.
    ``logprobs`` has one entry per ``token_ids``, if requested. ``reasoning`` and ``tool_calls`` are the model's
    reasoning and the tools that it called; neither is part of ``text``. ``stop_string``, in the last message of an
    answer, is the stop string that ended it, "" if none did. ``prompt_logprobs`` are those of the prompt's next tokens,
    starting with the second one; they come once, for all answers, in messages of their own. ``parsed`` is set by a
    client with a schema: the value of an answer, of the given type, in its last message.
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
    parsed: Value | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that live workers serve.

    The parsers are the formats of its tool calls and reasoning, or "none". An adapter has its model's name as
    ``parent`` and the digest of its content as ``adapter``; an alias has its model's name as ``alias_of``. ``weights``
    is the format of the model's weights, such as "awq, 4 bits in groups of 128"; for plain weights it is the type of
    arithmetic. ``sampling`` has the defaults for requests; its ``max_tokens``, if set, limits every answer.
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
    """A prompt whose KV its node evicts from the pool only after all blocks that are not pinned.

    Attributes:
        name: the name by which its tenant lists and drops it.
        model: the model, or the adapter.
        tokens: number of the prompt's tokens.
        blocks, present_blocks: its whole blocks, which are pinned, and those of them in the pool now.
        expires_in_s: seconds until it expires.
        hits: prompts since it was pinned that began with all its blocks and found them in the pool at their admission.
        node_id: its KV node.
        ephemeral: whether a cache_control of the Messages API created it.
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
    """Result of warming a prompt: numbers of its tokens that were computed and that were cached, and its pin if one was
    requested."""

    computed_tokens: int
    found_tokens: int
    pin: PinnedPrefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentStatus:
    """One component of the cluster, as of its last heartbeat; block counts are a KV node's.

    ``kernels``: what a worker computes with, such as "cpu/avx512_bf16" or "torch". ``tensor_parallel_size``: number of
    processes over which it splits its model. ``queued_tokens``, ``free_seqs``: prompt tokens that a worker has yet to
    compute, and how many more sequences could run. ``fenced_components``: workers that a node has fenced. ``adapters``:
    digests of those that are ready on a worker. ``address``: its gRPC service, host:port or unix:path, as seen from its
    own machine or the cluster's. ``steps``, ``steps_ms``, ``step_*_tokens``: a worker's steps since its process
    started, their total time, and what filled their token budgets. ``pinned_blocks``: those of a node's
    ``committed_blocks`` that are pinned; ``disk_blocks``: blocks in its disk tier. ``trouble``: why a component with
    role "down" is not running. ``figures``: further figures of a worker's load by name, as its planner sees them; they
    may differ between versions. ``version``, ``protocol``: its release, empty if it does not send it, and its protocol
    number; a component that the gateway does not use because of that number has the role "foreign", and ``trouble``
    says so.
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
    version: str = ""
    protocol: int = 0
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """Total usage of a tenant's requests that have ended at one gateway since it started."""

    tenant: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The whole cluster, as ``pillion status`` shows it. ``tenants`` are those of the gateway that was asked."""

    version: str
    components: tuple[ComponentStatus, ...]
    active_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    index_available: bool
    tenants: tuple[TenantUsage, ...] = ()
