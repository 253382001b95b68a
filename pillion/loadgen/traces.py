"""Reads recorded traffic: times and lengths, and which prompts begin alike. No trace has the text. Sans-IO.

    mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids      Qin et al., FAST 2025
    burstgpt   CSV: Timestamp (s), Request tokens, Response tokens                    Wang et al., 2024
    azure      CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens         Azure LLM inference traces

A ``hash_id`` stands for a block of 512 tokens and all before it: two prompts with the same id are equal up to that
block's end. :func:`prompt_of` makes token ids for which that holds.
"""

from __future__ import annotations

import csv
import datetime
import json
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

TRACE_BLOCK_TOKENS = 512
MAX_TRACE_ROWS = 5_000_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Holds one row of a trace. ``timestamp`` is in ms. ``hash_ids`` covers the input with its last, maybe partial
    block; it is empty where the trace has none."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        """Gives the hash ids of the prompt's full blocks; only these blocks can be cached."""
        return self.hash_ids[: self.input_length // TRACE_BLOCK_TOKENS]


def read_trace(path: Path) -> list[TraceRequest]:
    """Reads all rows that have an answer, in order of time; the columns tell the format.

    Raises OSError, and ValueError that names the row for a file of another format.
    """
    with path.open(encoding="utf-8-sig") as file:
        lines = [line for line in file if line.strip()]
    if len(lines) > MAX_TRACE_ROWS:
        raise ValueError(f"{path}: {len(lines)} rows are more than {MAX_TRACE_ROWS}")
    if lines and lines[0].lstrip().startswith("{"):
        rows = _rows(path, lines, _mooncake, first=1)
    else:
        table = list(csv.DictReader(lines))
        rows = _rows(path, table, _csv_parser(path, table[0] if table else {}), first=2)
    # A row without an answer is a request that failed when it was recorded.
    return sorted((row for row in rows if row.output_length > 0), key=lambda row: row.timestamp)


def _rows(path: Path, rows: Sequence[T], parse: Callable[[T], TraceRequest], first: int) -> list[TraceRequest]:
    found = []
    for number, raw in enumerate(rows, first):
        try:
            row = parse(raw)
            if row.input_length < 1:
                raise ValueError("an input without a token")
            found.append(row)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, row {number}: {error!r}") from None
    return found


def _mooncake(line: str) -> TraceRequest:
    row = json.loads(line)
    return TraceRequest(row["timestamp"], row["input_length"], row["output_length"], tuple(row.get("hash_ids", ())))


def _csv_parser(path: Path, row: Mapping[str, str]) -> Callable[[Mapping[str, str]], TraceRequest]:
    if "Request tokens" in row:
        return lambda row: TraceRequest(
            float(row["Timestamp"]) * 1000, int(float(row["Request tokens"])), int(float(row["Response tokens"]))
        )
    if "ContextTokens" in row:
        return lambda row: TraceRequest(
            _epoch_ms(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])
        )
    raise ValueError(f"{path} is no trace of Mooncake (JSON lines), BurstGPT or Azure (CSV): see docs/load-testing.md")


def _epoch_ms(text: str) -> float:
    when = datetime.datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp() * 1000


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Writes a trace in Mooncake's form, one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests))


class PromptMaker:
    """Makes token ids for the rows of one trace, drawn from ``vocabulary``; the same seed makes the same ids."""

    def __init__(self, seed: int, vocabulary: Sequence[int]) -> None:
        self._seed = seed
        self._vocabulary = vocabulary
        self._blocks: dict[int, array[int]] = {}

    def prompt_of(self, number: int, request: TraceRequest) -> array[int]:
        """Returns the prompt of row ``number``: ``input_length`` ids. Ids beyond those that hash ids cover belong to
        this row alone."""
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
