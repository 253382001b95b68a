"""Compiles the grammars of one model's requests before a worker gets them, in a process that can be killed.

a grammar --cached--> valid, or refused
          --new-----> the process, one grammar at a time; requests with the same grammar share a check --> cached
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest, SchemaViolation, Unavailable
from pillion.gateway.admission.admission import RETRY_AFTER_MS
from pillion.gateway.boxed_process import BoxedProcess, BoxFailure, BoxLimits
from pillion.gateway.grammars.answer_grammar import JoinedGrammar, by_size
from pillion.gateway.grammars.json_schema import root_place
from pillion.rules.grammar_limits import PARSER_LIMITS
from pillion.tasks import end_tasks
from pillion.types import StructuredOutputs

COMPILE_CPU_S = 2.0
COMPILE_WALL_S = 60.0
COMPILE_MEMORY_BYTES = 2 * 2**30
MAX_WAITING_GRAMMARS = 64
MAX_CACHED_GRAMMARS = 4096
_HANDLER = Path(__file__).with_name("grammar_worker.py")


class GrammarChecker:
    """Checker of grammars for one tokenizer. The first check, at a gateway's start, starts its process.

    Args:
        tokenizer: path of tokenizer.json.
        vocab_size: number of the model's token ids.
        end_ids: the model's EOS ids.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        setup = {
            "tokenizer": str(tokenizer),
            "vocab_size": vocab_size,
            "end_ids": [end for end in end_ids if end < vocab_size],
            "limits": PARSER_LIMITS,
        }
        limits = BoxLimits(
            cpu_s=COMPILE_CPU_S,
            wall_s=COMPILE_WALL_S,
            memory_bytes=COMPILE_MEMORY_BYTES,
            max_waiting=MAX_WAITING_GRAMMARS,
            what="grammars wait to be compiled",
        )
        self._box = BoxedProcess(_HANDLER, setup, limits)
        self._cache: OrderedDict[bytes, tuple[FieldViolation, ...]] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[tuple[FieldViolation, ...]]] = {}

    async def check(self, grammar: JoinedGrammar) -> None:
        """Check a grammar. Raises InvalidRequest, with the client's field and the place in its schema, if a worker
        could not follow it; Overloaded if too many grammars wait; Unavailable if the process failed."""
        key = hashlib.sha256("\0".join((grammar.text, *grammar.sources)).encode()).digest()
        if key in self._cache:
            self._cache.move_to_end(key)
            violations = self._cache[key]
        else:
            task = self._running.get(key)
            if task is None:
                task = self._running[key] = asyncio.create_task(self._compile(key, grammar))
                task.add_done_callback(lambda _: self._running.pop(key, None))
            # Shielded, since other callers may wait for the same check.
            violations = await asyncio.shield(task)
        if violations:
            raise InvalidRequest.of(*violations)

    async def lark(self, structured: StructuredOutputs) -> StructuredOutputs:
        """Return a client's structure with a GBNF grammar converted to Lark. Raises what ``check`` raises."""
        if structured.grammar is None or "::=" not in structured.grammar:
            return structured
        try:
            answer = await self._box.run({"gbnf": structured.grammar}, len(structured.grammar))
        except BoxFailure as failure:
            answer = {"reason": str(failure)}
        if "lark" not in answer:
            reason = answer.get("reason") or answer["broken"]
            raise InvalidRequest.of(FieldViolation("sampling.structured_outputs.grammar", f"not GBNF: {reason}"))
        return replace(structured, grammar=answer["lark"])

    async def _compile(self, key: bytes, grammar: JoinedGrammar) -> tuple[FieldViolation, ...]:
        """Compile a grammar in the process, and cache its violations under ``key``. Raises Overloaded, Unavailable."""
        job = {"grammar": grammar.text, "sources": grammar.sources}
        try:
            answer = await self._box.run(job, len(grammar.text))
        except BoxFailure as failure:
            if not failure.its_own:
                raise Unavailable(f"a grammar could not be compiled: {failure}", RETRY_AFTER_MS) from None
            answer = {"field": next(iter(by_size(grammar.sources)), ""), "path": "", "reason": str(failure)}
        violations = violations_of(answer)
        self._cache[key] = violations
        while len(self._cache) > MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return violations

    async def aclose(self) -> None:
        """End the checking process; another check would start a new one."""
        await end_tasks(*self._running.values())
        await self._box.aclose()


def violations_of(answer: Mapping[str, Any]) -> tuple[FieldViolation, ...]:
    """Convert the checking process's answer to violations; none for a valid grammar."""
    if not answer:
        return ()
    if "broken" in answer:
        answer = {"field": "sampling.structured_outputs", "path": "", "reason": answer["broken"]}
    field, _, base = answer["field"].partition("#")
    place = root_place(base, answer["path"])
    at = f"at {place}: " if place else ""
    return (SchemaViolation(field, f"{at}{answer['reason']}", place),)
