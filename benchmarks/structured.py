"""`python -m benchmarks.structured`: what answers of a given shape cost, each figure beside the same without a shape.

- steps: a step of 16 streams that follow JSON schemas, over the CPU kernels, on the demo model's vocabulary and on one
  of 152,064 tokens; steps with and without take turns.
- forced: tokens/s of JSON with long keys, where forced tokens are taken together and where they are chosen one by one.
- first use: the time between two tokens of 15 streams of a real cluster beside a stream of schemas that were never seen
  before, and beside a stream without schemas.
- edge: what a gateway takes to compile a schema, the first time and again.
- device: the rate of streams on a device that runs ahead, by a simulated clock and this machine's times of masks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.report import save, show_table, spread
from benchmarks.step import PHASES, DecodeLoop
from benchmarks.wide_vocabulary import save_wide_model
from pillion import AsyncClient, StructuredOutputs
from pillion.config import DecodeFlags, ModelFlags
from pillion.engine.backends.loading import LoadedModel, load_model
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.grammars.compiler import GrammarCompiler
from pillion.gateway.grammars.answer_grammar import join
from pillion.gateway.grammars.shapes import shape_piece
from pillion.types import SamplingParams
from testbed.cluster import served

MODEL = "demo"
WIDE_VOCABULARY = 152_064
THREADS = 2
STREAMS, CONTEXT_TOKENS = 16, 256
PROMPT = "List the boats of the harbour as JSON: names, owners, where they lie and what they carry.\n"
WORDS = (
    "amount anchor arrival berth boat captain cargo city code colour contact country crane crew customs date deck "
    "departure depth direction engine entry fee flag fuel harbour height hull insurance inspector island keel kind "
    "label lamp length licence mast mooring name number origin owner pier pilot port price quay region rope sail "
    "season ship signal speed status storage tide tonnage tower type vessel watch weather weight wharf"
).split()


def schema_of(seed: int, words_per_key: int = 1) -> dict[str, Any]:
    """Make the schema of a long list of objects; no two seeds have the same keys."""
    draw = random.Random(seed)

    def key() -> str:
        return "_".join(draw.sample(WORDS, words_per_key))

    def value(deep: bool) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"type": "string"},
            {"type": "string", "maxLength": 40},
            {"enum": draw.sample(WORDS, 4)},
            {"type": "integer"},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "string", "format": "date"},
            {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        ]
        return object_of(3, False) if deep and draw.random() < 0.2 else draw.choice(kinds)

    def object_of(count: int, deep: bool) -> dict[str, Any]:
        properties = {key(): value(deep) for _ in range(count)}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    entries = {"type": "array", "items": object_of(8, True), "minItems": 60}
    return {"type": "object", "properties": {f"list_{seed}": entries}, "required": [f"list_{seed}"]}


def shape_of(schema: dict[str, Any]) -> StructuredOutputs:
    """Return the shape that a client asks for."""
    return StructuredOutputs(json=json.dumps(schema))


def grammar_of(schema: dict[str, Any]) -> str:
    """Return the grammar that a gateway makes of a schema."""
    return join([shape_piece(shape_of(schema))])


class Engine:
    """A model over a pool of its own, and a compiler of grammars for it."""

    def __init__(self, name: str) -> None:
        flags = DecodeFlags(model=name)
        self.block_size = flags.block_size
        self.loaded: LoadedModel = load_model(flags, THREADS)
        self.backend: Any = self.loaded.backend
        prepared = self.loaded.prepared
        slots = 8 * STREAMS * (CONTEXT_TOKENS // self.block_size + 20)
        self.backend.bind_pool(memoryview(bytearray(slots * self.backend.layout.block_bytes)), slots)
        self.compiler = GrammarCompiler.load(prepared.folder, self.backend.vocab_size, prepared.eos_token_ids)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
        self._prompt = np.array(tokenizer.encode(PROMPT * 40).ids[:CONTEXT_TOKENS], np.int32)

    def loop(self, schemas: Sequence[dict[str, Any]], streams: int, *, forced: bool = True) -> DecodeLoop:
        """Make a loop of streams, each with one of ``schemas`` if there are any; its prompts are computed."""
        sampling = SamplingParams(temperature=0.8, top_p=1.0, top_k=0, seed=1)
        texts = [grammar_of(schema) for schema in schemas]

        def grammar(number: int) -> Any:
            if not texts:
                return None
            state = self.compiler.start(texts[number % len(texts)], (), frozenset())
            return state if forced else _OneByOne(state)

        made = DecodeLoop(
            self.backend,
            self.block_size,
            streams,
            CONTEXT_TOKENS,
            sampling,
            prompt=self._prompt,
            make_grammar=grammar,
        )
        made.step()
        return made
