"""Compiles grammars in a separate process (:mod:`pillion.gateway.boxed_process`): clients write them, and one that is
slow or crashes the compiler must not affect the gateway. Needs only the standard library and llguidance.

The process also follows each grammar for a few tokens, because some exceed llguidance's limits only then. llguidance
does not report where in a JSON schema an error is: the process removes subschemas until it is gone.
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

# Stack size, smaller than that of a worker's threads, so that a grammar that is valid here cannot overflow theirs.
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
_DEFINITIONS = ("$defs", "definitions")
_WHERE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")
# The cause in llguidance's message about a regular expression; lines before it show the position.
_CAUSE = re.compile(r"^error: (.*)", re.MULTILINE)
# Replacements for messages of llguidance that are about its own options.
_REASONS = {
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
        # Alternate between both ends of the vocabulary: single bytes have the lowest ids, long words the highest.
        matcher.consume_token(mask.bit_length() - 1 if step % 2 else (mask & -mask).bit_length() - 1)
    if matcher.is_error():
        return matcher.get_error() or "it does not compile"
    return "" if matcher.is_accepting() or not matcher.is_stopped() else "no text fits it"


def empty_part(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """Return an error that names a terminal or expression of a grammar that matches no text, so that an answer could
    not continue; "" if there is none. JSON schemas are skipped."""
    texts = [one["lark_grammar"] for one in json.loads(grammar)["grammars"]] if grammar[:1] == "{" else [grammar]
    until_s = time.process_time() + SEARCH_CPU_S
    for text in texts:
        # Only &, ~ and character classes can match nothing.
        names = _TERMINAL.findall(text) if "&" in text or "~" in text else []
        definitions = _START.sub("unused_start", text) if names else ""
        parts = dict.fromkeys(names, definitions) | {
            pattern: "" for pattern in _EXPRESSION.findall(_SCHEMA.sub("", text)) if "[" in pattern
        }
        for part, needed in parts.items():
            if time.process_time() > until_s:
                return ""
            matcher = LLMatcher(tokenizer, f"{needed}\nstart: {part}\n", log_level=0, limits=limits)
            if matcher.is_error() or matcher.is_accepting():
                continue
            matcher.compute_bitmask()
            if matcher.is_error():
                return f"no text fits {part}"
    return ""


def blame(sources: dict[str, Any], reason: str, limits: LLParserLimits) -> dict[str, Any]:
    """Return which of the client's fields is wrong, where in its schema, and why: {"field", "path", "reason"}.
    ``sources``: schemas by field, None for other notations. ``reason``: llguidance's error for the whole grammar."""
    for field, schema in sources.items():
        if schema is not None:
            search = Search(limits)
            error = search.fault(schema)
            if error:
                path, why = search.locate(schema, ())
                return {"field": field, "path": pointer(path), "reason": plain(why or error)}
    others = [field for field, schema in sources.items() if schema is None]
    return {"field": (others or list(sources) or [""])[0], "path": "", "reason": plain(reason)}


def plain(reason: str) -> str:
    """Return a message of llguidance without the position in its grammar, which the client did not write."""
    text, _, rest = _WHERE.sub("", reason.replace("<non-verbose/>", "").strip()).partition("\n")
    cause = _CAUSE.search(rest)
    return next((ours for theirs, ours in _REASONS.items() if theirs in text), f"{text} {cause[1] if cause else ''}")[
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
        """Return the path of the error in the client's schema, and the error, "" if the time is up. ``root``: the
        schema to search, at path ``base``."""
        path: Path = ()
        while time.process_time() < self._until_s:
            node = _at(root, path)
            own = self.fault(_pruned(root, path, frozenset()))
            if own:
                return self._own(root, base, path, own, frozenset())
            children = list(_children(node))
            faulty = self._bisect(root, path, children)
            if faulty is None:
                kept = frozenset(children)
                return self._own(root, base, path, self.fault(_pruned(root, path, kept)), kept)
            path += faulty
        return base + path, ""

    def _bisect(self, root: Any, path: Path, suspects: list[Path]) -> Path | None:
        """Return the path of a subschema that llguidance refuses by itself; None if it only refuses several
        together."""
        while suspects and time.process_time() < self._until_s:
            if len(suspects) == 1:
                return suspects[0]
            middle = len(suspects) // 2
            halves = suspects[:middle], suspects[middle:]
            faulty = [half for half in halves if self.fault(_pruned(root, path, frozenset(half)))]
            suspects = faulty[0] if faulty else []
        return None

    def _own(self, root: Any, base: Path, path: Path, reason: str, kept: frozenset[Path]) -> tuple[Path, str]:
        """Return the path and text of an error that no single subschema causes: the path of a keyword of the schema at
        ``path``, or of a place in the schema that it refers to. Subschemas that are not ``kept`` are pruned."""
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
            definitions = {name: root[name] for name in _DEFINITIONS if name in root}
            return self.locate({**definitions, **_at(root, target)}, target)
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
    """Return ``node`` without its subschemas, except those along ``path``, and those ``kept`` of the last one."""
    if not isinstance(node, dict):
        return node
    pruned = {key: value.copy() if isinstance(value, dict | list) else value for key, value in node.items()}
    for child in _children(node):
        original, value = _at(node, child), True
        if path and path[: len(child)] == child:
            value = _pruned(original, path[len(child) :], kept)
        elif not path and child in kept:
            value = original
        _at(pruned, child[:-1])[child[-1]] = value
    # From these lists, removed subschemas are dropped; elsewhere True replaces them.
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(pruned.get(key), list) and pruned[key]:
            pruned[key] = [value for value in pruned[key] if value is not True]
            if not pruned[key]:
                del pruned[key]
    return pruned


def _replaced(node: Any, path: Path, new: Any) -> Any:
    """Return a copy of ``node`` with ``new`` at ``path``."""
    if not path:
        return new
    copied = node.copy()
    copied[path[0]] = _replaced(node[path[0]], path[1:], new)
    return copied


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
