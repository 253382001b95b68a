"""Checks of a request before any component works on it. All invalid fields are reported at once.

    bytes, at most MAX_REQUEST_BYTES --> count strings, fields and ids --> create objects --> check each field
                                              (above LOOP_BYTES on a thread, else on the event loop)

Objects are counted in the request's bytes before any is created (I7): 8 MB may contain two million objects, whose
creation holds the GIL for a second. In JSON, strings are counted, i.e. field names and texts; in a gRPC message, its
fields. Lists of numbers are counted by their commas when they are read, against the model's limits.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from pillion.config import MAX_TEMPLATE_KWARGS_BYTES
from pillion.errors import Conflict, FieldViolation, InvalidRequest, LengthViolation, NotFound
from pillion.gateway.request.client_json import MAX_PARSED_ITEMS, is_object, items_in, parsed
from pillion.gateway.tokens.tokenizer import LOOP_BYTES, check_wanted
from pillion.near_names import did_you_mean
from pillion.rules.priority import MAX_PRIORITY
from pillion.settings.sampling_defaults import NEUTRAL, NO_DEFAULTS, SAMPLING_KEYS
from pillion.types import (
    GATEWAY_OPTIONS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCES,
    MAX_PROMPT_LOGPROBS,
    MAX_REPORTED,
    ChatMessage,
    ChatOptions,
    GenerateRequest,
    Resume,
    SamplingParams,
    StructuredOutputs,
    Tool,
    ToolOptions,
    id_violations,
    range_violations,
)

MAX_PROMPT_CHARS = 4 * 2**20
MAX_MESSAGES = 4096
# Enough for a million token ids, or for MAX_PROMPT_CHARS in most scripts. gRPC itself refuses messages from 16 MiB on,
# with RESOURCE_EXHAUSTED.
MAX_REQUEST_BYTES = 8 * 2**20
# Max ids in a list before it is parsed; the limits of the model and of the field are checked later.
MAX_PROMPT_IDS = 2**20
MAX_ROLE_CHARS = 32
# OpenAI's limit.
MAX_TOOLS = 128
# Names, descriptions and schemas of all tools.
MAX_TOOLS_BYTES = 512 * 2**10
MAX_TOOL_NAME_CHARS = 128
# Bytes charged per message or tool, besides its texts.
ITEM_BYTES = 64
# Max brackets, braces and commas in the arguments of a conversation's calls, whose objects for the chat template take
# 0.3 s to create at this number. Source code in arguments has one per 20 characters.
MAX_CALL_ITEMS = 2**19
# Long, because some servers put the model's reasoning into the ids of its calls, and clients send these back.
MAX_TOOL_CALL_ID_CHARS = 16 * 2**10
# Max characters of all stop strings together. This bounds the automaton; matching costs the same per character for any
# number of strings.
MAX_STOPS_CHARS = 4096
MAX_STOP_TOKEN_IDS = 64
# A bad word is banned with a leading space and without.
MAX_BAD_WORDS = MAX_BAD_SEQUENCES // 2
MAX_BAD_WORD_CHARS = 256
# Max tokens of a prompt that is to be truncated, if above the model's context.
MAX_CUT_TOKENS = 2**18
MAX_ANSWERS = 128
# OpenAI allows 120,000 characters of names and values in a schema.
MAX_STRUCTURED_BYTES = 128 * 2**10
MAX_CHOICES = 4096
MAX_CACHE_SALT_CHARS = 256
MAX_LABEL_CHARS = 128
# Response header, or initial metadata, with an answer's max tokens if lower than requested.
MAX_TOKENS_HEADER = "x-max-tokens"
# Max violations per error: a million bad ids in a list are one mistake.
MAX_VIOLATIONS = 32
MAX_LISTED_ADAPTERS = 32

# Template variables that the gateway sets, so clients must not.
TEMPLATE_OWN = frozenset(
    {
        *("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    }
)
_LABEL = re.compile(r"[A-Za-z0-9._:/+=-]+")
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_TOOL_NAME = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_TOOL_NAME_CHARS}}}")
_NAME_RULE = f"1 to {MAX_TOOL_NAME_CHARS} letters, digits and _ . : -"
_NO_TOOLS, _PLAIN_CHAT = ToolOptions(), ChatOptions()
_STRUCTURE = "sampling.structured_outputs"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The sizes of a model that limit its requests. ``original_tokens`` is that of PreparedModel."""

    name: str
    max_model_len_tokens: int
    vocab_size: int
    original_tokens: int = 0

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for one token."""
        return self.max_model_len_tokens - 1


def check_model(
    name: str, known: Collection[str], adapters: Collection[str] = (), aliases: Collection[str] = ()
) -> str:
    """Return ``name`` if it is ``known``, or the only known name for "". Raises NotFound for an unknown name, and
    InvalidRequest for "" if there are several. Messages list the known names and ``adapters``, and may suggest
    ``aliases``."""
    if name in known:
        return name
    if not name and len(known) == 1:
        return next(iter(known))
    listed = ", ".join(sorted(known))
    if not name and known:
        raise InvalidRequest.of(FieldViolation("model", f"several models are served, name one of: {listed}"))
    others = sorted(set(adapters).difference(known))
    if others:
        hidden = len(others) - MAX_LISTED_ADAPTERS
        listed += f"; adapters: {', '.join(others[:MAX_LISTED_ADAPTERS])}"
        listed += f" and {hidden} more" if hidden > 0 else ""
    suggestion = did_you_mean(name, (*known, *others[:MAX_LISTED_ADAPTERS], *aliases))
    raise NotFound(f"model: {name[:100]!r} is not served here; known: {listed or 'none'}{suggestion}")


def request_label(given: str, made: str = "") -> str:
    """Return a request's id for headers, trailers, logs and spans: ``given`` if it is valid in them, else one made of
    the random id ``made``, which is drawn if ""."""
    if len(given) <= MAX_LABEL_CHARS and _LABEL.fullmatch(given):
        return given
    return f"req-{made or new_answer_id()}"


def new_answer_id() -> str:
    """Draw a unique id of 24 characters for an answer."""
    return secrets.token_hex(12)


def check_size(size_bytes: int) -> None:
    if size_bytes > MAX_REQUEST_BYTES:
        text = f"the message has {size_bytes} bytes; at most {MAX_REQUEST_BYTES}"
        raise InvalidRequest.of(FieldViolation("(message)", text))


def check_counts(counts: Mapping[str, int]) -> None:
    """Raise InvalidRequest if a field of a message has too many items, whose conversion would stop all streams for
    seconds. ``counts`` are the items per field."""
    bounds = {"token_ids": MAX_PROMPT_IDS, "resume.answers.token_ids": MAX_PROMPT_IDS}
    violations = [
        FieldViolation(field, f"{count} items; at most {limit}")
        for field, count in counts.items()
        if count > (limit := bounds.get(field, MAX_MESSAGES))
    ]
    if violations:
        raise InvalidRequest.of(*violations)


def check_request(request: GenerateRequest, limits: ModelLimits) -> None:
    """Check all fields of a request; its prompt is not tokenized yet. Raises InvalidRequest with the first
    MAX_VIOLATIONS violations."""
    violations = list(itertools.islice(_violations(request, limits), MAX_VIOLATIONS))
    if violations:
        raise InvalidRequest.of(*violations)


def check_length(prompt_tokens: int, field: str, limits: ModelLimits) -> None:
    """Check that a prompt is not empty and leaves room for one token. Raises InvalidRequest."""
    if prompt_tokens > limits.max_prompt_tokens:
        raise too_long(prompt_tokens, field, limits.max_model_len_tokens)
    if prompt_tokens == 0:
        raise InvalidRequest.of(FieldViolation(field, "it has no tokens"))


def too_long(
    tokens: int, field: str, context_tokens: int, *, answer_tokens: int = 1, exact: bool = True, note: str = ""
) -> InvalidRequest:
    """Return the error for a prompt of too many ``tokens`` for the model, in the wording that clients match.

    Args:
        field: the field that holds the prompt.
        context_tokens: max tokens of prompt and answer.
        answer_tokens: tokens that an answer needs.
        exact: True if ``tokens`` is the prompt's length, False if it is a lower bound.
        note: an additional sentence, with a leading space.
    """
    counted, needed = (f"{'' if exact else 'at least '}{count}" for count in (tokens, tokens + answer_tokens))
    text = f"This model's maximum context length is {context_tokens} tokens"
    if field == "messages":
        text += f". However, your messages resulted in {counted} tokens. Please reduce the length of the messages."
        text += " The answer needs one more token." if tokens == context_tokens else ""
    else:
        text += f", however you requested {needed} tokens ({counted} in your prompt; {answer_tokens} for the"
        text += " completion). Please reduce your prompt; or completion length."
    brief = f"prompt is too long: {counted} tokens > {context_tokens - answer_tokens} maximum"
    return InvalidRequest.of(LengthViolation(field, text + note, brief))


def too_many_chars(field: str) -> LengthViolation:
    """Return the violation of a prompt above MAX_PROMPT_CHARS, whose tokens are not counted."""
    what, chars = "messages" if field == "messages" else "prompt", f"more than {MAX_PROMPT_CHARS} characters"
    text = f"This model's maximum context length is exceeded. There are {chars} in your {what}."
    return LengthViolation(field, f"{text} Please reduce the length of the {what}.", f"prompt is too long: {chars}")


def not_embedded(request: GenerateRequest, token: str, limits: ModelLimits) -> InvalidRequest:
    """Return the error for a text with a token of the tokenizer that the model lacks, e.g. an image token if the text
    model is part of a multimodal one."""
    field = prompt_field(request)
    named = (f"messages[{n}].content" for n, message in enumerate(request.messages) if token in message.content)
    text = f"it has the token {token!r}, which this model does not have: its vocabulary ends at {limits.vocab_size - 1}"
    return InvalidRequest.of(FieldViolation(next(named, field), text))


def check_scores(sampling: SamplingParams, prompt_tokens: int) -> int:
    """Return the number of log probabilities requested of a prompt, including alternatives and for all answers. Raises
    InvalidRequest above MAX_PROMPT_LOGPROBS."""
    if sampling.prompt_logprobs is None:
        return 0
    asked = prompt_tokens * (1 + sampling.prompt_logprobs) * (sampling.n or 1)
    if asked > MAX_PROMPT_LOGPROBS:
        text = f"{asked} log probabilities of a prompt of {prompt_tokens} tokens, for all answers"
        field = "sampling.prompt_logprobs"
        raise InvalidRequest.of(FieldViolation(field, f"{text}; at most {MAX_PROMPT_LOGPROBS}"))
    return asked


def check_ids(field: str, token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Check that a list has at most as many ids as the model's context, all in its vocabulary. Raises
    InvalidRequest."""
    if len(token_ids) > limits.max_model_len_tokens:
        text = f"{len(token_ids)} ids; at most {limits.max_model_len_tokens}, the model's context"
        raise InvalidRequest.of(FieldViolation(field, text))
    violations = tuple(itertools.islice(id_violations(field, token_ids, limits.vocab_size), MAX_VIOLATIONS))
    if violations:
        raise InvalidRequest.of(*violations)


def weight(request: GenerateRequest) -> int:
    """Return the approximate size in bytes of a request: prompt, tools, resumed answers, and constraints on answers."""
    contents = conversation_bytes(request.messages, request.tools.tools)
    ids = len(request.token_ids)
    if request.resume is not None:
        ids += sum(len(answer.token_ids) for answer in request.resume.answers)
    if request.sampling.structured_outputs is not None:
        contents += structured_bytes(request.sampling.structured_outputs)
    ids += len(request.sampling.allowed_token_ids)
    return len(request.text) + contents + 4 * ids


def conversation_bytes(messages: Iterable[ChatMessage], tools: Iterable[Tool]) -> int:
    return sum(ITEM_BYTES + message_chars(message) for message in messages) + sum(map(_tool_bytes, tools))


def message_chars(message: ChatMessage) -> int:
    calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning) + len(message.name) + len(message.tool_call_id) + calls


def tools_bytes(options: ToolOptions) -> int:
    return sum(map(_tool_bytes, options.tools))


def _tool_bytes(tool: Tool) -> int:
    return ITEM_BYTES + len(tool.name) + len(tool.description) + len(tool.parameters)


def check_origin(resume: Resume, digest: bytes, prompt_tokens: int, name: str) -> None:
    """Check that a stream of the model or adapter ``name`` can be resumed with the weights and prompt of ``digest``
    (AdmittedRequest.digest). Raises Conflict if it began with others, and InvalidRequest for an impossible origin."""
    if resume.origin.digest != digest:
        raise Conflict(
            f"the stream cannot be resumed: the weights of {name!r} here differ from those that it began with, or its"
            " prompt is tokenized differently"
        )
    if resume.origin.cached_tokens >= prompt_tokens:
        text = f"{resume.origin.cached_tokens} of a prompt of {prompt_tokens} tokens; one is always computed"
        raise InvalidRequest.of(FieldViolation("resume.origin.cached_tokens", text))


def check_pool(prompt_tokens: int, field: str, model_tokens: int, pool_tokens: int | None) -> int:
    """Return the max tokens of prompt and answer. Raises InvalidRequest for a prompt that fits into no KV pool with an
    answer's token: it would be preempted forever.

    Args:
        field: the field that holds the prompt.
        model_tokens, pool_tokens: limits by the model, and by the largest pool, None if unknown.
    """
    if pool_tokens is None or pool_tokens >= model_tokens:
        return model_tokens
    if prompt_tokens >= pool_tokens:
        note = f" The model itself takes {model_tokens}, but no KV pool here holds more."
        raise too_long(prompt_tokens, field, pool_tokens, note=note)
    return pool_tokens


def prompt_field(request: GenerateRequest) -> str:
    """Return the field that holds the prompt of a checked request."""
    return "messages" if request.messages else "token_ids" if request.token_ids else "text"


def resolve(
    sampling: SamplingParams,
    prompt_tokens: int,
    eos_token_ids: tuple[int, ...],
    limits: ModelLimits,
    drawn_seed: int,
    recommended: SamplingParams = NO_DEFAULTS,
) -> tuple[SamplingParams, tuple[tuple[str, float], ...]]:
    """Resolve the sampling values that the client left unset (I6), by ``drawn_seed`` and the model's ``recommended``
    values. ``max_tokens`` is limited by the context and the model's own limit, and ``stop_token_ids`` include the
    model's.

    Return the parameters, and by name those of the model's values among them that are not neutral. If answers are to be
    ranked, ``logprobs`` is set even if the client gets none.
    """
    room = limits.max_model_len_tokens - prompt_tokens
    if recommended.max_tokens is not None:
        room = min(room, recommended.max_tokens)
    wanted = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    n = sampling.n or 1
    best_of = sampling.best_of or n
    names = [name for name in SAMPLING_KEYS if name != "max_tokens" and getattr(sampling, name) is None]
    own = {name: value for name in names if (value := getattr(recommended, name)) is not None}
    unset: dict[str, Any] = {name: own.get(name, getattr(NEUTRAL, name)) for name in names}
    top_k = unset.pop("top_k", sampling.top_k)
    if sampling.top_p == 0:
        unset["top_p"], top_k = 1.0, 1
    ends = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_token_ids)
    resolved = replace(
        sampling,
        **unset,
        **GATEWAY_OPTIONS,
        stop_token_ids=tuple(dict.fromkeys(ends)),
        top_k=max(0, top_k or 0),
        seed=drawn_seed if sampling.seed in (None, -1) else sampling.seed,
        max_tokens=wanted,
        # The context may have room for less than the client's min_tokens.
        min_tokens=min(sampling.min_tokens or 0, wanted),
        logprobs=0 if sampling.logprobs is None and best_of > n else sampling.logprobs,
        n=n,
        best_of=best_of,
    )
    return resolved, tuple((name, value) for name, value in own.items() if value != getattr(NEUTRAL, name))


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of answer ``index`` (I6): ``seed`` + ``index``, wrapped to int64."""
    return (seed + index + 2**63) % 2**64 - 2**63


def _violations(request: GenerateRequest, limits: ModelLimits) -> Iterator[FieldViolation]:
    """Yield all violations of a request."""
    yield from _prompt(request, limits)
    yield from _sampling(request.sampling, limits)
    if request.resume is not None:
        yield from _resume(request.resume, request.sampling, limits)
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        yield FieldViolation("priority", f"{request.priority} is not in [{-MAX_PRIORITY}, {MAX_PRIORITY}]")
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        yield FieldViolation("cache_salt", f"longer than {MAX_CACHE_SALT_CHARS} characters")
    elif not _is_text(request.cache_salt):
        yield FieldViolation("cache_salt", "not valid Unicode")


def _prompt(request: GenerateRequest, limits: ModelLimits) -> Iterator[FieldViolation]:
    given = [name for name in ("text", "token_ids", "messages") if getattr(request, name)]
    if not given:
        yield FieldViolation("text", "the prompt is empty")
    if len(given) > 1:
        text = f"exactly one of text, token_ids and messages may be given, not {' and '.join(given)}"
        yield from (FieldViolation(name, text) for name in given)
    if len(request.text) > MAX_PROMPT_CHARS:
        yield too_many_chars("text")
    elif not _is_text(request.text):
        yield FieldViolation("text", "not valid Unicode")
    if request.token_ids:
        yield from _prompt_ids(request, limits)
    if request.messages:
        yield from _messages(request)
    if request.chat != _PLAIN_CHAT:
        yield from _chat(request)
    if request.tools != _NO_TOOLS:
        yield from _tools(request)


def _chat(request: GenerateRequest) -> Iterator[FieldViolation]:
    options = request.chat
    asked = {
        "add_generation_prompt": options.add_generation_prompt is False,
        "continue_final_message": options.continue_final_message,
        "chat_template_kwargs": bool(options.chat_template_kwargs),
    }
    for name in asked if not request.messages else ():
        if asked[name]:
            yield FieldViolation(f"chat.{name}", "only a conversation has it; send messages")
    if options.continue_final_message and options.add_generation_prompt:
        text = "the prompt cannot end within the last message and begin another one, as add_generation_prompt asks"
        yield FieldViolation("chat.continue_final_message", text)
    wrong = _kwargs_error(options.chat_template_kwargs)
    if wrong:
        yield FieldViolation("chat.chat_template_kwargs", wrong)


def _kwargs_error(text: str) -> str:
    """Return what is wrong with a client's chat template variables; "" if they are valid."""
    if not text:
        return ""
    if len(text) > MAX_TEMPLATE_KWARGS_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_KWARGS_BYTES:
        return f"more than {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON"
    try:
        names = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return "not a JSON object"
    reserved = sorted(TEMPLATE_OWN.intersection(names))
    return f"{', '.join(reserved)}: not a variable that a request may set here" if reserved else ""


def _prompt_ids(request: GenerateRequest, limits: ModelLimits) -> Iterator[FieldViolation]:
    limit = limits.max_prompt_tokens
    if request.sampling.truncate_prompt_tokens is not None:
        limit = max(limit, MAX_CUT_TOKENS)
    if len(request.token_ids) > limit:
        yield from too_long(len(request.token_ids), "token_ids", limits.max_model_len_tokens).violations
    else:
        yield from id_violations("token_ids", request.token_ids, limits.vocab_size)


def _messages(request: GenerateRequest) -> Iterator[FieldViolation]:
    if len(request.messages) > MAX_MESSAGES:
        yield FieldViolation("messages", f"more than {MAX_MESSAGES} messages")
        return
    if sum(map(message_chars, request.messages)) > MAX_PROMPT_CHARS:
        yield too_many_chars("messages")
        return
    if sum(items_in(call.arguments) for message in request.messages for call in message.tool_calls) > MAX_CALL_ITEMS:
        text = f"more than {MAX_CALL_ITEMS} brackets, braces and commas in the arguments of calls"
        yield FieldViolation("messages", text)
        return
    for n, message in enumerate(request.messages):
        check_wanted()
        if len(message.role) > MAX_ROLE_CHARS or not _ROLE.fullmatch(message.role):
            text = f"a word of at most {MAX_ROLE_CHARS} letters and digits, such as system, user or assistant"
            yield FieldViolation(f"messages[{n}].role", text)
        if not _is_text(message.content):
            yield FieldViolation(f"messages[{n}].content", "not valid Unicode")
        if message.tool_calls or message.tool_call_id or message.reasoning or message.name or message.role == "tool":
            yield from _rare_fields(message, f"messages[{n}]")


def _rare_fields(message: ChatMessage, field: str) -> Iterator[FieldViolation]:
    """Yield the violations of fields that few messages have. A tool result may refer to a missing call, since clients
    truncate the beginning of a conversation."""
    for name in ("reasoning", "name", "tool_call_id"):
        if not _is_text(getattr(message, name)):
            yield FieldViolation(f"{field}.{name}", "not valid Unicode")
    if message.tool_calls and message.role != "assistant":
        yield FieldViolation(f"{field}.tool_calls", "only a message of role assistant has calls")
    for m, call in enumerate(message.tool_calls):
        path = f"{field}.tool_calls[{m}]"
        if not 0 < len(call.id) <= MAX_TOOL_CALL_ID_CHARS or not _is_text(call.id):
            yield FieldViolation(f"{path}.id", f"a text of 1 to {MAX_TOOL_CALL_ID_CHARS} characters")
        if not _TOOL_NAME.fullmatch(call.name):
            yield FieldViolation(f"{path}.name", _NAME_RULE)
        if call.arguments and not is_object(call.arguments):
            yield FieldViolation(f"{path}.arguments", "not a JSON object")


def _tools(request: GenerateRequest) -> Iterator[FieldViolation]:
    options = request.tools
    names = [tool.name for tool in options.tools]
    if not request.messages:
        yield FieldViolation("tools.tools", "only a conversation has tools; send messages")
    if len(names) > MAX_TOOLS or tools_bytes(options) > MAX_TOOLS_BYTES:
        yield FieldViolation(
            "tools.tools", f"more than {MAX_TOOLS} tools, or more than {MAX_TOOLS_BYTES} bytes of them"
        )
        return
    if sum(items_in(tool.parameters) for tool in options.tools) > MAX_PARSED_ITEMS:
        text = f"more than {MAX_PARSED_ITEMS} brackets, braces and commas in their schemas"
        yield FieldViolation("tools.tools", text)
        return
    for n, tool in enumerate(options.tools):
        check_wanted()
        path = f"tools.tools[{n}]"
        if not _TOOL_NAME.fullmatch(tool.name):
            yield FieldViolation(f"{path}.name", _NAME_RULE)
        elif tool.name in names[:n]:
            yield FieldViolation(f"{path}.name", f"{tool.name!r} is another tool's name too")
        if not _is_text(tool.description):
            yield FieldViolation(f"{path}.description", "not valid Unicode")
        if tool.parameters and not _is_schema(tool.parameters):
            yield FieldViolation(f"{path}.parameters", "not a JSON object")
    if options.choice not in ("", "auto", "none", "required", "named"):
        text = f"{options.choice[:100]!r} is not one of auto, none, required and named"
        yield FieldViolation("tools.choice", text)
    elif options.choice in ("required", "named") and not names:
        yield FieldViolation("tools.choice", f"{options.choice!r} needs tools")
    elif options.choice == "named" and options.name not in names:
        yield FieldViolation("tools.name", f"{options.name[:100]!r} is none of the tools")
    elif options.allowed and options.choice == "named":
        yield FieldViolation("tools.allowed", "a named choice allows one tool already")
    known = frozenset(names)
    for n, name in enumerate(options.allowed[: MAX_TOOLS + 1]):
        if name not in known:
            yield FieldViolation(f"tools.allowed[{n}]", f"{name[:100]!r} is none of the tools")


def _is_schema(text: str) -> bool:
    """Return whether a text is a JSON object in valid Unicode, parsed, since a grammar will parse it too."""
    try:
        return isinstance(parsed(text), dict)
    except (ValueError, RecursionError):
        return False


def _sampling(sampling: SamplingParams, limits: ModelLimits) -> Iterator[FieldViolation]:
    ranged = replace(sampling, top_p=None) if sampling.top_p == 0 else sampling
    yield from range_violations(ranged, limits.vocab_size)
    context = limits.max_model_len_tokens
    max_tokens, min_tokens = sampling.max_tokens, sampling.min_tokens
    # A max_tokens above the remaining context is allowed, so that clients need not count prompt tokens.
    bound = context if max_tokens is None else min(max_tokens, context)
    if bound < 0:
        yield FieldViolation("sampling.max_tokens", f"{max_tokens} is less than 0")
    elif min_tokens is not None and not 0 <= min_tokens <= bound:
        what = "the model's context" if max_tokens is None or max_tokens > context else "max_tokens"
        yield FieldViolation("sampling.min_tokens", f"{min_tokens} is not in [0, {bound}], up to {what}")
    if sampling.n is not None or sampling.best_of is not None or sampling.logprobs is not None:
        yield from _answers(sampling)
    if sampling.stop or sampling.stop_token_ids:
        yield from _stops(sampling, limits)
    if sampling.bad_words:
        yield from _bad_words(sampling)
    if sampling.truncate_prompt_tokens is not None or sampling.truncation_side:
        yield from _truncation(sampling, limits)
    if sampling.structured_outputs is not None:
        yield from structured_violations(sampling.structured_outputs)


def _answers(sampling: SamplingParams) -> Iterator[FieldViolation]:
    for name, count in (("n", sampling.n), ("best_of", sampling.best_of)):
        if count is not None and not 1 <= count <= MAX_ANSWERS:
            yield FieldViolation(f"sampling.{name}", f"{count} is not in [1, {MAX_ANSWERS}]")
    if sampling.best_of is not None and sampling.best_of < (sampling.n or 1):
        yield FieldViolation("sampling.best_of", f"{sampling.best_of} is less than n, which is {sampling.n or 1}")
    reported = max(sampling.n or 1, sampling.best_of or 1) * (1 + (sampling.logprobs or 0))
    if reported > MAX_REPORTED:
        text = f"{reported} log probabilities for each position of all answers; at most {MAX_REPORTED}"
        yield FieldViolation("sampling.logprobs", text)


def structured_violations(structured: StructuredOutputs) -> Iterator[FieldViolation]:
    """Yield the violations of the constraint on an answer's structure that are checked before its grammar is made: the
    number of its fields, and their sizes."""
    given = _structures(structured)
    if len(given) != 1:
        named = ", ".join(given) or "none"
        yield FieldViolation(_STRUCTURE, f"exactly one structure of an answer can be asked for, not {named}")
        return
    name, value = next(iter(given.items()))
    texts = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
    if len(texts) > MAX_CHOICES:
        yield FieldViolation(f"{_STRUCTURE}.{name}", f"{len(texts)} choices; at most {MAX_CHOICES}")
        return
    try:
        size_bytes = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        yield FieldViolation(f"{_STRUCTURE}.{name}", "not valid Unicode")
        return
    if size_bytes > MAX_STRUCTURED_BYTES:
        yield FieldViolation(f"{_STRUCTURE}.{name}", f"{size_bytes} bytes; at most {MAX_STRUCTURED_BYTES}")
    for n, text in enumerate(texts):
        if not text:
            at = f"[{n}]" if name == "choice" else ""
            yield FieldViolation(f"{_STRUCTURE}.{name}{at}", "empty")
            return


def structured_bytes(structured: StructuredOutputs | None) -> int:
    if structured is None:
        return 0
    texts = (structured.json, structured.regex, structured.grammar, structured.structural_tag, *structured.choice)
    return sum(len(text) for text in texts if text)


def _structures(structured: StructuredOutputs) -> dict[str, Any]:
    """Return the fields that are set, by name."""
    values = {field.name: getattr(structured, field.name) for field in fields(structured)}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != ()}


def _resume(resume: Resume, sampling: SamplingParams, limits: ModelLimits) -> Iterator[FieldViolation]:
    if len(resume.origin.digest) != 32:
        yield FieldViolation("resume.origin.digest", f"{len(resume.origin.digest)} bytes; 32 are needed")
    if len(resume.origin.answer_id) > MAX_LABEL_CHARS:
        yield FieldViolation("resume.origin.answer_id", f"longer than {MAX_LABEL_CHARS} characters")
    answers = sampling.n or 1
    if (sampling.best_of or answers) > answers:
        yield FieldViolation("resume", "a stream that ranks its answers (best_of above n) cannot be resumed")
    if len(resume.answers) != answers:
        yield FieldViolation("resume.answers", f"{len(resume.answers)} answers; n is {answers}")
    elif all(answer.finish_reason is not None for answer in resume.answers):
        yield FieldViolation("resume.answers", "every answer has ended; nothing is left to resume")
    limit = limits.max_model_len_tokens
    limit = limit if sampling.max_tokens is None else min(sampling.max_tokens, limit)
    for n, answer in enumerate(resume.answers[:MAX_ANSWERS]):
        field = f"resume.answers[{n}].token_ids"
        if len(answer.token_ids) > limit:
            yield FieldViolation(field, f"{len(answer.token_ids)} tokens; at most {limit}")
        else:
            yield from id_violations(field, answer.token_ids, limits.vocab_size)


def kept_tokens(sampling: SamplingParams, limits: ModelLimits) -> int | None:
    """Return the number of tokens that a request's prompt is truncated to; None if it is not to be truncated."""
    if sampling.truncate_prompt_tokens != -1:
        return sampling.truncate_prompt_tokens
    room = limits.max_model_len_tokens - (sampling.max_tokens or 0)
    return min(room, limits.max_prompt_tokens)


def _truncation(sampling: SamplingParams, limits: ModelLimits) -> Iterator[FieldViolation]:
    kept, field = kept_tokens(sampling, limits), "sampling.truncate_prompt_tokens"
    if kept is not None and kept < 1:
        text = "0 tokens are no prompt"
        if sampling.truncate_prompt_tokens == -1:
            text = f"max_tokens leaves the prompt nothing of the {limits.max_model_len_tokens} tokens of the context"
        yield FieldViolation(field, text)
    if sampling.truncation_side not in ("", "left", "right"):
        yield FieldViolation("sampling.truncation_side", f"{sampling.truncation_side[:100]!r} is not left or right")


def _bad_words(sampling: SamplingParams) -> Iterator[FieldViolation]:
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        yield FieldViolation("sampling.bad_words", f"{len(sampling.bad_words)} texts; at most {MAX_BAD_WORDS}")
    for n, word in enumerate(sampling.bad_words[:MAX_BAD_WORDS]):
        if len(word) > MAX_BAD_WORD_CHARS:
            yield FieldViolation(f"sampling.bad_words[{n}]", f"longer than {MAX_BAD_WORD_CHARS} characters")
    yield from _texts("sampling.bad_words", sampling.bad_words[:MAX_BAD_WORDS])


def _texts(field: str, texts: Sequence[str]) -> Iterator[FieldViolation]:
    for n, text in enumerate(texts):
        if not text:
            yield FieldViolation(f"{field}[{n}]", "empty")
        elif not _is_text(text):
            yield FieldViolation(f"{field}[{n}]", "not valid Unicode")


def _stops(sampling: SamplingParams, limits: ModelLimits) -> Iterator[FieldViolation]:
    if sum(map(len, sampling.stop)) > MAX_STOPS_CHARS:
        yield FieldViolation("sampling.stop", f"longer than {MAX_STOPS_CHARS} characters together")
    yield from _texts("sampling.stop", sampling.stop[:MAX_STOPS_CHARS])
    if sampling.stop and sampling.detokenize is False:
        yield FieldViolation("sampling.stop", "an answer without text (detokenize) ends at no stop string")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        text = f"{len(sampling.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}"
        yield FieldViolation("sampling.stop_token_ids", text)
    else:
        yield from id_violations("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)


def _is_text(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. A text from JSON may contain lone surrogates."""
    with contextlib.suppress(UnicodeEncodeError):
        return text.isascii() or bool(text.encode())
    return False


# Max bytes of requests that wait for threads, over all clients.
MAX_WAITING_BYTES = 64 * MAX_REQUEST_BYTES
# Max strings of a JSON body. A message has four, or seven if its content is a list of one part.
MAX_STRINGS = 8 * MAX_MESSAGES
# Max opening brackets and braces of a JSON body, including those in its texts: 8 MB of brackets take 60 ms to parse.
MAX_BRACKETS = 2**20
# Max fields of a gRPC message.
MAX_FIELDS = 4 * MAX_MESSAGES
# Max size of serialized sampling parameters. Without ids and a structure, stop strings and biases at their limits take
# half of the rest.
MAX_SAMPLING_BYTES = 128 * 2**10 + 4 * MAX_ALLOWED_TOKEN_IDS + MAX_STRUCTURED_BYTES

# Counted fields of a message, by number: the fields of a nested message, or the name of a counter.
_SAMPLING = "sampling"
_Fields = Mapping[int, Any]
_GENERATE: _Fields = {
    3: "token_ids",
    4: {3: {}},
    5: _SAMPLING,
    9: {2: {1: "resume.answers.token_ids"}},
    11: {1: {}},
}
# Continuation bytes of varints, i.e. all but the last byte of each.
_CONTINUATION_BYTES = bytes(range(128, 256))


def holds_too_many_strings(body: bytes) -> bool:
    """Return True if a JSON body certainly has more than MAX_STRINGS strings.

    Every string has two quotes. Quotes after a backslash are not counted. A closing quote after an escaped backslash is
    missed, so a body of strings that end with backslashes may have twice the number.
    """
    limit = 2 * MAX_STRINGS
    return body.count(b'"') > limit and body.count(b'"') - body.count(b'\\"') > limit


def holds_too_many_brackets(body: bytes) -> bool:
    """Return whether a JSON body has more than MAX_BRACKETS opening brackets and braces."""
    return len(body) > MAX_BRACKETS and body.count(b"[") + body.count(b"{") > MAX_BRACKETS


def check_generate_message(raw: bytes) -> None:
    """Check the size and the numbers of fields and ids of a serialized GenerateRequest. A malformed message is checked
    up to its error, and rejected when it is parsed. Raises InvalidRequest."""
    _check(raw, _GENERATE)


def check_warm_message(raw: bytes) -> None:
    """Check a WarmPrefixRequest like :func:`check_generate_message`."""
    _check(raw, {1: _GENERATE})


def check_texts_message(raw: bytes) -> None:
    """Check an EmbedRequest or ScoreRequest like :func:`check_generate_message`."""
    # EmbedRequest has a message per text, with the text or its ids; ScoreRequest has only texts.
    _check(raw, {2: {2: "token_ids"}})


def _check(raw: bytes, fields: _Fields) -> None:
    check_size(len(raw))
    if len(raw) > LOOP_BYTES:
        _count(raw, 0, len(raw), fields, Counter())


def _count(raw: bytes, at: int, end: int, fields: _Fields, counts: Counter[str]) -> None:
    """Add the counts of ``fields`` in the bytes at .. end - 1 of a serialized message to ``counts``. Raises
    InvalidRequest above a limit."""
    while at < end:
        counts["fields"] += 1
        if counts["fields"] > MAX_FIELDS:
            raise InvalidRequest.of(FieldViolation("messages", f"the request holds more than {MAX_FIELDS} fields"))
        tag, at = _varint(raw, at, end)
        # Wire types of protobuf: 0 varint, 1 64 bits, 2 bytes, 5 32 bits; 3 and 4 delimit a group, whose content counts
        # like any field.
        match tag & 7:
            case 2:
                size, at = _varint(raw, at, end)
                stop = min(at + size, end)
                _count_inside(raw, at, stop, fields.get(tag >> 3), counts)
                at = stop
            case 0:
                _, at = _varint(raw, at, end)
            case 1:
                at += 8
            case 5:
                at += 4
            case 6 | 7:
                return


def _count_inside(raw: bytes, at: int, end: int, field: Any, counts: Counter[str]) -> None:
    """Count a field of wire type 2, described by an entry of _Fields or None. Raises InvalidRequest above a limit."""
    if field == _SAMPLING:
        counts[_SAMPLING] += end - at
        if counts[_SAMPLING] > MAX_SAMPLING_BYTES:
            raise InvalidRequest.of(FieldViolation("sampling", f"it is larger than {MAX_SAMPLING_BYTES} bytes"))
    elif isinstance(field, str):
        counts[field] += len(raw[at:end].translate(None, _CONTINUATION_BYTES))
        if counts[field] > MAX_PROMPT_IDS:
            raise InvalidRequest.of(FieldViolation(field, f"more than {MAX_PROMPT_IDS} items"))
    elif field is not None:
        _count(raw, at, end, field, counts)


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the varint at an offset, and the offset after it; (0, end) if it is truncated or too long."""
    value = shift = 0
    while at < end and shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, end
