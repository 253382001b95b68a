"""Compiles grammars in the process of :mod:`pillion.gateway.boxed_process`, never in the gateway's: clients write them.
It needs the standard library and llguidance only.

What it compiles it also follows for a few tokens, because some grammars meet their limits only then. Where a JSON
schema is at fault it finds the place: llguidance says what is wrong and not where, so parts of the schema are left out
until the fault is gone.
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

# Less than a worker's threads have, so that no grammar that passes here overflows the stack there.
STACK_BYTES = 2 * 2**20
# Tokens for which a grammar is followed.
TRIAL_TOKENS = 8
# Below every thread that computes for streams: a schema that is new waits for them, and not they for it.
NICENESS = 10
# Computing time for finding the place of a fault.
SEARCH_CPU_S = 0.4
MAX_REASON_CHARS = 300
# Where schemas stand within a schema: under names, in a list, or alone.
_NAMED, _LISTED, _ALONE = (
    ("properties", "patternProperties"),
    ("anyOf", "oneOf", "allOf", "prefixItems", "items"),
    ("items", "additionalItems", "additionalProperties"),
)
# Lists from which a schema that is left out is taken; from others it is replaced by one that allows everything.
_CHOICES = ("anyOf", "oneOf", "allOf")
_DEFINITIONS = ("$defs", "definitions")
_WHERE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")
# What an expression's error says behind a picture of the place.
_CAUSE = re.compile(r"^error: (.*)", re.MULTILINE)
# Messages of llguidance's that name what a client cannot change.
_SAID = {
    "oneOf constraints are not supported": "more than one of these may hold at once; anyOf allows that",
    "NoExtensionBias": "no text fits it",
}

Path = tuple[str | int, ...]


def opened(setup: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """What compiles grammars for the tokenizer of ``setup``: {} for a good one, else {"field", "path", "reason"}. It
    translates GBNF too."""
    os.nice(NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    with open(setup["tokenizer"], encoding="utf-8") as file:
        tokenizer = LLTokenizer(file.read(), n_vocab=setup["vocab_size"], eos_token=setup["end_ids"] or None)
    limits = LLParserLimits(**setup["limits"])

    def handle(job: Any) -> dict[str, Any]:
        if "gbnf" in job:
            return converted(job["gbnf"])
        reason = trial(tokenizer, limits, job["grammar"])
        return blame(job["sources"], reason, limits) if reason else {}

    return handle


def converted(text: str) -> dict[str, Any]:
    """{"lark": the grammar in Lark}, or {"reason": why it is no GBNF}."""
    try:
        return {"lark": any_to_lark(text)}
    except Exception as error:  # noqa: BLE001  (the library has errors of its own, and lets others through)
        return {"reason": plain(str(error))}


def trial(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """Why a grammar cannot be followed; "" where it can, as far as a few tokens tell."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    for step in range(TRIAL_TOKENS):
        if matcher.is_error():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for end in tokenizer.eos_tokens:
            mask &= ~(1 << end)
        if not mask or matcher.is_stopped():
            break
        # From both ends of the vocabulary in turn: bytes, and long words.
        matcher.consume_token(mask.bit_length() - 1 if step % 2 else (mask & -mask).bit_length() - 1)
    if matcher.is_error():
        return matcher.get_error() or "it does not compile"
    return "" if matcher.is_accepting() or not matcher.is_stopped() else "no text fits it"


def blame(sources: dict[str, Any], reason: str, limits: LLParserLimits) -> dict[str, Any]:
    """Which of the client's fields is at fault, and where in its schema; ``sources`` has None for other notations."""
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
    """A message of llguidance's without the place in our own text."""
    text, _, rest = _WHERE.sub("", reason.replace("<non-verbose/>", "").strip()).partition("\n")
    cause = _CAUSE.search(rest)
    return next((ours for theirs, ours in _SAID.items() if theirs in text), f"{text} {cause[1] if cause else ''}")[
        :MAX_REASON_CHARS
    ].strip()


def pointer(path: Path) -> str:
    """A JSON pointer."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


class Search:
    """Finds the smallest part of a schema that llguidance refuses."""

    def __init__(self, limits: LLParserLimits) -> None:
        self._limits = limits
        self._until_s = time.process_time() + SEARCH_CPU_S
        self._followed: set[str] = set()

    def fault(self, schema: Any) -> str:
        """What llguidance says against a schema; "" for nothing."""
        return LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}", limits=self._limits)

    def locate(self, root: Any, base: Path) -> tuple[Path, str]:
        """The place of the fault and what it is; ``base`` is where ``root`` stands in the client's schema."""
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
        """The child that is at fault by itself; None where only several together are."""
        while suspects and time.process_time() < self._until_s:
            if len(suspects) == 1:
                return suspects[0]
            middle = len(suspects) // 2
            halves = suspects[:middle], suspects[middle:]
            found = [half for half in halves if self.fault(_pruned(root, path, frozenset(half)))]
            suspects = found[0] if found else []
        return None

    def _own(self, root: Any, base: Path, path: Path, reason: str, kept: frozenset[Path]) -> tuple[Path, str]:
        """The fault of a schema's own keywords, beside the schemas within it that are ``kept``, or of what it refers
        to."""
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
    """Where schemas stand within ``node``."""
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
    """``node`` without the schemas within it, but for those along ``path``, and those ``kept`` at its end."""
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
    """``node`` with ``new`` in place of what stands at ``path``."""
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
    """Where a reference within the schema leads; None where it leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    path = tuple(part.replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/"))
    node = root
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return path if isinstance(node, dict) else None
