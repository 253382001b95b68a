"""Renders chat templates in the process of :mod:`pillion.gateway.boxed_process`, never in the gateway's: a template is
code out of a model's folder. This program needs the standard library and jinja2 only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

# While a message is rendered that the answer continues, this text follows it.
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


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


def answer_to(conversation: dict[str, Any], template: jinja2.Template, setup: dict[str, Any]) -> dict[str, str]:
    """Returns what :func:`render` makes of a conversation; where its last message is continued, the text up to that
    message's end.

    The end is found as transformers finds it: by a mark after the message, whose trailing space a template may trim.
    """
    messages, continued = conversation["messages"], conversation["continue_final_message"]
    kwargs = json.loads(conversation["kwargs"] or "{}")
    final = messages[-1]["content"].strip()
    if continued:
        messages[-1]["content"] += END_MARK
    own = {name: conversation[name] for name in ("messages", "tools", "add_generation_prompt")}
    answer = render(template, {**kwargs, **setup["variables"], **own}, setup["max_chars"])
    if ("refused" in answer or left_out(messages, answer)) and (plain := plain_turns(messages)) != messages:
        own["messages"] = plain
        again = render(template, {**kwargs, **setup["variables"], **own}, setup["max_chars"])
        answer = again if "text" in again and not left_out(messages, again) else answer
    if not continued or "text" not in answer:
        return answer
    text, mark, rest = answer["text"].rpartition(END_MARK.strip())
    if not mark or final not in text:
        return {"refused": "it leaves out the last message, which continue_final_message would continue"}
    return {"text": text if rest.startswith(END_MARK[-1]) else text.rstrip()}


def left_out(messages: list[dict[str, Any]], answer: dict[str, str]) -> bool:
    """Returns whether a template, as some do, has left out one of several system messages."""
    systems = [one["content"].strip() for one in messages if one["role"] == "system"]
    return len(systems) > 1 and "text" in answer and not all(one in answer["text"] for one in systems)


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
    compiled: list[jinja2.Template] = []

    def handle(conversation: Any) -> dict[str, str]:
        if not compiled:
            compiled.append(environment().from_string(setup["template"]))
        return answer_to(conversation, compiled[0], setup)

    return handle
