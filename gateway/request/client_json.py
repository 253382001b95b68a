"""JSON that clients send as a string, e.g. schemas and arguments of calls.

A parser creates all objects of a text in one call that holds the GIL: a megabyte of brackets stops every stream for a
second. So text that is only passed on is validated without creating objects (:func:`is_object`), and the items of text
that must be parsed are counted first (:func:`parsed`).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Raw

# Max brackets, braces and commas of a text that is parsed in one call. Nested lists, the worst case, take 20 ms.
MAX_PARSED_ITEMS = 2**16


def items_in(text: str) -> int:
    """Return the number of brackets, braces and commas of a JSON text, including those in strings: an upper bound on
    the number of its lists, objects and items."""
    return text.count("[") + text.count("{") + text.count(",")


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object, without creating objects. Strings are not checked for valid Unicode."""
    try:
        msgspec.json.decode(text, type=Raw)
    except (ValueError, RecursionError):
        return False
    return text.lstrip(" \t\n\r").startswith("{")


def parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, also above MAX_PARSED_ITEMS, and RecursionError."""
    if items_in(text) > MAX_PARSED_ITEMS:
        raise ValueError(f"more than {MAX_PARSED_ITEMS} brackets, braces and commas")
    return _decode(text)


def _float(text: str) -> float:
    """Parse a number as float. msgspec's own parser takes 15 us, with the GIL, for more than twenty digits. Raises
    ValueError for an infinite one."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


_decode = msgspec.json.Decoder(float_hook=_float).decode
