"""Makes the ids of requests and answers: a request's label is its client's, and an answer's id is the gateway's own."""

from __future__ import annotations

import re
import secrets

MAX_LABEL_CHARS = 128
_LABEL = re.compile(r"[A-Za-z0-9._:/+=-]+")


def request_label(given: str, made: str = "") -> str:
    """Returns the id that a request has in headers, trailers, logs and spans: the ``given`` one if all its characters
    may stand there, and otherwise one of the random id ``made``, which is drawn if it is empty."""
    if len(given) <= MAX_LABEL_CHARS and _LABEL.fullmatch(given):
        return given
    return f"req-{made or new_answer_id()}"


def new_answer_id() -> str:
    """Draws an id of 24 characters for an answer, which no other answer has, whatever its client sends."""
    return secrets.token_hex(12)
