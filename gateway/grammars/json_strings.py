r"""Converts a schema's ``pattern`` and ``format`` to patterns that llguidance matches as JSON Schema means them.
Sans-IO (I9).

JSON Schema's patterns are ECMA-262's; llguidance's are Rust's, in which some of the same syntax means something else.
It knows formats, but not the calendar: every year has its 29 February.

llguidance 1.9 spells a pattern's matches as JSON, one set of characters after the other, and adds all control
characters of ``\"`` and ``\\`` to sets that may not have them (``quote_all_ctrl`` of its library derivre). So a set
without both must not have all control characters: some rarely used ones are removed. This also holds for unions and
intersections of such sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# The control character that is excluded from patterns' sets (see above) even if all JSON escapes are allowed.
NUL = "\0"
# Control characters that JSON spells only as \\u00 and two digits.
LONG_CONTROLS = "".join(map(chr, [*range(8), 0x0B, *range(0x0E, 0x20), 0x7F]))

Range = tuple[int, int]

_MAX_CODE = 0x10FFFF
_DIGITS = ((0x30, 0x39),)
_WORD_CHARS = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_LINE_ENDS = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_BLANKS = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)


def _others(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the complement of ``ranges``."""
    complement, begin = [], 0
    for low, high in sorted(ranges):
        if begin < low:
            complement.append((begin, low - 1))
        begin = max(begin, high + 1)
    return (*complement, (begin, _MAX_CODE)) if begin <= _MAX_CODE else tuple(complement)


_SETS = {"d": _DIGITS, "w": _WORD_CHARS, "s": _BLANKS}
_SETS |= {name.upper(): _others(ranges) for name, ranges in _SETS.items()}
_SETS["."] = _others(_LINE_ENDS)
_LETTERS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0, "a": 7}
# Client patterns are scanned in one pass, without backtracking or long look-ahead.
_ESCAPE = r"\\(?>u\{[0-9a-fA-F]{1,6}\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^{}]{1,64}\}|c[a-zA-Z]|.)"
_CLASS = rf"\[(\^?)((?>(?:{_ESCAPE}|[^\]\\])*))(\]?)"
# A named group, which means something else in llguidance, or one with flags.
_GROUP = r"\(\?(?>P?<[A-Za-z_$][\w$]{0,63}>|([a-zA-Z-]{1,16})[:)])"
_PART = re.compile(rf"{_CLASS}|{_GROUP}|({_ESCAPE})|.", re.DOTALL)
_FLAGS = re.compile(r"[ims]*(-[ims]+)?[:)]?")
_TIMES = re.compile(r"(?:([?*+])|\{(\d{1,4})(?:(,)(\d{0,4}))?\})\??")
_MEMBER = re.compile(rf"({_ESCAPE}|.)(?:(-)({_ESCAPE}|.))?", re.DOTALL)

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = f"(?:{_LONG_MONTH}|{_SHORT_MONTH}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
# Without leap seconds, which exist only in some years, at one time of day.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMAT_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}


def rust_pattern(pattern: str, excluded: str = NUL) -> str:
    """Convert an ECMA-262 pattern to Rust's syntax. Sets that lack the quote or the backslash lose the control
    characters in ``excluded``.

    Text that is valid in neither syntax is unchanged, for llguidance to refuse. Raises ValueError for text that means
    something else in Rust, and for a set with only characters in ``excluded``.
    """
    return _PART.sub(lambda match: _part(match, excluded), pattern)


def finite_matches(pattern: str, max_texts: int, max_chars: int) -> frozenset[str] | None:
    """Return the texts that a pattern matches; None if there are more than ``max_texts``, one is longer than
    ``max_chars``, or the pattern is not simple enough. Raises ValueError like :func:`rust_pattern`."""
    # Stack of open groups: texts of the group's earlier alternatives, texts of the current alternative without its last
    # element, and texts of that element.
    groups: list[tuple[set[str], set[str], set[str]]] = [(set(), {""}, {""})]
    begun = ended = False
    at = 0
    while at < len(pattern):
        match = _PART.match(pattern, at)
        assert match is not None, "a part may be any character"
        part, at, (earlier, before, last) = match[0], match.end(), groups.pop()
        times = _TIMES.match(pattern, match.start())
        if ended and part != "|":
            return None
        if part == "^" and not (groups or begun) and before == last == {""}:
            begun = True
        elif part == "$" and begun and not groups:
            ended = True
        elif part == "|" and (groups or ended):
            earlier |= _joined(before, last)
            before, last = {""}, {""}
            if not groups:
                begun = ended = False
        elif part[0] == "(" and (part == "(" or (part[1] == "?" and match[4] in (None, ""))):
            groups.append((earlier, _joined(before, last), set()))
            earlier, before, last = set(), {""}, {""}
            at += 2 if pattern.startswith("?:", at) else 0
        elif part == ")" and groups:
            group = earlier | _joined(before, last)
            earlier, before, _ = groups.pop()
            last = group
        elif times is not None and (repeated := _repeated(last, times, max_texts, max_chars)) is not None:
            last, at = repeated, times.end()
        elif times is None and (texts := _texts_of(match, max_texts)) is not None:
            before, last = _joined(before, last), texts
        else:
            return None
        if len(before) * len(last) + len(earlier) > max_texts or max(map(len, before | last), default=0) > max_chars:
            return None
        groups.append((earlier, before, last))
    ((earlier, before, last),) = groups[:1]
    return frozenset(earlier | _joined(before, last)) if ended and len(groups) == 1 else None


def _joined(before: set[str], last: set[str]) -> set[str]:
    return {first + second for first in before for second in last}


def _repeated(texts: set[str], times: re.Match[str], max_texts: int, max_chars: int) -> set[str] | None:
    """Return the concatenations of ``texts`` that a quantifier allows; None if there may be more than ``max_texts``, or
    longer ones than ``max_chars``."""
    mark, least, between, limit = times.groups()
    if mark in ("*", "+") or (between and not limit):
        return None
    low, high = (0, 1) if mark else (int(least), int(limit or least))
    result: set[str] = set()
    made = {""}
    for count in range(high + 1):
        result |= made if count >= low else set()
        if count == high:
            break
        if len(made) * len(texts) > max_texts or max(map(len, made), default=0) > max_chars:
            return None
        made = _joined(made, texts)
    return result


def _texts_of(match: re.Match[str], max_texts: int) -> set[str] | None:
    """Return the characters that a class, an escape or a plain character matches; None for other syntax, and for more
    than ``max_texts``."""
    negated, inner, closed, _, escape = match.groups()
    if inner is not None:
        ranges, properties = _members(inner)
        if properties or not closed:
            return None
        ranges = [*_others(ranges)] if negated else ranges
    elif escape is not None:
        if escape[1:] in ("d", "w", "s"):
            ranges = list(_SETS[escape[1]])
        elif escape[1:2] in (*"DWSpPbBAzk123456789", ""):
            return None
        else:
            ranges = [(_code(escape), _code(escape))]
    elif match[0] in (*".^$|()[]{}",) or len(match[0]) > 1:
        return None
    else:
        ranges = [(ord(match[0]), ord(match[0]))]
    if sum(high - low + 1 for low, high in ranges) > max_texts:
        return None
    return {chr(code) for low, high in ranges for code in range(low, high + 1)}


def _part(match: re.Match[str], excluded: str) -> str:
    """Convert a match of _PART to Rust's syntax, see :func:`rust_pattern`. Raises ValueError."""
    negated, inner, closed, flags, escape = match.groups()
    text = match[0]
    if inner is not None:
        return _class(bool(negated), *_members(inner), excluded) if closed else text
    if text[0] == "(" and len(text) > 1:
        if flags is None:
            return "(?:"
        if not _FLAGS.fullmatch(text, 2):
            raise ValueError(f"{text} is not supported in a pattern")
        return text
    if escape is None:
        if text == ".":
            return _class(False, _SETS["."], (), excluded)
        return _written(ord(text), excluded) if text in excluded else text
    if escape[1] in "dDwWsS":
        return _class(False, _SETS[escape[1]], (), excluded)
    if escape[1] in "pP":
        return _class(False, (), (_property(escape),), excluded)
    if escape[1] in "bBAzk123456789" or len(escape) == 1:
        # Assertions and references are left for llguidance to accept or refuse.
        return text
    return _written(_code(escape), excluded)


def _members(inner: str) -> tuple[list[Range], list[str]]:
    """Return the ranges and the Unicode properties, such as ``\\p{L}``, of a class's inside. Raises ValueError."""
    ranges: list[Range] = []
    properties: list[str] = []
    for first, dash, last in _MEMBER.findall(inner):
        for one in (first, last) if dash else (first,):
            if one[0] == "\\" and one[1:2] in (*"dDwWsSpP",):
                if dash:
                    raise ValueError(f"{first}-{last} is not a range of characters")
                if one[1] in "pP":
                    properties.append(_property(one))
                else:
                    ranges += _SETS[one[1]]
                break
        else:
            low = _code(first)
            ranges.append((low, _code(last) if dash else low))
            if ranges[-1][1] < low:
                raise ValueError(f"{first}-{last} is not a range of characters")
    return ranges, properties


def _class(negated: bool, ranges: Sequence[Range], properties: Sequence[str], excluded: str) -> str:
    r"""Return a character class in Rust's syntax, without ``excluded`` characters as in :func:`rust_pattern`.
    ``properties``: sets of unknown members, such as ``\p{L}``. Raises ValueError if only excluded ones are left."""
    if not ranges and not properties:
        # In ECMA-262 an empty class matches nothing, and a negated one everything.
        return r"[\s\S]" if negated else r"[^\s\S]"

    def has(one: str) -> bool:
        return any(low <= ord(one) <= high for low, high in ranges) is not negated

    inner = "".join(_written(low) if low == high else f"{_written(low)}-{_written(high)}" for low, high in ranges)
    text = f"[{'^' * negated}{inner}{''.join(properties)}]"
    if not (negated or properties) and all(
        high - low < len(excluded) and all(chr(code) in excluded for code in range(low, high + 1))
        for low, high in ranges
    ):
        # Raises ValueError: without excluded characters the class would be empty, which llguidance detects too late.
        _written(ranges[0][0], excluded)
    if not properties and ((has('"') and has("\\")) or not any(map(has, excluded))):
        return text
    return f"[{text}--[{''.join(_written(ord(one)) for one in excluded)}]]"


def _written(code: int, excluded: str = "") -> str:
    """Escape a character for use inside and outside of a class. Raises ValueError for an ``excluded`` one."""
    one = chr(code)
    if one in excluded:
        raise ValueError(f"no string has the control character \\x{code:02x} here")
    plain = one.isalnum() if code < 0x80 else not 0xD800 <= code < 0xE000
    return one if plain else f"\\x{{{code:x}}}"


def _property(escape: str) -> str:
    if len(escape) < 3:
        raise ValueError(f"{escape} is followed by a name in braces")
    return escape


def _code(one: str) -> int:
    """Return the code point of a character or an escape. Raises ValueError."""
    if one[0] != "\\" or len(one) == 1:
        return ord(one[0])
    kind = one[1]
    if len(one) > 2:
        code = ord(one[2]) % 32 if kind == "c" else int(one[2:].strip("{}"), 16)
        if code > _MAX_CODE:
            raise ValueError(f"{one} is not a character")
        return code
    if kind == "b":
        return 8
    if kind in _LETTERS:
        return _LETTERS[kind]
    if kind.isalnum():
        raise ValueError(f"{one} is not an escape of ECMA-262")
    return ord(kind)
