"""Renders chat templates in the process of :mod:`pillion.gateway.boxed_process`, never in the gateway's: a template is
code from a model's folder. Needs only the standard library and jinja2.

If a template refuses a conversation, or omits one of its texts, the conversation is rewritten (REWRITES). Rewriting is
deterministic and keeps common prefixes, so that the next turn hits the prefix cache.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_MAX_NESTED = 32
_NUMBER = re.compile("[0-9]+")
# Keys whose values templates compare with constants.
_ENUM_KEYS = frozenset(("role", "type"))
# Keys that templates look up; no breaker is inserted into them.
_TEMPLATE_KEYS = _ENUM_KEYS | {
    "content",
    "name",
    "reasoning_content",
    "reasoning",
    "thinking",
    "tool_calls",
    "tool_call_id",
}
_TEMPLATE_KEYS |= {
    "id",
    "function",
    "arguments",
    "description",
    "parameters",
    "properties",
    "required",
    "items",
    "enum",
}
# Filters and methods that remove their arguments from strings.
_REMOVING_FILTERS = frozenset(("replace", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"))
_REMOVING_FILTERS |= {"strip", "lstrip", "rstrip", "trim"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Content of inserted messages; some templates refuse empty ones.
BLANK = " "
_REWRITES_CPU_S = 0.5
# Max messages of a conversation that is always rendered a second time, with marks, to find omitted texts. Some
# templates take quadratic time.
_MARKED_MESSAGES = 64
# Texts of probes, which no template contains and no filter changes.
_PROBE, _ARGUMENT = "zqprobeqz", "zqargumentqz"
_MARK = re.compile("zq[0-9]+qz")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's text for training and has no effect when serving."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own protocol)

    def parse(self, parser: Any) -> Any:
        """Return the body without the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class TemplateRefused(jinja2.TemplateError):
    """The template called ``raise_exception``: it does not support the conversation."""


def environment() -> ImmutableSandboxedEnvironment:
    """Create jinja2's environment with exactly what transformers offers a chat template."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def raise_exception(message: str) -> None:
    """Let a template refuse a conversation."""
    raise TemplateRefused(message)


def strftime_now(format: str) -> str:  # noqa: A002  (the name templates use)
    """Return the local time in a format."""
    return datetime.now().astimezone().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without jinja2's HTML escapes, as models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ClientMarks:
    """Breaks a client's strings where they could become one of a tokenizer's marks.

    A mark is the text of a special token. ``breaker`` is inserted after the first character of each mark in a string,
    and where a string ends or begins with a part of a mark, because a template may concatenate strings, or write its
    own ``<`` before a name. The tokenizer removes breakers after it has found the marks (tokens/client_marks.py), so
    that the client's characters are tokenized like any others.

    Args:
        marks: at least one, each of two characters or more.
        separators: texts that the template removes from strings, which may join the parts of a mark around them.
    """

    def __init__(self, marks: Sequence[str], separators: Iterable[str], breaker: str) -> None:
        self._breaker, self._longest = breaker, max(map(len, marks))
        # Marks that differ only in a number become one, which matches any number.
        unnumbered = {_NUMBER.sub("0", mark) for mark in marks}
        self._all_marks = "\0".join(sorted(unnumbered))
        # An expression for more marks takes long to compile: then only their first two letters are matched.
        letters = 2 if len(unnumbered) > 1024 else None
        forwards, backwards = (_trie(one[::step][:letters] for one in unnumbered) for step in (1, -1))
        self._whole = re.compile(_trie_regex(forwards))
        ends = "|".join((*map(re.escape, separators), r"\s*\Z"))
        self._mark_starts = _first_letters(
            forwards, lambda below: f"{_trie_regex(below)}|{_prefix_regex(below, _MAX_NESTED)}(?:{ends})"
        )
        self._mark_ends = _first_letters(backwards, lambda below: rf"{_prefix_regex(below, _MAX_NESTED)}\Z")

    def within(self, text: str) -> list[str]:
        """Return the whole marks in a text, in order."""
        return self._whole.findall(text)

    def broken(self, value: Any, changes: list[bool], key: str = "") -> Any:
        """Return a JSON value with broken strings and keys. ``changes`` gets an entry per changed string: True if it
        had a whole mark. ``key``: the value's key, by which templates' constants are recognized."""
        if isinstance(value, str):
            return self._broken(value, changes, is_name=key in _ENUM_KEYS)
        if isinstance(value, list):
            return [self.broken(one, changes, key) for one in value]
        if isinstance(value, dict):
            return {
                name if name in _TEMPLATE_KEYS else self._broken(name, changes): self.broken(one, changes, name)
                for name, one in value.items()
            }
        return value

    def _broken(self, text: str, changes: list[bool], *, is_name: bool = False) -> str:
        """Break one string. ``is_name``: templates compare it with constants."""
        plain = text.replace(self._breaker, "\N{REPLACEMENT CHARACTER}")
        broken = self._mark_starts.sub(lambda place: place[0] + self._breaker, plain)
        inner = plain.strip()
        is_part = not is_name and 0 < len(inner) < self._longest and _NUMBER.sub("0", inner) in self._all_marks
        if is_part or self._mark_ends.search(inner[: self._longest][::-1]):
            begin = len(plain) - len(plain.lstrip())
            broken = broken[:begin] + self._breaker + broken[begin:]
        if is_part:
            broken = broken.rstrip() + self._breaker + broken[len(broken.rstrip()) :]
        if broken != text:
            changes.append(plain != text or self._whole.search(plain) is not None)
        return broken


def _trie(words: Iterable[str]) -> dict[str, Any]:
    """Return a trie of ``words``: nested dicts by letter, with the key "" at the end of a word."""
    root: dict[str, Any] = {}
    for word in sorted(words):
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return root


def _letter_regex(letter: str) -> str:
    """Return an expression for a letter of a mark; 0 stands for any number."""
    return "[0-9]+" if letter == "0" else re.escape(letter)


def _trie_regex(node: dict[str, Any]) -> str:
    """Return an expression for the longest matching word of a trie."""
    alternatives = []
    for letter, below in node.items():
        text = _letter_regex(letter)
        # Chains of letters are not nested, as expressions have a limit.
        while letter and len(below) == 1 and "" not in below:
            ((letter, below),) = below.items()
            text += _letter_regex(letter)
        if letter:
            alternatives.append(text + _trie_regex(below))
    return f"(?:{'|'.join(alternatives)}){'?' * ('' in node)}" if alternatives else ""


def _prefix_regex(node: dict[str, Any], depth: int) -> str:
    """Return an expression for the prefixes of a trie's words, the empty one included. After ``depth`` letters, any
    text matches."""
    if not depth:
        return r"[\s\S]*"
    below = (_letter_regex(letter) + _prefix_regex(below, depth - 1) for letter, below in node.items() if letter)
    inner = "|".join(below)
    return f"(?:{inner})?" if inner else ""


def _first_letters(trie: dict[str, Any], followed_by: Callable[[dict[str, Any]], str]) -> re.Pattern[str]:
    """Return an expression for the first letters of a trie's words, each with a look-ahead: ``followed_by`` returns its
    expression for the trie below a letter."""
    return re.compile("|".join(f"{_letter_regex(letter)}(?={followed_by(below)})" for letter, below in trie.items()))


def separators(tree: jinja2.nodes.Template) -> tuple[str, ...]:
    """Return the texts that a template removes from strings, i.e. constant arguments of ``replace``, ``strip`` etc."""
    methods: list[Any] = [
        one for one in tree.find_all(jinja2.nodes.Call) if getattr(one.node, "attr", "") in _REMOVING_FILTERS
    ]
    filters = [one for one in tree.find_all(jinja2.nodes.Filter) if one.name in _REMOVING_FILTERS]
    texts = (one.value for call in (*methods, *filters) for one in call.args if isinstance(one, jinja2.nodes.Const))
    return tuple(dict.fromkeys(text for text in texts if isinstance(text, str) and text))


class History(NamedTuple):
    """A conversation's messages and tools, in the form that templates get. Rewrites return new ones and never
    mutate."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def short_ids(history: History) -> History:
    """Replace ids of calls that are not nine letters and digits, equally in calls and results (Mistral)."""

    def short(id_: str) -> str:
        digest = hashlib.sha256(id_.encode()).hexdigest()
        return id_ if _SHORT_ID.fullmatch(id_) else digest[:9]

    def rewritten(message: dict[str, Any]) -> dict[str, Any]:
        if message.get("tool_calls"):
            message = {**message, "tool_calls": [{**one, "id": short(one["id"])} for one in message["tool_calls"]]}
        if message["role"] == "tool":
            message = {**message, "tool_call_id": short(message.get("tool_call_id", ""))}
        return message

    return history._replace(messages=[rewritten(one) for one in history.messages])


def null_contents(history: History) -> History:
    """Replace the empty content of messages with calls by null (DeepSeek V3)."""
    return history._replace(
        messages=[
            {**one, "content": None} if one.get("tool_calls") and one["content"] == "" else one
            for one in history.messages
        ]
    )


def described_tools(history: History) -> History:
    """Add empty descriptions to tools that lack one (gpt-oss, Hermes 3)."""
    return _completed(history, "description", "")


def tools_with_parameters(history: History) -> History:
    """Add schemas without properties to tools that lack one (Hermes 3)."""
    history = _completed(history, "parameters", {})
    schema = {"type": "object", "properties": {}}
    tools = [
        {**tool, "function": {**tool["function"], "parameters": _with(tool["function"]["parameters"], schema)}}
        for tool in history.tools or ()
    ]
    return history._replace(tools=tools or history.tools)


def _completed(history: History, name: str, value: Any) -> History:
    tools = [{**tool, "function": _with(tool["function"], {name: value})} for tool in history.tools or ()]
    return history._replace(tools=tools or history.tools)


def _with(values: dict[str, Any], missing: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with ``missing`` ones appended at the end: a template may render them in order."""
    return values | {name: value for name, value in missing.items() if name not in values}


def empty_tools(history: History) -> History:
    """Replace missing tools by an empty list (Hermes 3)."""
    return history._replace(tools=history.tools or [])


def developers_as_system(history: History) -> History:
    """Rename OpenAI's role "developer" to its earlier name, "system"."""
    return history._replace(
        messages=[{**one, "role": "system"} if one["role"] == "developer" else one for one in history.messages]
    )


def contents_as_thoughts(history: History) -> History:
    """Append the content of messages with reasoning and calls to the reasoning (gpt-oss)."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        key = next((key for key in REASONING_KEYS if message.get(key)), "")
        if not (key and message.get("tool_calls") and message["content"]):
            return message
        return {**message, key: f"{message[key]}\n\n{message['content']}", "content": ""}

    return history._replace(messages=[changed(one) for one in history.messages])


def contents_before_calls(history: History) -> History:
    """Split messages with content and calls into two, the content first (Llama 3)."""
    messages: list[dict[str, Any]] = []
    for message in history.messages:
        if message.get("tool_calls") and message["content"]:
            messages.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": ""}
        messages.append(message)
    return history._replace(messages=messages)


def single_calls(history: History) -> History:
    """Split messages with several calls into messages of one call, each before its own result (Llama 3, gpt-oss)."""
    messages: list[dict[str, Any]] = []
    called: list[dict[str, Any]] = []
    results: dict[str, list[dict[str, Any]]] = {}

    def flush() -> None:
        for message in called:
            messages.append(message)
            messages.extend(results.pop(message["tool_calls"][0]["id"], ()))
        for others in results.values():
            messages.extend(others)
        called.clear()
        results.clear()

    for message in history.messages:
        if message["role"] == "tool":
            results.setdefault(message.get("tool_call_id", ""), []).append(message)
            continue
        flush()
        calls = message.get("tool_calls") or ()
        if not calls:
            messages.append(message)
        for number, call in enumerate(calls):
            first = {"role": message["role"], "content": ""} if number else message
            called.append({**first, "tool_calls": [call]})
    flush()
    return history._replace(messages=messages)


def plain_turns(history: History) -> History:
    """Join the system messages at the beginning, and consecutive messages of the user. Later system messages, which
    agents use as reminders, become the user's."""
    messages: list[dict[str, Any]] = []
    for message in history.messages:
        is_late = message["role"] == "system" and messages and messages[-1]["role"] != "system"
        messages.append({**message, "role": "user"} if is_late else message)
    return history._replace(messages=_joined(messages, "system", "user"))


def lone_results_as_user(history: History) -> History:
    """Make results without a call the user's, since clients truncate conversations (MiniMax M2)."""
    messages: list[dict[str, Any]] = []
    called = False
    for message in history.messages:
        called = bool(message.get("tool_calls")) or (called and message["role"] == "tool")
        if message["role"] == "tool" and not called:
            message = {"role": "user", "content": message["content"]}
        messages.append(message)
    return history._replace(messages=messages)


def blank_contents(history: History) -> History:
    """Replace the empty content of messages without calls by a space (Ministral 3)."""
    return history._replace(
        messages=[
            {**one, "content": BLANK} if one["content"] == "" and not one.get("tool_calls") else one
            for one in history.messages
        ]
    )


def system_as_user(history: History) -> History:
    """Make the system messages at the beginning the user's, and join them with the next one (Gemma 2)."""
    messages = list(history.messages)
    for number, message in enumerate(messages):
        if message["role"] != "system":
            break
        messages[number] = {**message, "role": "user"}
    return history._replace(messages=_joined(messages, "user"))


def joined_answers(history: History) -> History:
    """Join consecutive messages of the assistant without calls."""
    return history._replace(messages=_joined(history.messages, "assistant"))


def user_before_assistant(history: History) -> History:
    """Insert blank user messages before answers that follow no message of the user or of a tool."""
    return _bridged(history, "user", lambda role, before: role == "assistant" and before in ("", "system", role))


def assistant_before_user(history: History) -> History:
    """Insert blank answers before user messages that follow a result or a call (Mistral)."""
    return _bridged(history, "assistant", lambda role, before: role == "user" and before in ("tool", "call"))


def spelled_calls(history: History, spelling: Sequence[str]) -> History:
    """Move calls into the content, as text in the notation ``spelling``, see
    :func:`pillion.gateway.formats.tool_formats.spelling` (LFM2, Granite 3.3)."""
    begin, end, kind = spelling

    def spelled(function: dict[str, Any]) -> str:
        if kind == "literal":
            return f"{function['name']}({', '.join(f'{k}={_literal(v)}' for k, v in function['arguments'].items())})"
        return tojson({"name": function["name"], "arguments": function["arguments"]})

    def rewritten(message: dict[str, Any]) -> dict[str, Any]:
        if not message.get("tool_calls"):
            return message
        calls = [spelled(call["function"]) for call in message["tool_calls"]]
        texts = (
            [f"{begin}\n{call}\n{end}" for call in calls] if kind == "object" else [f"{begin}[{', '.join(calls)}]{end}"]
        )
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**plain, "content": "\n".join(filter(None, (message["content"], *texts)))}

    return history._replace(messages=[rewritten(one) for one in history.messages])


def _literal(value: Any) -> str:
    """Convert a JSON value to Python's notation."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{tojson(key)}: {_literal(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value) if value is None or isinstance(value, bool) else tojson(value)


def _bridged(history: History, inserted: str, needed: Callable[[str, str], bool]) -> History:
    """Insert blank messages of role ``inserted`` before each message for which ``needed(role, before)`` is true:
    ``before`` is the preceding role, "call" for a message with calls, "" for none."""
    messages: list[dict[str, Any]] = []
    before = ""
    for message in history.messages:
        if needed(message["role"], before):
            messages.append({"role": inserted, "content": BLANK})
        messages.append(message)
        before = "call" if message.get("tool_calls") else message["role"]
    return history._replace(messages=messages)


def _joined(messages: list[dict[str, Any]], *roles: str) -> list[dict[str, Any]]:
    """Join consecutive messages of these roles, except those with calls."""
    groups: list[list[dict[str, Any]]] = []
    for message in messages:
        last = groups[-1][-1] if groups else {}
        joins = message["role"] in roles and message["role"] == last.get("role")
        if joins and not message.get("tool_calls") and not last.get("tool_calls"):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_merged(group) if len(group) > 1 else group[0] for group in groups]


def _merged(group: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one message with the contents and the reasoning of all of a group."""
    texts = {key: "\n\n".join(one[key] for one in group if one.get(key)) for key in ("content", *REASONING_KEYS)}
    return {**group[0], "content": "", **{key: text for key, text in texts.items() if text}}


Rewrites = tuple[Callable[[History], History], ...]
# From least to most intrusive.
REWRITES: Rewrites = (
    short_ids,
    empty_tools,
    described_tools,
    tools_with_parameters,
    developers_as_system,
    lone_results_as_user,
    contents_before_calls,
    single_calls,
    plain_turns,
    blank_contents,
    system_as_user,
    joined_answers,
    user_before_assistant,
    assistant_before_user,
)


class TemplateRenderer:
    """Renderer of conversations by one template; ``setup`` is that of :func:`opened`."""

    def __init__(self, setup: dict[str, Any]) -> None:
        env = environment()
        self._template = env.from_string(setup["template"])
        self._defaults = json.loads(setup["defaults"] or "{}")
        self._variables, self._max_chars = setup["variables"], setup["max_chars"]
        self._marks = None
        if setup["marks"]:
            self._marks = ClientMarks(setup["marks"], separators(env.parse(setup["template"])), setup["breaker"])
        self._list_roles: frozenset[str] = frozenset()
        self._json_arguments = False
        spelled = partial(spelled_calls, spelling=setup["spelling"])
        self._chains: tuple[Rewrites, ...] = (
            (contents_as_thoughts, *REWRITES),
            REWRITES,
            (null_contents, *REWRITES),
            (*REWRITES, spelled),
        )
        self._find_forms()

    def _find_forms(self) -> None:
        """Determine by rendering probes in both forms which roles' contents have to be lists of parts, and whether
        arguments of calls have to be JSON text. A template may omit what has the wrong form."""
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": "x", "arguments": {_ARGUMENT: _ARGUMENT}}}
        user, system, answer, result = (
            {"role": role, "content": "x"} for role in ("user", "system", "assistant", "tool")
        )
        result |= {"tool_call_id": "abcdefgh1", "name": "x"}
        tool_turns: list[list[dict[str, Any]]] = [
            [user, {**answer, "content": content, "tool_calls": [call]}, result] for content in ("", None)
        ]
        probes = {"user": [[user]], "system": [[system, user]], "assistant": [[user, answer, user]], "tool": tool_turns}
        for role, attempts in probes.items():
            marked = [
                [{**one, "content": _PROBE} if one["role"] == role else one for one in messages]
                for messages in attempts
            ]
            if not any(_PROBE in text for text in self._render_probes(marked)):
                self._list_roles |= {role}
                if not any(_PROBE in text for text in self._render_probes(marked)):
                    self._list_roles -= {role}
        # The repr of a dict is not JSON.
        if not any(_ARGUMENT in text and f"{{'{_ARGUMENT}" not in text for text in self._render_probes(tool_turns)):
            self._json_arguments = True
            self._json_arguments = any(f'{{"{_ARGUMENT}": ' in text for text in self._render_probes(tool_turns))

    def _render_probes(self, attempts: Iterable[list[dict[str, Any]]]) -> Iterator[str]:
        """Yield the renderings of conversations, each without and with a tool; "" for a failure."""
        job = {"kwargs": {}, "add_generation_prompt": True}
        tools = [{"type": "function", "function": {"name": "x", "description": "", "parameters": {}}}]
        for messages, offered in itertools.product(attempts, (None, tools)):
            yield self._rendered_history(job, History(messages, offered)).get("text", "")

    def answer(self, job: dict[str, Any]) -> dict[str, str]:
        """Return {"text": ...}, or {"refused": ...} in the template's own words, or {"broken": ...}.

        Marks in a client's strings are broken. If the strings only have parts of marks, which other text might
        complete, the unbroken rendering is returned, unless a mark came about.
        """
        job["kwargs"] = json.loads(job["kwargs"] or "{}")
        if self._marks is None:
            return self._rendered(job)[0]
        changes: list[bool] = []
        kwargs = {name: self._marks.broken(one, changes, "role") for name, one in job["kwargs"].items()}
        texts = {name: self._marks.broken(job[name], changes) for name in ("messages", "tools")}
        broken = {**job, **texts, "kwargs": kwargs}
        if not changes:
            return self._rendered(job)[0]
        safe, rewrites = self._rendered(broken)
        if any(changes) or "text" not in safe:
            return safe
        plain, _ = self._rendered(job, rewrites)
        return (
            plain if "text" in plain and self._marks.within(plain["text"]) == self._marks.within(safe["text"]) else safe
        )

    def _rendered(self, job: dict[str, Any], rewrites: Rewrites | None = None) -> tuple[dict[str, str], Rewrites]:
        """Render a conversation, up to the end of the last message if the answer continues that. Return the result and
        the rewrites applied: ``rewrites``, or if None the ones needed.

        The message's end is found as in transformers: by a mark after it, whose trailing space a template may trim.
        """
        messages, final = job["messages"], job["messages"][-1]["content"].strip()
        if job["continue_final_message"]:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + END_MARK}]
        history = History(messages, job["tools"])
        if rewrites is None:
            answer, rewrites = self._render_with_rewrites(job, history)
        else:
            answer = self._rendered_history(job, rewritten(history, rewrites))
        if "text" not in answer or not job["continue_final_message"]:
            return answer, rewrites
        text, mark, rest = answer["text"].rpartition(END_MARK.strip())
        if not mark or final not in text:
            return {"refused": "it leaves out the last message, which continue_final_message would continue"}, rewrites
        return {"text": text if rest.startswith(END_MARK[-1]) else text.rstrip()}, rewrites

    def _render_with_rewrites(self, job: dict[str, Any], history: History) -> tuple[dict[str, str], Rewrites]:
        """Render a conversation unchanged or, if the template refuses it or omits a text, with the first chain of
        rewrites that helps, minus unnecessary ones. If none helps, return the result without rewrites. Also return the
        rewrites."""
        deadline = time.process_time() + _REWRITES_CPU_S
        marked, texts = _marked(history)
        tried: list[History] = []

        def attempt(rewrites: Rewrites, rewritten_history: History) -> tuple[dict[str, str], bool]:
            if rewritten_history in tried or (tried and time.process_time() > deadline):
                return {}, False
            tried.append(rewritten_history)
            answer = self._rendered_history(job, rewritten_history)
            if "text" not in answer:
                return answer, False
            if len(history.messages) > _MARKED_MESSAGES and has_all_texts(rewritten_history, answer["text"]):
                return answer, True
            missing = self._missing(job, rewritten(marked, rewrites), texts, answer["text"])
            return ({"refused": f"it leaves out {missing}"}, False) if missing else (answer, True)

        first, _ = answer, complete = attempt((), history)
        if complete:
            return answer, ()
        for rewrites, rewritten_history in _steps(self._chains, history):
            answer, complete = attempt(rewrites, rewritten_history)
            if complete:
                break
        else:
            return first, ()
        for one in reversed(rewrites):
            fewer = tuple(other for other in rewrites if other is not one)
            candidate = rewritten(history, fewer)
            if candidate == rewritten_history:
                rewrites = fewer
                continue
            candidate_answer, complete = attempt(fewer, candidate)
            if complete:
                answer, rewrites, rewritten_history = candidate_answer, fewer, candidate
        return answer, rewrites

    def _missing(self, job: dict[str, Any], marked: History, texts: dict[str, tuple[str, str]], text: str) -> str:
        """Describe the first text that the rendering ``text`` omits, "" if none.

        The conversation is rendered once more with marks after its ``texts``, which are by mark. If the template
        refuses that, the texts themselves are searched."""
        answer = self._rendered_history(job, marked)
        rendered_marks = set(_MARK.findall(answer.get("text", "")))
        for mark, (what, words) in texts.items():
            if mark not in rendered_marks and ("text" in answer or words not in text):
                return f"{what} {words[:60]!r}"
        return ""

    def _rendered_history(self, job: dict[str, Any], history: History) -> dict[str, str]:
        """Render a history as it is, see :func:`render`."""
        variables = {
            **self._defaults,
            **job["kwargs"],
            **self._variables,
            "add_generation_prompt": job["add_generation_prompt"],
            "tools": history.tools,
            "messages": [self._shaped(one) for one in history.messages],
        }
        return render(self._template, variables, self._max_chars)

    def _shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with content and arguments in the forms that the template needs."""
        if message["role"] in self._list_roles and message["content"] is not None:
            parts = [{"type": "text", "text": message["content"]}] if message["content"] else []
            message = {**message, "content": parts}
        if self._json_arguments and message.get("tool_calls"):
            message = {**message, "tool_calls": [_spelled(call) for call in message["tool_calls"]]}
        return message


def rewritten(history: History, rewrites: Rewrites) -> History:
    """Apply the rewrites in order."""
    for rewrite in rewrites:
        history = rewrite(history)
    return history


def has_all_texts(history: History, text: str) -> bool:
    """Return whether a rendering has all contents of a history in order, and each name of a tool as often as the
    history. May be wrongly False if the template changes texts."""
    end = 0
    for message in history.messages:
        content = (message["content"] or "").strip().removesuffix(END_MARK.strip())
        begin = text.find(content, end)
        if begin < 0:
            return False
        end = begin + len(content)
    names = Counter(
        call["function"]["name"] for message in history.messages for call in message.get("tool_calls") or ()
    )
    names.update(tool["function"]["name"] for tool in history.tools or ())
    return all(text.count(name) >= number for name, number in names.items())


def _steps(chains: Iterable[Rewrites], history: History) -> Iterator[tuple[Rewrites, History]]:
    """Yield the prefixes of each chain, with the history after them."""
    for chain in chains:
        after = history
        for size, rewrite in enumerate(chain, 1):
            after = rewrite(after)
            yield chain[:size], after


def _marked(history: History) -> tuple[History, dict[str, tuple[str, str]]]:
    """Return a conversation with a mark of letters and digits after each content and each name of a call or tool; and
    per mark, a description of the text before it and the text."""
    marked: list[dict[str, Any]] = []
    texts: dict[str, tuple[str, str]] = {}

    def mark(what: str, text: str) -> str:
        mark_text = f"zq{len(texts)}qz"
        texts[mark_text] = (what, text.strip())
        end = len(text.rstrip())
        return text[:end] + mark_text + text[end:]

    for message in history.messages:
        calls = message.get("tool_calls") or ()
        if message["content"].strip() and not message["content"].endswith(END_MARK):
            message = {**message, "content": mark(f"a text of role {message['role']},", message["content"])}
        if calls:
            named = [{**call["function"], "name": mark("a call of", call["function"]["name"])} for call in calls]
            pairs = zip(calls, named, strict=True)
            message = {**message, "tool_calls": [{**call, "function": function} for call, function in pairs]}
        marked.append(message)
    tools = [
        {**tool, "function": {**tool["function"], "name": mark("the tool", tool["function"]["name"])}}
        for tool in history.tools or ()
    ]
    return History(marked, tools or history.tools), texts


def _spelled(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": tojson(function["arguments"])}}


def render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> dict[str, str]:
    """Render a template. Return {"text": ...}, or {"refused": ...} in the template's own words, or {"broken": ...}."""
    pieces, total = [], 0
    try:
        for piece in template.generate(variables):
            total += len(piece)
            if total > max_chars:
                raise MemoryError(f"it wrote more than {max_chars} characters")
            pieces.append(piece)
    except TemplateRefused as error:
        return {"refused": str(error)[:1000]}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever a template does wrong)
        return {"broken": f"{type(error).__name__}: {error}"[:1000]}
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"broken": "its output is not valid Unicode"}
    return {"text": text}


def opened(setup: dict[str, Any]) -> Callable[[Any], dict[str, str]]:
    """Return the function that renders conversations by the template of ``setup``, compiled at the first call."""
    made: list[TemplateRenderer] = []

    def handle(conversation: Any) -> dict[str, str]:
        if not made:
            made.append(TemplateRenderer(setup))
        return made[0].answer(conversation)

    return handle
