"""Recorded traffic: times, lengths, and which prompts share a prefix, without the text. Sans-IO.

A trace is JSON lines with timestamp (ms), input_length, output_length and hash_ids, like Mooncake's (Qin et al.,
FAST 2025). A ``hash_id`` identifies a block of 512 tokens and all before it: prompts with the same id are equal up to
that block's end. :class:`PromptMaker` makes token ids with that property.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_BLOCK_TOKENS = 512
MAX_TRACE_ROWS = 5_000_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One row of a trace. ``timestamp`` is in ms. ``hash_ids`` covers the input including its last, maybe partial
    block; empty if the trace has none."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRequest]:
    """Read all rows that have an answer, in order of time.

    Raises OSError, and ValueError that names the row for a file in another form.
    """
    with path.open(encoding="utf-8-sig") as file:
        lines = [line for line in file if line.strip()]
    if not 0 < len(lines) <= MAX_TRACE_ROWS:
        raise ValueError(f"{path} has {len(lines)} rows; from 1 to {MAX_TRACE_ROWS} are possible")
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            hash_ids = tuple(row.get("hash_ids", ()))
            request = TraceRequest(row["timestamp"], row["input_length"], row["output_length"], hash_ids)
            if request.input_length < 1:
                raise ValueError("an input without a token")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, row {number}: {error!r}; docs/load-testing.md describes the format of traces"
            ) from None
        requests.append(request)
    # Requests without an answer had failed when the trace was recorded.
    return sorted((row for row in requests if row.output_length > 0), key=lambda row: row.timestamp)


class PromptMaker:
    """Makes token ids for the rows of one trace, drawn from ``vocabulary``; deterministic in the seed."""

    def __init__(self, seed: int, vocabulary: Sequence[int]) -> None:
        self._seed = seed
        self._vocabulary = vocabulary
        self._blocks: dict[int, array[int]] = {}

    def prompt_of(self, number: int, request: TraceRequest) -> array[int]:
        """Return the prompt of row ``number``: ``input_length`` ids. Ids beyond the hash ids are unique to the row."""
        ids: array[int] = array("I")
        for hash_id in request.hash_ids[: -(-request.input_length // TRACE_BLOCK_TOKENS)]:
            ids.extend(self._block(hash_id))
        del ids[request.input_length :]
        ids.extend(self._draw(f"row {number}", request.input_length - len(ids)))
        return ids

    def _block(self, hash_id: int) -> array[int]:
        if hash_id not in self._blocks:
            self._blocks[hash_id] = self._draw(f"block {hash_id}", TRACE_BLOCK_TOKENS)
        return self._blocks[hash_id]

    def _draw(self, what: str, count: int) -> array[int]:
        return array("I", random.Random(f"{self._seed} {what}").choices(self._vocabulary, k=count))
