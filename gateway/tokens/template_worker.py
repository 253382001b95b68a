"""Renders chat templates in the process of :mod:`pillion.gateway.boxed_process`, never in the gateway's: a template is
code out of a model's folder. It needs the standard library and jinja2 only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Stands behind a message that is continued, while it is rendered.
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; when serving it is plain text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own protocol)

    def parse(self, parser: Any) -> Any:
        """The body, as if the tag were not there."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class TemplateRefused(jinja2.TemplateError):
    """The template itself called ``raise_exception``: the conversation is not one it knows."""


def environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a chat template, no more."""
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
    """The local time."""
    return datetime.now().astimezone().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes, as models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def answer_to(conversation: dict[str, Any], template: jinja2.Template, setup: dict[str, Any]) -> dict[str, str]:
    """What :func:`render` makes of a conversation; of one whose last message is continued, the text up to its end.

    The end is found as transformers finds it: by a mark behind the message, whose trailing space a template may trim.
    """
    messages, continued = conversation["messages"], conversation["continue_final_message"]
    kwargs = json.loads(conversation["kwargs"] or "{}")
    final = messages[-1]["content"].strip()
    if continued:
        messages[-1]["content"] += END_MARK
    own = {name: conversation[name] for name in ("messages", "tools", "add_generation_prompt")}
    answer = render(template, {**kwargs, **setup["variables"], **own}, setup["max_chars"])
    if not continued or "text" not in answer:
        return answer
    text, mark, rest = answer["text"].rpartition(END_MARK.strip())
    if not mark or final not in text:
        return {"refused": "it leaves out the last message, which continue_final_message would continue"}
    return {"text": text if rest.startswith(END_MARK[-1]) else text.rstrip()}


def render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> dict[str, str]:
    """{"text": ...}, or {"refused": ...} in the template's own words, or {"broken": ...}."""
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
    """What renders conversations by the template of ``setup``, which is compiled with the first one."""
    compiled: list[jinja2.Template] = []

    def handle(conversation: Any) -> dict[str, str]:
        if not compiled:
            compiled.append(environment().from_string(setup["template"]))
        return answer_to(conversation, compiled[0], setup)

    return handle
