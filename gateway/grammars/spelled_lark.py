r"""Converts a Lark grammar to one for its texts within JSON strings. Sans-IO (I9).

    start: "a" LF /[^"]+/  LF: /\n/   -->   start: "a" terminal_lf (/[^"\\\x00-\x1f]+/ | /\\(?:\\|n|...)/)+

Each character gets one JSON spelling: the shortest escape if it needs one, else itself. So each text of the grammar has
one spelling. llguidance ends a terminal where the next byte cannot continue it, without backtracking. Only the byte
after a backslash shows which escape it is, so no terminal here continues after an escape, or into one: the client's
terminals become rules, and the remaining terminals are either an escape or have none. Anything for which this might not
be equivalent is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.grammars.answer_grammar import expression

_ESCAPES = {one: json.dumps(one)[2:-1] for one in ['"', "\\", *map(chr, range(0x20))]}
_SHORT = '"\\\b\t\n\f\r'
_ESCAPES = {one: _ESCAPES[one] for one in [*_SHORT, *sorted(set(_ESCAPES) - set(_SHORT))]}
_LONG = "|".join(spelling for one, spelling in _ESCAPES.items() if one not in _SHORT)
_PLAIN = r'[^"\\\x00-\x1f]'
MAX_CHARS = 16_384
MAX_CLASS_CHARS = 256
MAX_DEPTH = 50
_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<low>"(?:\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|[^"\\\n])")\s*\.\.\s*
        (?P<high>"(?:\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|[^"\\\n])")
    |(?P<string>"(?>(?:\\.|[^"\\\n])*)")(?P<caseless>i?)
    |/(?P<regex>(?>(?:\\.|[^/\\\n])+))/(?P<flags>[imslux]*)
    |%import\s+common\s*\.\s*(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?
    |%import\s+common\s*\((?P<several>[\w\s,]*)\)
    |(?P<refused>%\w+|<[^<>\s]+>|@[\w-]+|~(?!\s*\d)|&|\w++\[[^\]\n]{0,200}\]\s*:)
    |(?P<name>\w[\w-]*+)""",
    re.VERBOSE,
)
_PART = re.compile(
    r"(?P<set>\[\^?\]?(?>(?:\\.|[^\]\\])*)(?:\]|\Z))|\\(?P<escape>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[pP]\{[^{}]{1,64}\}|[pP].|.)"
    r"|\((?P<group>\?(?:P?<\w+>|[a-z-]*[:)]))|(?P<often>[*+?]|\{\d+(?:,\d*)?\})(?P<lazy>[?+]?)|(?P<one>.)",
    re.DOTALL,
)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
# In a class, these mean more in Rust's syntax than the characters themselves, or need its tables.
_OPERATORS = re.compile(r"\[|&&|--|~~|\\[pPxu]\{|\\[bBAz]")
# Properties of letters, numbers and marks, none of which JSON escapes.
_LETTERS_OF = re.compile(r"p(?:[LMN]|\{(?:[LMN][a-z]?|Letter|Number|Mark|Alphabetic)\})")
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": rf"[+-]?{_NUMBER}",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}


def spelled(grammar: str, field: str) -> str:
    """Convert a client's Lark grammar for its texts within a JSON string, without the quotes. Raises InvalidRequest,
    which names the client's ``field``, for what cannot be converted."""
    try:
        if len(grammar) > MAX_CHARS:
            raise ValueError(f"a grammar of {len(grammar)} characters; at most {MAX_CHARS}")
        return _TOKEN.sub(_token, grammar)
    except ValueError as error:
        text = f"{error}; this is not supported for arguments in JSON"
        raise InvalidRequest.of(FieldViolation(field, text)) from None


@dataclass(frozen=True, slots=True)
class _Set:
    """A set of characters: matches of the expression ``plain`` ("" for none), which JSON does not escape, and those in
    ``escaped``."""

    plain: str
    escaped: str = ""


@dataclass(frozen=True, slots=True)
class _Repeat:
    """``inner``, repeated by ``quantifier``."""

    inner: _Node
    quantifier: str


@dataclass(frozen=True, slots=True)
class _OneOf:
    """Alternatives, each a sequence of nodes."""

    options: tuple[tuple[_Node, ...], ...]


_Node = _Set | _Repeat | _OneOf


def _token(match: re.Match[str]) -> str:
    """Convert a match of _TOKEN, see :func:`spelled`. Raises ValueError."""
    if match["refused"]:
        raise ValueError(f"the grammar has {match['refused'][:100]!r}")
    if match["low"]:
        low, high = (re.escape(_text(match[name])) for name in ("low", "high"))
        return _sequence_rule((_set(f"[{low}-{high}]"),), "")
    if match["string"]:
        return _sequence_rule([_one(one) for one in _text(match["string"])], match["caseless"]) or '""'
    if match["regex"]:
        if not set(match["flags"]) <= {"i", "s", "u"}:
            raise ValueError(f"an expression has the flags {match['flags']!r}")
        return _regex(match["regex"].replace(r"\/", "/"), match["flags"])
    if match["one"]:
        return _imported(match["one"], match["alias"] or match["one"])
    if match["several"]:
        return "\n".join(_imported(name, name) for name in match["several"].replace(",", " ").split())
    name = match["name"]
    return f"terminal_{name.lower()}" if name and name.lstrip("_")[:1].isupper() else match[0]


def _text(string: str) -> str:
    """Return the value of a Lark string."""
    try:
        return str(json.loads(re.sub(r"((?:^|[^\\])(?:\\\\)*)\\x", r"\1\\u00", string)))
    except ValueError:
        raise ValueError(f"the grammar has the string {string[:100]}") from None


def _imported(name: str, alias: str) -> str:
    if name not in _COMMON:
        raise ValueError(f"the grammar imports common.{name[:100]}")
    return f"terminal_{alias.lower()}: {_regex(_COMMON[name], '')}"


def _regex(pattern: str, flags: str) -> str:
    parts = list(_PART.finditer(pattern))
    node = _alternatives(parts[::-1], "s" in flags, 0)
    return _sequence_rule((node,), "i" if "i" in flags else "") or '""'


def _alternatives(parts: list[re.Match[str]], dot_all: bool, depth: int) -> _OneOf:
    """Parse the alternatives of a regex up to the end of its group. ``parts``: matches of _PART in reverse order;
    parsed ones are removed. Raises ValueError for unsupported syntax."""
    if depth > MAX_DEPTH:
        raise ValueError("an expression is nested too deeply")
    options: list[tuple[_Node, ...]] = []
    nodes: list[_Node] = []
    while parts:
        match = parts.pop()
        text = match[0]
        if text == ")" and depth:
            break
        if text == "|":
            options.append(tuple(nodes))
            nodes = []
        elif match["often"] and nodes and not match["lazy"] and not isinstance(nodes[-1], _Repeat):
            nodes.append(_Repeat(nodes.pop(), text))
        elif text == "(" or match["group"] is not None:
            nodes.append(_alternatives(parts, _group_dot_all(match["group"] or "", dot_all), depth + 1))
        elif text == ".":
            nodes.append(_set(r"[\s\S]" if dot_all else r"[^\n]"))
        elif match["often"] or text in ("^", "$", "[", ")"):
            raise ValueError(f"an expression has {text!r} with a special meaning")
        else:
            nodes.append(_set(text) if match["set"] else _one(text) if match["one"] else _escape(match["escape"]))
    return _OneOf((*options, tuple(nodes)))


def _group_dot_all(group: str, dot_all: bool) -> bool:
    """Return whether a dot matches line ends in a group with this beginning."""
    flags = group.strip("?:") if group.endswith(":") else ""
    if group.endswith(")") or not set(flags) <= set("s-"):
        raise ValueError(f"an expression has {'(' + group!r}")
    return "s" not in flags.partition("-")[2] if "s" in flags else dot_all


def _escape(escape: str) -> _Set:
    if escape in ("d", "w") or _LETTERS_OF.fullmatch(escape):
        return _Set(f"\\{escape}")
    if escape in ("D", "W", "s", "S"):
        return _set(f"[\\{escape}]")
    if escape in _LETTERS:
        return _one(_LETTERS[escape])
    if escape[0] in "xu" and len(escape) > 1:
        return _one(chr(int(escape[1:], 16)))
    if escape.isalnum() or len(escape) > 1:
        raise ValueError(f"an expression has '\\{escape}'")
    return _one(escape)


def _one(character: str) -> _Set:
    return _Set("", character) if character in _ESCAPES else _Set(re.escape(character))


def _set(text: str) -> _Set:
    if len(text) > MAX_CLASS_CHARS or _OPERATORS.search(text, 1):
        raise ValueError(f"an expression has the class {text[:100]!r}")
    try:
        # With ASCII, Python's classes match the same characters that JSON escapes.
        holds = re.compile(text, re.ASCII).fullmatch
    except re.error:
        raise ValueError(f"an expression has the class {text[:100]!r}") from None
    within = "".join(one for one in _ESCAPES if holds(one))
    return _Set(f"[{text}&&{_PLAIN}]" if within else text, within)


def _sequence_rule(nodes: Sequence[_Node], caseless: str, ends: bool = True) -> str:
    """Convert a sequence to the right side of a rule. ``ends``: what follows in the text is an escape, or cannot
    continue the last terminal."""
    written: list[str] = []
    word = ""
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        last = ends if following is None else isinstance(following, _Set) and not following.plain
        if isinstance(node, _Set) and not node.escaped:
            word += node.plain
            if isinstance(following, _Set) and not following.escaped:
                continue
            written.append(_terminal(word, caseless))
            word = ""
        else:
            written.append(_node_rule(node, caseless, last))
    return " ".join(written)


def _node_rule(node: _Node, caseless: str, ends: bool) -> str:
    if ends and not _has_escapes(node):
        return _terminal(_plain(node), caseless)
    match node:
        case _Set():
            return _set_rule(node, "", caseless)
        case _Repeat(_Set() as inner, ("*" | "+") as often) if ends:
            return _set_rule(inner, "+", caseless) + often
        case _Repeat(inner, often):
            return f"({_node_rule(inner, caseless, False)}){often}"
        case _OneOf(options):
            rules = [_sequence_rule(one, caseless, ends) or '""' for one in options]
            return f"({' | '.join(rules)})"


def _set_rule(node: _Set, run: str, caseless: str) -> str:
    plain = [_terminal(node.plain + run, caseless)] if node.plain else []
    spellings = "|".join(re.escape(_ESCAPES[one]) for one in node.escaped).replace(_LONG, "u00(?:0[0-7be-f]|1[0-9a-f])")
    escaped = [_terminal(rf"\\(?:{spellings})", "")] if node.escaped else []
    return f"({' | '.join(plain + escaped)})"


def _terminal(pattern: str, caseless: str) -> str:
    return expression(pattern, "") + caseless if pattern else '""'


def _has_escapes(node: _Node) -> bool:
    match node:
        case _Set():
            return bool(node.escaped)
        case _Repeat():
            return _has_escapes(node.inner)
    return any(_has_escapes(inner) for option in node.options for inner in option)


def _plain(node: _Node) -> str:
    """Convert a part without escapes to an expression."""
    match node:
        case _Set():
            return node.plain
        case _Repeat():
            return f"(?:{_plain(node.inner)}){node.quantifier}"
    return f"(?:{'|'.join(''.join(map(_plain, option)) for option in node.options)})"
