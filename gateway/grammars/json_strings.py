"""Which strings a schema's ``pattern`` and ``format`` mean, as patterns that llguidance reads so (I9).

A pattern of JSON Schema is one of ECMA-262. llguidance reads Rust's notation, in which some marks of ECMA-262 are valid
too and mean something else. It knows formats, but for the calendar: its 29 February is in every year.
"""

from __future__ import annotations

import re

# ECMA-262's white space and ends of lines.
_BLANKS = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_OUTSIDE = {".": r"[^\n\r\u2028\u2029]", r"\s": f"[{_BLANKS}]", r"\S": f"[^{_BLANKS}]"}
# Within a class, Rust has classes in classes, and what joins and subtracts them.
_INSIDE = {r"\s": f"[{_BLANKS}]", r"\S": f"[^{_BLANKS}]", "[": r"\[", "&": r"\&", "~": r"\~"}
# What clients wrote is read in one pass: nothing is tried twice, and nothing looks for its end far ahead.
_ESCAPE = r"\\(?>u\{[0-9a-fA-F]{1,6}\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^{}]{1,64}\}|c[a-zA-Z]|.)"
_CLASS = rf"\[(\^?)((?>{_ESCAPE}|[^\]\\])*+)(\]?)"
_PART = re.compile(rf"{_CLASS}|{_ESCAPE}|.", re.DOTALL)
# One character of a class, or a range of them.
_MEMBER = re.compile(rf"({_ESCAPE}|.)(?:(-)({_ESCAPE}|.))?", re.DOTALL)

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = f"(?:{_LONG_MONTH}|{_SHORT_MONTH}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
# Without leap seconds, of which there was one in some years, and only at one time of the day.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}


def format_pattern(name: str) -> str | None:
    """The strings of a format that llguidance follows only nearly; None for every other one."""
    return _FORMATS.get(name)


def rust_pattern(pattern: str) -> str:
    """A pattern of ECMA-262 in Rust's notation. What is in neither stays, to be refused by its reader."""
    return _PART.sub(_part, pattern)


def _part(found: re.Match[str]) -> str:
    inner = found[2]
    if inner is None:
        return _OUTSIDE.get(found[0], found[0])
    if not found[3]:
        return found[0]
    if not inner:
        # ECMA-262 has a class of nothing, and one of everything.
        return r"[\s\S]" if found[1] else r"[^\s\S]"
    return f"[{found[1]}{_MEMBER.sub(_member, inner)}]"


def _member(found: re.Match[str]) -> str:
    first, dash, last = (_INSIDE.get(one, one) for one in found.groups(""))
    # A dash that is a character is escaped, lest it stand for a range or, twice, for a difference.
    first, last = (r"\-" if one == "-" else one for one in (first, last))
    return first + dash + last
