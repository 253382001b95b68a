"""JSON that clients send as a string: counted before any object is made, parsed only if small.

A parser creates all objects of a text in one call that holds the GIL: a megabyte of brackets stops every stream for a
second. So text that is only passed on is validated without creating objects (:func:`is_object`), and text that must be
parsed is counted first (:func:`parsed`).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Raw

# Max brackets, braces and commas of a text parsed in one call. The worst case, nested lists, takes 20 ms; the numbers
# that 512 KiB can hold take as long, but release the GIL.
MAX_PARSED_ITEMS = 2**16


def items_in(text: str) -> int:
    """Return the number of brackets, braces and commas, those in strings included: an upper bound of the parts of its
    value."""
    return text.count("[") + text.count("{") + text.count(",")


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object, without creating it. Strings are not checked for valid Unicode."""
    try:
        msgspec.json.decode(text, type=Raw)
    except (ValueError, RecursionError):
        return False
    return text.lstrip(" \t\n\r").startswith("{")


def parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for too many items, and RecursionError."""
    if items_in(text) > MAX_PARSED_ITEMS:
        raise ValueError(f"more than {MAX_PARSED_ITEMS} brackets, braces and commas")
    return _decode(text)


def _float(text: str) -> float:
    """Parse a number. msgspec's parser takes 15 us for one of more than twenty digits, and holds the GIL."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


_decode = msgspec.json.Decoder(float_hook=_float).decode
