"""JSON that clients send as text: counted before anything is made of it, and made into objects in small parts only.

A parser makes all objects of a text in one call, and the interpreter runs nothing else meanwhile: a megabyte of
brackets stops every stream for a second. So what is only passed on is read without making objects (:func:`is_object`),
and what has to be parsed is counted first (:func:`parsed`).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Raw

# Brackets, braces and commas of a text that is parsed in one call. The dearest text of so many, lists in lists, takes
# 20 ms; so many numbers as long as 512 KiB hold take as long, and give way to other threads.
MAX_PARSED_ITEMS = 2**16


def items_in(text: str) -> int:
    """How many brackets, braces and commas a text has, those within its strings included: nothing that is made of it
    has more parts."""
    return text.count("[") + text.count("{") + text.count(",")


def is_object(text: str) -> bool:
    """Whether a text is a JSON object; nothing is made of it. Whether the strings in it are valid Unicode is not
    judged."""
    try:
        msgspec.json.decode(text, type=Raw)
    except (ValueError, RecursionError):
        return False
    return text.lstrip(" \t\n\r").startswith("{")


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, for too many items too, and RecursionError."""
    if items_in(text) > MAX_PARSED_ITEMS:
        raise ValueError(f"more than {MAX_PARSED_ITEMS} brackets, braces and commas")
    return _decode(text)


def _float(text: str) -> float:
    """msgspec's own way takes 15 microseconds for a number of twenty digits and more, and holds all threads."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


_decode = msgspec.json.Decoder(float_hook=_float).decode
