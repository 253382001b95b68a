"""Renders chat templates in the process of :mod:`pillion.gateway.boxed_process`, never in the gateway's: a template is
code out of a model's folder. This program needs the standard library and jinja2 only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

# While a message is rendered that the answer continues, this text follows it.
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# Where a string ends with the beginning of a mark, at most so many letters of it are looked at.
_MOST_NESTED = 32
# An expression for more marks than these takes long to be made: where a tokenizer has more, whatever begins with the
# first letters of one is taken for it.
_MOST_MARKS, _SHORT_LETTERS = 1024, 2
_NUMBER = re.compile("[0-9]+")
# Templates compare what stands under these keys with words of their own,
_COMPARED = frozenset(("role", "type"))
# and look what they are told up by these keys, and by those of JSON schemas.
_LOOKED_UP = _COMPARED | {"content", "name", "reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id"}
_LOOKED_UP |= {"id", "function", "arguments", "description", "parameters", "properties", "required", "items", "enum"}
# These methods and filters take what they are given out of a text.
_CUTTING = frozenset(("replace", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"))
_CUTTING |= {"strip", "lstrip", "rstrip", "trim"}


class GenerationTag(jinja2.ext.Extension):
    """Makes ``{% generation %}``, which marks the assistant's words for training, plain text when serving."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own protocol)

    def parse(self, parser: Any) -> Any:
        """Returns the body, as if the tag were not there."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class TemplateRefused(jinja2.TemplateError):
    """Says that the template itself called ``raise_exception``, because it does not know such a conversation."""


def environment() -> ImmutableSandboxedEnvironment:
    """Makes jinja2's environment with what transformers gives a chat template, and nothing more."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def raise_exception(message: str) -> None:
    """Lets a template refuse a conversation."""
    raise TemplateRefused(message)


def strftime_now(format: str) -> str:  # noqa: A002  (the name templates use)
    """Returns the local time in a format, for templates that ask for it."""
    return datetime.now().astimezone().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without jinja2's HTML escapes, as models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ClientMarks:
    """Breaks what could become one of a tokenizer's marks in the strings that a client sent.

    A mark is the text of a special token. ``breaker`` is put behind the first character of each mark that a string
    holds, and where a string ends or begins with a part of one, because a template may write two strings side by side,
    or its own ``<`` before a name. The tokenizer takes the breaker out again when it has looked for marks
    (tokens/client_marks.py), so that the client's characters are read as any others.

    Args:
        marks: texts of two characters or more.
        separators: what the template cuts out of strings; a part of a mark before one may come to stand before the
            rest of it.
    """

    def __init__(self, marks: Sequence[str], separators: Iterable[str], breaker: str) -> None:
        self._breaker, self._longest = breaker, max(map(len, marks))
        # Numbered marks differ in their numbers only, and any number will do.
        alike = {_NUMBER.sub("0", mark) for mark in marks}
        self._all = "\0".join(sorted(alike))
        letters = _SHORT_LETTERS if len(alike) > _MOST_MARKS else None
        forwards, backwards = (_trie(one[::step][:letters] for one in alike) for step in (1, -1))
        self._whole = re.compile(_trie_regex(forwards))
        ends = "|".join((*map(re.escape, separators), r"\s*\Z"))
        self._weak = _firsts(
            forwards, lambda below: f"{_trie_regex(below)}|{_begun_regex(below, _MOST_NESTED)}(?:{ends})"
        )
        self._backwards = _firsts(backwards, lambda below: rf"{_begun_regex(below, _MOST_NESTED)}\Z")

    def within(self, text: str) -> list[str]:
        """Returns the marks in a text, in their order."""
        return self._whole.findall(text)

    def broken(self, value: Any, told: list[bool], key: str = "") -> Any:
        """Returns a JSON value with broken strings and keys. ``told`` gets an entry for each string that was changed:
        whether it held a whole mark. ``key`` is the one that the value stands under."""
        if isinstance(value, str):
            return self._broken(value, told, names=key in _COMPARED)
        if isinstance(value, list):
            return [self.broken(one, told, key) for one in value]
        if isinstance(value, dict):
            return {
                name if name in _LOOKED_UP else self._broken(name, told): self.broken(one, told, name)
                for name, one in value.items()
            }
        return value

    def _broken(self, text: str, told: list[bool], *, names: bool = False) -> str:
        """Breaks one string. ``names`` says that templates compare the string with words of their own."""
        plain = text.replace(self._breaker, "\N{REPLACEMENT CHARACTER}")
        found = self._weak.sub(lambda place: place[0] + self._breaker, plain)
        inner = plain.strip()
        is_part = not names and 0 < len(inner) < self._longest and _NUMBER.sub("0", inner) in self._all
        if is_part or self._backwards.search(inner[: self._longest][::-1]):
            begin = len(plain) - len(plain.lstrip())
            found = found[:begin] + self._breaker + found[begin:]
        if is_part:
            found = found.rstrip() + self._breaker + found[len(found.rstrip()) :]
        if found != text:
            told.append(plain != text or self._whole.search(plain) is not None)
        return found


def _trie(words: Iterable[str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for word in sorted(words):
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return root


def _letter_regex(letter: str) -> str:
    return "[0-9]+" if letter == "0" else re.escape(letter)


def _trie_regex(node: dict[str, Any]) -> str:
    """Returns an expression for the longest of the words of a trie that a text goes on with."""
    found = []
    for letter, below in node.items():
        text = _letter_regex(letter)
        # A chain of letters is written as one, because expressions must not be nested deeply.
        while letter and len(below) == 1 and "" not in below:
            ((letter, below),) = below.items()
            text += _letter_regex(letter)
        if letter:
            found.append(text + _trie_regex(below))
    return f"(?:{'|'.join(found)}){'?' * ('' in node)}" if found else ""


def _begun_regex(node: dict[str, Any], depth: int) -> str:
    """Returns an expression for the beginnings of the words of a trie, the empty one among them; what has ``depth``
    letters counts as any word that begins with them."""
    if not depth:
        return r"[\s\S]*"
    below = (_letter_regex(letter) + _begun_regex(below, depth - 1) for letter, below in node.items() if letter)
    inner = "|".join(below)
    return f"(?:{inner})?" if inner else ""


def _firsts(trie: dict[str, Any], behind: Callable[[dict[str, Any]], str]) -> re.Pattern[str]:
    """Returns an expression for the first letters of a trie's words, each before what ``behind`` makes of the words
    that begin with it."""
    return re.compile("|".join(f"{_letter_regex(letter)}(?={behind(below)})" for letter, below in trie.items()))


class ContentForm:
    """Knows what a template does with the contents of messages, as far as its syntax tree shows it.

    ``lists`` says that it loops over the parts of a content, and asks nowhere whether a content is a string. Such a
    template would lose a string: each letter of it would be a part without a text. ``separators`` are the texts that
    it takes out of strings, by ``replace`` and the like.
    """

    def __init__(self, tree: jinja2.nodes.Template) -> None:
        contents = {"content", *_named_contents(tree)}
        loops = any(_is_content(loop.iter, contents) for loop in tree.find_all(jinja2.nodes.For))
        tests = any(
            test.name == "string" and _is_content(test.node, contents) for test in tree.find_all(jinja2.nodes.Test)
        )
        self.lists = loops and not tests
        methods: list[Any] = [
            one for one in tree.find_all(jinja2.nodes.Call) if getattr(one.node, "attr", "") in _CUTTING
        ]
        filters = [one for one in tree.find_all(jinja2.nodes.Filter) if one.name in _CUTTING]
        texts = (one.value for call in (*methods, *filters) for one in call.args if isinstance(one, jinja2.nodes.Const))
        self.separators = tuple(dict.fromkeys(text for text in texts if isinstance(text, str) and text))

    def shaped(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages with contents in the form that the template reads."""
        if not self.lists:
            return messages
        return [
            {**one, "content": [{"type": "text", "text": one["content"]}] if one["content"] else []} for one in messages
        ]


def _named_contents(tree: jinja2.nodes.Template) -> Iterator[str]:
    """Yields the names of variables that a template sets to the content of a message, and of macros' parameters that
    it passes one to."""
    for assigned in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assigned.target, jinja2.nodes.Name) and _is_content(assigned.node, {"content"}):
            yield assigned.target.name
    macros = {macro.name: macro for macro in tree.find_all(jinja2.nodes.Macro)}
    for call in tree.find_all(jinja2.nodes.Call):
        macro = macros.get(getattr(call.node, "name", ""))
        if macro is not None:
            for parameter, given in zip(macro.args, call.args, strict=False):
                if _is_content(given, {"content"}):
                    yield parameter.name


def _is_content(node: jinja2.nodes.Node | None, names: set[str]) -> bool:
    """Returns whether an expression is the content of a message, or a variable of these names, perhaps filtered or
    sliced."""
    if isinstance(node, jinja2.nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, jinja2.nodes.Name):
        return node.name in names
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return False


class TemplateRenderer:
    """Renders conversations by one template, with the ``setup`` that :func:`opened` is given."""

    def __init__(self, setup: dict[str, Any]) -> None:
        env = environment()
        self._template = env.from_string(setup["template"])
        self._form = ContentForm(env.parse(setup["template"]))
        self._defaults = json.loads(setup["defaults"] or "{}")
        self._variables, self._max_chars = setup["variables"], setup["max_chars"]
        self._marks = None
        if setup["marks"]:
            self._marks = ClientMarks(setup["marks"], self._form.separators, setup["breaker"])

    def answer(self, conversation: dict[str, Any]) -> dict[str, str]:
        """Returns {"text": ...}, or {"refused": ...} in the template's own words, or {"broken": ...}.

        Where a client's strings hold marks, the text has them broken. Where they hold what could become one beside
        something else, the text is the plain one if no mark has come of it.
        """
        conversation["kwargs"] = json.loads(conversation["kwargs"] or "{}")
        if self._marks is None:
            return self._rendered(conversation)
        told: list[bool] = []
        # The names of a template's variables are not written anywhere.
        kwargs = {name: self._marks.broken(one, told, "role") for name, one in conversation["kwargs"].items()}
        texts = {name: self._marks.broken(conversation[name], told) for name in ("messages", "tools", "introduction")}
        broken = {**conversation, **texts, "kwargs": kwargs}
        if not told:
            return self._rendered(conversation)
        safe = self._rendered(broken)
        if any(told) or "text" not in safe:
            return safe
        plain = self._rendered(conversation)
        return (
            plain if "text" in plain and self._marks.within(plain["text"]) == self._marks.within(safe["text"]) else safe
        )

    def _rendered(self, conversation: dict[str, Any]) -> dict[str, str]:
        """Renders a conversation; where its last message is continued, up to that message's end.

        The end is found as transformers finds it: by a mark after the message, whose trailing space a template may
        trim.
        """
        messages, final = conversation["messages"], conversation["messages"][-1]["content"].strip()
        if not conversation["continue_final_message"]:
            return self._accepted(conversation, messages)
        continued = {**messages[-1], "content": messages[-1]["content"] + END_MARK}
        answer = self._accepted(conversation, [*messages[:-1], continued])
        if "text" not in answer:
            return answer
        text, mark, rest = answer["text"].rpartition(END_MARK.strip())
        if not mark or final not in text:
            return {"refused": "it leaves out the last message, which continue_final_message would continue"}
        return {"text": text if rest.startswith(END_MARK[-1]) else text.rstrip()}

    def _accepted(self, conversation: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, str]:
        """Renders messages as they came or, where the template refuses or leaves out some, in the first other
        arrangement in which it writes all of them."""
        introduction, attempts = conversation["introduction"], [messages, plain_turns(messages)]
        if introduction:
            told_later = introduced_later(messages, introduction)
            attempts += [told_later, plain_turns(told_later)]
        answers: list[dict[str, str]] = []
        for place, attempt in enumerate(attempts):
            if attempt in attempts[:place]:
                continue
            answer = self._written(conversation, attempt)
            answers.append(answer)
            text = answer.get("text")
            if "broken" in answer or (text is not None and introduction in text and not left_out(messages, text)):
                return answer if text is not None else answers[0]
        return answers[0]

    def _written(self, conversation: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, str]:
        own = {name: conversation[name] for name in ("tools", "add_generation_prompt")}
        variables = {
            **self._defaults,
            **conversation["kwargs"],
            **self._variables,
            **own,
            "messages": self._form.shaped(messages),
        }
        return render(self._template, variables, self._max_chars)


def left_out(messages: list[dict[str, Any]], text: str) -> bool:
    """Returns whether a template, as some do, has left out one of several system messages."""
    systems = [one["content"].strip() for one in messages if one["role"] == "system"]
    return len(systems) > 1 and not all(one in text for one in systems)


def introduced_later(messages: list[dict[str, Any]], introduction: str) -> list[dict[str, Any]]:
    """Returns a conversation whose first message told of the tools as text, at its end, with this text before the
    second message."""
    if len(messages) < 2 or not messages[0]["content"].endswith(introduction):
        return messages
    first, second, *others = messages
    told = {**first, "content": first["content"].removesuffix(introduction).rstrip()}
    return [told, {**second, "content": f"{introduction}\n\n{second['content']}"}, *others]


def plain_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation as the strictest templates take it: one system message, at the beginning, and no two
    messages of the user one after the other.

    Agents write several of both, and remind the model by system messages amid a conversation, which become the user's.
    """
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for message in messages:
        role = message["role"]
        if role == "system" and groups and groups[-1][0]["role"] != "system":
            message, role = {**message, "role": "user"}, "user"
        if role in ("system", "user") and groups and groups[-1][0]["role"] == role:
            groups[-1][1].append(message["content"])
        else:
            groups.append((message, [message["content"]]))
    return [{**first, "content": "\n\n".join(contents)} for first, contents in groups]


def render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> dict[str, str]:
    """Returns {"text": ...}, or {"refused": ...} in the template's own words, or {"broken": ...}."""
    pieces, total = [], 0
    try:
        for piece in template.generate(variables):
            total += len(piece)
            if total > max_chars:
                return {"broken": f"it wrote more than {max_chars} characters"}
            pieces.append(piece)
    except TemplateRefused as error:
        return {"refused": str(error)[:1000]}
    except Exception as error:  # noqa: BLE001  (whatever a template does wrong)
        return {"broken": f"{type(error).__name__}: {error}"[:1000]}
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"broken": "it wrote what is not valid Unicode"}
    return {"text": text}


def opened(setup: dict[str, Any]) -> Callable[[Any], dict[str, str]]:
    """Returns the function that renders conversations by the template of ``setup``, which the first call compiles."""
    made: list[TemplateRenderer] = []

    def handle(conversation: Any) -> dict[str, str]:
        if not made:
            made.append(TemplateRenderer(setup))
        return made[0].answer(conversation)

    return handle
