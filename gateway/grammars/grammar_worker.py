"""Compiles grammars in a separate process (:mod:`pillion.gateway.boxed_process`): clients write them, and one that is
slow or crashes the compiler must not affect the gateway. Needs only the standard library and llguidance.

The process also follows each grammar for a few tokens, because some exceed llguidance's limits only then. For a JSON
schema it finds the place of the error, which llguidance does not report, by removing parts until the error is gone.
"""

from __future__ import annotations

import json
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

# Stack size, smaller than that of a worker's threads, so that no grammar that is valid here overflows there.
STACK_BYTES = 2 * 2**20
TRIAL_TOKENS = 8
# Lower priority than all threads that compute for streams, so that checks never delay them.
NICENESS = 10
SEARCH_CPU_S = 0.4
MAX_REASON_CHARS = 300
_NAMED, _LISTED, _ALONE = (
    ("properties", "patternProperties"),
    ("anyOf", "oneOf", "allOf", "prefixItems", "items"),
    ("items", "additionalItems", "additionalProperties"),
)
# Lists from which the search removes subschemas; elsewhere it replaces them by one that allows everything.
_CHOICES = ("anyOf", "oneOf", "allOf")
_DEFINITIONS = ("$defs", "definitions")
_WHERE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")
# The cause in llguidance's message about a regular expression, after lines with its position.
_CAUSE = re.compile(r"^error: (.*)", re.MULTILINE)
# Replacements for messages of llguidance that name what a client cannot change.
_SAID = {
    "oneOf constraints are not supported": "more than one of these may hold at once; anyOf allows that",
    "NoExtensionBias": "no text fits it",
}
_TERMINAL = re.compile(r"^[ \t]*(_?[A-Z][A-Z0-9_]*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_EXPRESSION = re.compile(r"/(?:[^/\\\n]|\\.)+/[a-z]*")
_START = re.compile(r"\bstart\b")
_SCHEMA = re.compile(r"%json .*")

Path = tuple[str | int, ...]


def opened(setup: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Return the function that compiles grammars for the tokenizer of ``setup``. It returns {} for a valid grammar,
    else {"field", "path", "reason"}. It also converts GBNF grammars to Lark."""
    os.nice(NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    with open(setup["tokenizer"], encoding="utf-8") as file:
        tokenizer = LLTokenizer(file.read(), n_vocab=setup["vocab_size"], eos_token=setup["end_ids"] or None)
    limits = LLParserLimits(**setup["limits"])

    def handle(job: Any) -> dict[str, Any]:
        if "gbnf" in job:
            return converted(job["gbnf"])
        reason = trial(tokenizer, limits, job["grammar"]) or empty_part(tokenizer, limits, job["grammar"])
        return blame(job["sources"], reason, limits) if reason else {}

    return handle


def converted(text: str) -> dict[str, Any]:
    """Return {"lark": the grammar in Lark}, or {"reason": why it is not GBNF}."""
    try:
        return {"lark": any_to_lark(text)}
    except Exception as error:  # noqa: BLE001  (the library has errors of its own, and lets others through)
        return {"reason": plain(str(error))}


def trial(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """Return why llguidance cannot follow a grammar, or "" if it could for a few tokens."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    for step in range(TRIAL_TOKENS):
        if matcher.is_error():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for end in tokenizer.eos_tokens:
            mask &= ~(1 << end)
        if not mask or matcher.is_stopped():
            break
        # From both ends of the vocabulary in turn, which are bytes and long words.
        matcher.consume_token(mask.bit_length() - 1 if step % 2 else (mask & -mask).bit_length() - 1)
    if matcher.is_error():
        return matcher.get_error() or "it does not compile"
    return "" if matcher.is_accepting() or not matcher.is_stopped() else "no text fits it"


def empty_part(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """Return which terminal or expression in a grammar matches nothing, so that an answer could not continue; "" if
    none. JSON schemas are skipped."""
    wholes = [one["lark_grammar"] for one in json.loads(grammar)["grammars"]] if grammar[:1] == "{" else [grammar]
    until_s = time.process_time() + SEARCH_CPU_S
    for whole in wholes:
        # Only these operators, and classes, can match nothing.
        names = _TERMINAL.findall(whole) if "&" in whole or "~" in whole else []
        rest = _START.sub("unused_start", whole) if names else ""
        parts = dict.fromkeys(names, rest) | {
            found: "" for found in _EXPRESSION.findall(_SCHEMA.sub("", whole)) if "[" in found
        }
        for part, needed in parts.items():
            if time.process_time() > until_s:
                return ""
            alone = LLMatcher(tokenizer, f"{needed}\nstart: {part}\n", log_level=0, limits=limits)
            if alone.is_error() or alone.is_accepting():
                continue
            alone.compute_bitmask()
            if alone.is_error():
                return f"no text fits {part}"
    return ""


def blame(sources: dict[str, Any], reason: str, limits: LLParserLimits) -> dict[str, Any]:
    """Find which of the client's fields is wrong, and where in its schema. ``sources`` has the schema by field, None
    for other notations."""
    for field, schema in sources.items():
        if schema is not None:
            search = Search(limits)
            found = search.fault(schema)
            if found:
                path, why = search.locate(schema, ())
                return {"field": field, "path": pointer(path), "reason": plain(why or found)}
    others = [field for field, schema in sources.items() if schema is None]
    return {"field": (others or list(sources) or [""])[0], "path": "", "reason": plain(reason)}


def plain(reason: str) -> str:
    """Return a message of llguidance without the position in its grammar, which the client did not write."""
    text, _, rest = _WHERE.sub("", reason.replace("<non-verbose/>", "").strip()).partition("\n")
    cause = _CAUSE.search(rest)
    return next((ours for theirs, ours in _SAID.items() if theirs in text), f"{text} {cause[1] if cause else ''}")[
        :MAX_REASON_CHARS
    ].strip()


def pointer(path: Path) -> str:
    """Write a path within a schema as a JSON pointer."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


class Search:
    """Search for the smallest part of a client's schema that llguidance refuses."""

    def __init__(self, limits: LLParserLimits) -> None:
        self._limits = limits
        self._until_s = time.process_time() + SEARCH_CPU_S
        self._followed: set[str] = set()

    def fault(self, schema: Any) -> str:
        """Return llguidance's error for a schema, or ""."""
        return LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}", limits=self._limits)

    def locate(self, root: Any, base: Path) -> tuple[Path, str]:
        """Return the place of the error in a schema, and the error; ``base`` is the path of ``root`` in the client's
        schema."""
        path: Path = ()
        while time.process_time() < self._until_s:
            node = _at(root, path)
            own = self.fault(_pruned(root, path, frozenset()))
            if own:
                return self._own(root, base, path, own, frozenset())
            children = list(_children(node))
            guilty = self._bisect(root, path, children)
            if guilty is None:
                kept = frozenset(children)
                return self._own(root, base, path, self.fault(_pruned(root, path, kept)), kept)
            path += guilty
        return base + path, ""

    def _bisect(self, root: Any, path: Path, suspects: list[Path]) -> Path | None:
        """Return the subschema that llguidance refuses by itself; None if it only refuses several together."""
        while suspects and time.process_time() < self._until_s:
            if len(suspects) == 1:
                return suspects[0]
            middle = len(suspects) // 2
            halves = suspects[:middle], suspects[middle:]
            found = [half for half in halves if self.fault(_pruned(root, path, frozenset(half)))]
            suspects = found[0] if found else []
        return None

    def _own(self, root: Any, base: Path, path: Path, reason: str, kept: frozenset[Path]) -> tuple[Path, str]:
        """Return the place of an error that is in none of the subschemas alone, and the error: one of the schema's own
        keywords, or within what it refers to. The search includes only ``kept`` subschemas."""
        node = _at(root, path)
        for key in node if isinstance(node, dict) else ():
            if key in _DEFINITIONS or time.process_time() > self._until_s:
                continue
            without = {name: value for name, value in node.items() if name != key}
            if self.fault(_pruned(_replaced(root, path, without), path, kept)):
                continue
            target = _target(root, node[key]) if key == "$ref" else None
            if target is None or node[key] in self._followed:
                return (*base, *path, key), reason
            self._followed.add(node[key])
            shared = {name: root[name] for name in _DEFINITIONS if name in root}
            return self.locate({**shared, **_at(root, target)}, target)
        return base + path, reason


def _children(node: Any) -> Iterator[Path]:
    """Yield the paths to the direct subschemas of ``node``."""
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in _NAMED and isinstance(value, dict):
            yield from ((key, name) for name in value)
        elif key in _LISTED and isinstance(value, list):
            yield from ((key, n) for n in range(len(value)))
        elif key in _ALONE:
            yield (key,)


def _pruned(node: Any, path: Path, kept: frozenset[Path]) -> Any:
    """Return ``node`` without its subschemas, except along ``path`` and those ``kept`` at its end."""
    if not isinstance(node, dict):
        return node
    made = {key: value.copy() if isinstance(value, dict | list) else value for key, value in node.items()}
    for child in _children(node):
        whole, value = _at(node, child), True
        if path and path[: len(child)] == child:
            value = _pruned(whole, path[len(child) :], kept)
        elif not path and child in kept:
            value = whole
        _at(made, child[:-1])[child[-1]] = value
    for key in _CHOICES:
        if isinstance(made.get(key), list) and made[key]:
            made[key] = [value for value in made[key] if value is not True]
            if not made[key]:
                del made[key]
    return made


def _replaced(node: Any, path: Path, new: Any) -> Any:
    """Return a copy of ``node`` with ``new`` at ``path``."""
    if not path:
        return new
    made = node.copy()
    made[path[0]] = _replaced(node[path[0]], path[1:], new)
    return made


def _at(node: Any, path: Path) -> Any:
    for part in path:
        node = node[part]
    return node


def _target(root: Any, reference: Any) -> Path | None:
    """Return the path that a schema's reference names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    path = tuple(part.replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/"))
    node = root
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return path if isinstance(node, dict) else None
