"""Checks the bounds of a structure that a client asks for before any grammar is made of it (I9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from pillion.errors import FieldViolation
from pillion.types import StructuredOutputs

# The text of a structure may have at most this many bytes; OpenAI allows 120,000 characters of names and values.
MAX_STRUCTURED_BYTES = 128 * 2**10
MAX_CHOICES = 4096

_FIELD = "sampling.structured_outputs"


def structured_violations(structured: StructuredOutputs) -> Iterator[FieldViolation]:
    """Yields what is wrong with a structure before a grammar is made of it: its number of fields, its size, its
    type."""
    given = _given(structured)
    if len(given) != 1:
        named = ", ".join(given) or "none"
        yield FieldViolation(_FIELD, f"exactly one structure of an answer can be asked for, not {named}")
        return
    name, value = next(iter(given.items()))
    texts = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
    if len(texts) > MAX_CHOICES:
        yield FieldViolation(f"{_FIELD}.{name}", f"{len(texts)} choices; at most {MAX_CHOICES}")
        return
    try:
        size_bytes = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        yield FieldViolation(f"{_FIELD}.{name}", "not valid Unicode")
        return
    if size_bytes > MAX_STRUCTURED_BYTES:
        yield FieldViolation(f"{_FIELD}.{name}", f"{size_bytes} bytes; at most {MAX_STRUCTURED_BYTES}")
    for n, text in enumerate(texts):
        if not text:
            at = f"[{n}]" if name == "choice" else ""
            yield FieldViolation(f"{_FIELD}.{name}{at}", "empty")
            return


def structured_bytes(structured: StructuredOutputs | None) -> int:
    """Returns about how many bytes a structure has."""
    if structured is None:
        return 0
    texts = (structured.json, structured.regex, structured.grammar, structured.structural_tag, *structured.choice)
    return sum(len(text) for text in texts if text)


def _given(structured: StructuredOutputs) -> dict[str, Any]:
    values = {field.name: getattr(structured, field.name) for field in fields(structured)}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
