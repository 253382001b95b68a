"""Compiles grammars in a process of its own (:mod:`pillion.gateway.boxed_process`), because clients write them and one
that is slow or makes the compiler crash must not hurt the gateway. This module needs the standard library and
llguidance only.

The process also follows each grammar for a few tokens, because some grammars meet llguidance's limits only then. Where
a JSON schema is at fault, the process finds the place: llguidance says what is wrong and not where, so parts of the
schema are left out until the fault is gone.
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

# The stack of this process is smaller than those of a worker's threads, so that no grammar that is good here overflows
# the stack there.
STACK_BYTES = 2 * 2**20
# Each grammar is followed for this many tokens, as a trial.
TRIAL_TOKENS = 8
# This process has a lower priority (nice) than every thread that computes for streams, so that the check of a new
# schema waits for them and never delays them.
NICENESS = 10
# Finding the place in a schema that llguidance refuses may take this much computing time.
SEARCH_CPU_S = 0.4
MAX_REASON_CHARS = 300
# These are the keywords of JSON Schema that hold inner schemas: as the values of an object, as the items of a list, or
# a single one.
_NAMED, _LISTED, _ALONE = (
    ("properties", "patternProperties"),
    ("anyOf", "oneOf", "allOf", "prefixItems", "items"),
    ("items", "additionalItems", "additionalProperties"),
)
# To leave out an inner schema of one of these lists, the search removes it; elsewhere it puts a schema there that
# allows everything.
_CHOICES = ("anyOf", "oneOf", "allOf")
_DEFINITIONS = ("$defs", "definitions")
_WHERE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")
# llguidance's message about a regular expression has its cause on a line like this, after lines that show the place.
_CAUSE = re.compile(r"^error: (.*)", re.MULTILINE)
# These messages of llguidance name things that a client cannot change, so clients get other words in their place.
_SAID = {
    "oneOf constraints are not supported": "more than one of these may hold at once; anyOf allows that",
    "NoExtensionBias": "no text fits it",
}
# These match the name of a terminal that a grammar in Lark defines, an expression, the name of the grammar's first
# rule, and a schema, which stands in a line.
_TERMINAL = re.compile(r"^[ \t]*(_?[A-Z][A-Z0-9_]*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_EXPRESSION = re.compile(r"/(?:[^/\\\n]|\\.)+/[a-z]*")
_START = re.compile(r"\bstart\b")
_SCHEMA = re.compile(r"%json .*")

Path = tuple[str | int, ...]


def opened(setup: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Returns the function that compiles grammars for the tokenizer of ``setup``: the function returns {} for a good
    grammar, else {"field", "path", "reason"}. It also translates grammars in GBNF to Lark."""
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
    """Returns {"lark": the grammar in Lark}, or {"reason": why the text is no grammar in GBNF}."""
    try:
        return {"lark": any_to_lark(text)}
    except Exception as error:  # noqa: BLE001  (the library has errors of its own, and lets others through)
        return {"reason": plain(str(error))}


def trial(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """Returns why llguidance cannot follow a grammar, or "" where it has followed it for a few tokens."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    for step in range(TRIAL_TOKENS):
        if matcher.is_error():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for end in tokenizer.eos_tokens:
            mask &= ~(1 << end)
        if not mask or matcher.is_stopped():
            break
        # Tokens are taken from both ends of the vocabulary in turn, so that there are bytes and long words.
        matcher.consume_token(mask.bit_length() - 1 if step % 2 else (mask & -mask).bit_length() - 1)
    if matcher.is_error():
        return matcher.get_error() or "it does not compile"
    return "" if matcher.is_accepting() or not matcher.is_stopped() else "no text fits it"


def empty_part(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """Says which terminal, or expression, in a grammar matches no text, so that an answer that comes to it could not go
    on; "" where there is none. A JSON schema's are not looked at."""
    wholes = [one["lark_grammar"] for one in json.loads(grammar)["grammars"]] if grammar[:1] == "{" else [grammar]
    until_s = time.process_time() + SEARCH_CPU_S
    for whole in wholes:
        # Only these operators, and classes of characters, can leave nothing.
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
    """Says which of the client's fields is at fault, and where in its schema. ``sources`` has the schema by field, None
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
    """Returns a message of llguidance's without the position that it names in the grammar, because the client wrote a
    schema and not that grammar."""
    text, _, rest = _WHERE.sub("", reason.replace("<non-verbose/>", "").strip()).partition("\n")
    cause = _CAUSE.search(rest)
    return next((ours for theirs, ours in _SAID.items() if theirs in text), f"{text} {cause[1] if cause else ''}")[
        :MAX_REASON_CHARS
    ].strip()


def pointer(path: Path) -> str:
    """Writes a path within a schema as a JSON pointer."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


class Search:
    """Finds the smallest part of a client's schema that llguidance refuses by itself."""

    def __init__(self, limits: LLParserLimits) -> None:
        self._limits = limits
        self._until_s = time.process_time() + SEARCH_CPU_S
        self._followed: set[str] = set()

    def fault(self, schema: Any) -> str:
        """Returns llguidance's error for a schema; "" where there is none."""
        return LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}", limits=self._limits)

    def locate(self, root: Any, base: Path) -> tuple[Path, str]:
        """Returns the place of the fault in a schema and what the fault is; ``base`` is where ``root`` stands in the
        client's schema."""
        path: Path = ()
        while time.process_time() < self._until_s:
            node = _at(root, path)
            own = self.fault(_pruned(root, path, frozenset()))
            if own:
                return self._own(root, base, path, own, frozenset())
            children = list(_children(node))
            guilty = self._guilty(root, path, children)
            if guilty is None:
                kept = frozenset(children)
                return self._own(root, base, path, self.fault(_pruned(root, path, kept)), kept)
            path += guilty
        return base + path, ""

    def _guilty(self, root: Any, path: Path, suspects: list[Path]) -> Path | None:
        """Returns the inner schema that llguidance refuses by itself; None where it only refuses several together."""
        while suspects and time.process_time() < self._until_s:
            if len(suspects) == 1:
                return suspects[0]
            middle = len(suspects) // 2
            halves = suspects[:middle], suspects[middle:]
            found = [half for half in halves if self.fault(_pruned(root, path, frozenset(half)))]
            suspects = found[0] if found else []
        return None

    def _own(self, root: Any, base: Path, path: Path, reason: str, kept: frozenset[Path]) -> tuple[Path, str]:
        """Returns the place of the fault in a schema none of whose inner schemas is at fault by itself, and what the
        fault is: the place is one of its own keywords, or within what it refers to. The search leaves in only the parts
        that are ``kept``."""
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
    """Yields the paths to the schemas directly within ``node``."""
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
    """Returns ``node`` without its inner schemas, except those along ``path`` and those ``kept`` at its end."""
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
    """Returns a copy of ``node`` with ``new`` at the place ``path``."""
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
    """Returns the place that a schema's reference names; None where there is no such place."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    path = tuple(part.replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/"))
    node = root
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return path if isinstance(node, dict) else None
