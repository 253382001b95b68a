"""Reads JSON that clients send as text: its parts are counted before any object is made, and only small texts are made
into objects.

A parser makes all objects of a text in one call, and the interpreter runs nothing else meanwhile: a megabyte of
brackets stops every stream for a second. So text that is only passed on is read without making objects
(:func:`is_object`), and text that has to be parsed is counted first (:func:`parsed`).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Raw

# A text that is parsed in one call has at most this many brackets, braces and commas. The dearest such text, lists in
# lists, takes 20 ms; as many numbers as 512 KiB hold take as long, but let other threads run.
MAX_PARSED_ITEMS = 2**16


def items_in(text: str) -> int:
    """Counts the brackets, braces and commas of a text, those within its strings included: no value made of it has more
    parts."""
    return text.count("[") + text.count("{") + text.count(",")


def is_object(text: str) -> bool:
    """Returns whether a text is a JSON object, without making the object. Whether the strings in it are valid Unicode
    is not judged."""
    try:
        msgspec.json.decode(text, type=Raw)
    except (ValueError, RecursionError):
        return False
    return text.lstrip(" \t\n\r").startswith("{")


def parsed(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError, also for too many items, and RecursionError."""
    if items_in(text) > MAX_PARSED_ITEMS:
        raise ValueError(f"more than {MAX_PARSED_ITEMS} brackets, braces and commas")
    return _decode(text)


def _float(text: str) -> float:
    """Reads a number of a JSON text. msgspec's own parser takes 15 us for a number of twenty digits and more, and holds
    all threads."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


_decode = msgspec.json.Decoder(float_hook=_float).decode
