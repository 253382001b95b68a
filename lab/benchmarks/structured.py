"""`python -m lab.benchmarks.structured`: what answers of a given shape cost, beside answers without a shape.

- steps: a step of 16 streams that follow JSON schemas, over the CPU kernels, on the demo model's vocabulary and on one
  of 152,064 tokens; steps with and without take turns.
- forced: tokens/s of JSON with long keys, where forced tokens are taken together and where they are chosen one by one.
- first use: the time between two tokens of 15 streams of a real cluster beside a stream of schemas that were never seen
  before, beside one of known schemas, and beside one without. With schemas the stream itself is faster, and brings more
  prompts and forced tokens into the others' steps: what a first use costs is the difference to known ones.
- edge: what a gateway takes to compile a schema, the first time and again.
- device: the rate of streams on a device that runs ahead, by a simulated clock and this machine's times of masks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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

from lab.benchmarks.decode_loop import PHASES, DecodeLoop
from lab.benchmarks.report import save, show_table, spread
from lab.benchmarks.wide_vocabulary import save_wide_model
from lab.testbed.cluster import served
from lab.testbed.plain_model import plain_folder
from pillion import AsyncClient, StructuredOutputs
from pillion.config import DecodeFlags, ModelFlags
from pillion.engine.backends.batching import build_sampling, build_step_batch
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.grammars.compiler import GrammarCompiler
from pillion.engine.grammars.step_masks import StepMasks
from pillion.engine.load_model import load_model
from pillion.engine.sampling.sampler import sample
from pillion.engine.scheduling.sequence import Sequence as Stream
from pillion.gateway.grammars.answer_grammar import JoinedGrammar, join
from pillion.gateway.grammars.grammar_checker import GrammarChecker
from pillion.gateway.grammars.structured_outputs import structured_piece
from pillion.types import SamplingParams

MODEL = "demo"
WIDE_VOCABULARY = 152_064
THREADS = 2
STREAMS, CONTEXT_TOKENS = 16, 256
NEW, KNOWN, NONE = "new schemas", "known schemas", "no schemas"
PROMPT = "List the boats of the harbour as JSON: names, owners, where they lie and what they carry.\n"
WORDS = (
    "amount anchor arrival berth boat captain cargo city code colour contact country crane crew customs date deck "
    "departure depth direction engine entry fee flag fuel harbour height hull insurance inspector island keel kind "
    "label lamp length licence mast mooring name number origin owner pier pilot port price quay region rope sail "
    "season ship signal speed status storage tide tonnage tower type vessel watch weather weight wharf"
)


def schema_of(seed: int, words_per_key: int = 1) -> dict[str, Any]:
    """Makes the schema of a long list of objects; no two seeds have the same keys."""
    draw = random.Random(seed)

    def key() -> str:
        return "_".join(draw.sample(WORDS.split(), words_per_key))

    def value(deep: bool) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"type": "string"},
            {"type": "string", "maxLength": 40},
            {"enum": draw.sample(WORDS.split(), 4)},
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
    """Returns the shape that a client asks for."""
    return StructuredOutputs(json=json.dumps(schema))


def grammar_of(schema: dict[str, Any]) -> JoinedGrammar:
    """Returns the grammar that a gateway makes of a schema."""
    return join([structured_piece(shape_of(schema))])


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
        """Makes a loop of streams, each with one of ``schemas`` if there are any; its prompts are computed."""
        sampling = SamplingParams(temperature=0.8, top_p=1.0, top_k=0, seed=1)
        texts = [grammar_of(schema).text for schema in schemas]

        def attach(number: int, sequence: Stream) -> None:
            if texts:
                state = self.compiler.start(texts[number % len(texts)], (), frozenset()).result()
                made: Any = state if forced else _OneByOne(state)
                sequence.follow_grammar(made)

        made = DecodeLoop(
            self.backend,
            self.block_size,
            streams,
            CONTEXT_TOKENS,
            sampling,
            prompt=self._prompt,
            grammars=True,
            attach=attach,
        )
        made.step()
        return made

    def close(self) -> None:
        """Ends its threads."""
        self.compiler.close()
        self.backend.close()


class _OneByOne:
    """A grammar whose forced tokens are chosen one by one, each in a step of its own, as any other token is."""

    forced = ()

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def steps(engine: Engine, rounds: int) -> dict[str, Any]:
    """Measures steps with and without schemas, which take turns; milliseconds, and tokens of a step."""
    schemas = [schema_of(number) for number in range(STREAMS)]
    loops = {
        "without": engine.loop((), STREAMS),
        "schemas, one token each": engine.loop(schemas, STREAMS, forced=False),
        "schemas": engine.loop(schemas, STREAMS),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    tokens = {name: _tokens(loop) for name, loop in loops.items()}
    for _ in range(rounds):
        for name, loop in loops.items():
            found[name].append(loop.step())
    result: dict[str, Any] = {}
    for name, times in found.items():
        totals = [sum(each.values()) * 1000 for each in times]
        ratios = [total / sum(plain.values()) / 1000 for total, plain in zip(totals, found["without"], strict=True)]
        result[name] = {
            "step_ms": spread(totals),
            "ratio": _quartiles(ratios),
            "tokens_per_step": (_tokens(loops[name]) - tokens[name]) / rounds,
            "phases_ms": {phase: statistics.median(each[phase] for each in times) * 1000 for phase in PHASES},
        }
    return result


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"low": low, "median": median, "high": high}


def _tokens(loop: DecodeLoop) -> int:
    return sum(sequence.num_tokens for sequence in loop.scheduler.sequences.values())


def forced(engine: Engine, rounds: int, seconds: float) -> dict[str, Any]:
    """Measures tokens/s of JSON with keys of six words, forced tokens together and one by one, in turns."""
    result: dict[str, Any] = {}
    for streams in (1, STREAMS):
        schemas = [schema_of(number, words_per_key=6) for number in range(streams)]
        rates: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            for together in (True, False)[:: 1 if number % 2 else -1]:
                loop = engine.loop(schemas, streams, forced=together)
                before, began_s = _tokens(loop), time.perf_counter()
                while time.perf_counter() - began_s < seconds and len(loop.scheduler.sequences) == streams:
                    loop.step()
                rates[together].append((_tokens(loop) - before) / (time.perf_counter() - began_s))
        ratios = [together / alone for together, alone in zip(rates[True], rates[False], strict=True)]
        result[str(streams)] = {
            "together_tokens_per_s": spread(rates[True]),
            "one_by_one_tokens_per_s": spread(rates[False]),
            "ratio": spread(ratios),
        }
    return result


async def gaps_beside(target: str, seconds: float, seed: int, beside: str) -> list[float]:
    """Returns the seconds between two tokens of 15 streams beside one client. As ``beside`` says, each of
    its requests has a schema that is new, a schema that is known, or none."""
    gaps: list[float] = []
    async with AsyncClient(target) as client:

        async def plain(number: int) -> None:
            last_s = 0.0
            asked: dict[str, Any] = {"temperature": 1.0, "seed": number, "max_tokens": 1000, "ignore_eos": True}
            async for delta in client.generate(f"{number} {PROMPT}", **asked):
                now_s = time.perf_counter()
                if delta.token_ids and last_s:
                    gaps.append(now_s - last_s)
                last_s = now_s

        async def newcomers() -> None:
            for number in range(seed, seed + 10_000):
                schema = schema_of(number if beside == NEW else number % 4)
                shape = None if beside == NONE else shape_of(schema)
                asked: dict[str, Any] = {"seed": number, "max_tokens": 24, "structured_outputs": shape}
                async for _ in client.generate(f"{number} {PROMPT}", **asked):
                    pass

        running = [asyncio.create_task(plain(number)) for number in range(STREAMS - 1)]
        await asyncio.sleep(2.0)
        gaps.clear()
        running.append(asyncio.create_task(newcomers()))
        await asyncio.sleep(seconds)
        found = list(gaps)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return found


def first_use(rounds: int, seconds: float) -> dict[str, Any]:
    """Measures the gaps of other streams, in milliseconds, beside new schemas, known ones and none, in turns."""
    found: dict[str, list[dict[str, float]]] = {NEW: [], KNOWN: [], NONE: []}
    flags = ("--split-policy", "colocated", "--prefill-workers", "0")
    with tempfile.TemporaryDirectory(prefix="pil-") as folder, served(pathlib.Path(folder), MODEL, *flags) as cluster:
        for number in range(rounds):
            for beside in tuple(found)[:: 1 if number % 2 else -1]:
                gaps = asyncio.run(gaps_beside(cluster.target, seconds, 100_000 * (number + 1), beside))
                p50, p99 = (float(value) * 1000 for value in np.percentile(gaps, (50, 99)))
                found[beside].append({"p50": p50, "p99": p99, "gaps": len(gaps)})
    result: dict[str, Any] = {
        name: {which: spread([one[which] for one in each]) for which in ("p50", "p99", "gaps")}
        for name, each in found.items()
    }
    for base in (KNOWN, NONE):
        pairs = zip(found[NEW], found[base], strict=True)
        result[f"p99_ratio_{base}"] = spread([new["p99"] / other["p99"] for new, other in pairs])
    return result


async def edge(name: str, count: int) -> dict[str, Any]:
    """Measures a gateway's check of ``count`` schemas that it never saw, one after the other, and once more:
    milliseconds."""
    prepared = prepare(ModelFlags(model=name))
    checker = GrammarChecker(prepared.folder / "tokenizer.json", prepared.vocab_size, prepared.eos_token_ids)
    grammars = [grammar_of(schema_of(number)) for number in range(count + 1)]
    result: dict[str, Any] = {}
    try:
        began_s = time.perf_counter()
        await checker.check(grammars.pop())
        # The process starts and reads the tokenizer.
        result["process_start_ms"] = (time.perf_counter() - began_s) * 1000
        for times in ("cold_ms", "cached_ms"):
            found = []
            for grammar in grammars:
                began_s = time.perf_counter()
                await checker.check(grammar)
                found.append((time.perf_counter() - began_s) * 1000)
            result[times] = spread(found)
    finally:
        await checker.aclose()
    return result


# A device's time of a forward pass, and of choosing the tokens after it.
DEVICE_FORWARD_MS = (2.0, 5.0, 10.0, 20.0)
DEVICE_CHOICE_MS = 0.1


def host_times(engine: Engine, rounds: int) -> list[tuple[float, float, float]]:
    """Measures what the host does in a step of 16 streams with schemas: seconds of schedule and build, of the commit,
    and from the asking for masks until they are there."""
    loop = engine.loop([schema_of(number) for number in range(STREAMS)], STREAMS, forced=False)
    found = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        plan = loop.scheduler.schedule(began_s)
        loop.scheduler.flush(began_s)
        batch = build_step_batch(plan, engine.block_size)
        built_s = time.perf_counter()
        rows = build_sampling(plan, StepMasks.of(plan))
        assert rows.masks is not None
        rows.masks.take()
        masked_s = time.perf_counter()
        sampled = sample(engine.backend.forward(batch), rows)
        chosen_s = time.perf_counter()
        outcome = loop.scheduler.commit(plan, sampled, chosen_s)
        committed_s = time.perf_counter()
        for order in outcome.commits:
            loop.scheduler.committed(order.seq_id, order.slots, "", committed_s)
        found.append((built_s - began_s, committed_s - chosen_s, masked_s - built_s))
    return found


def step_ms(times: Sequence[tuple[float, float, float]], forward_ms: float, way: str) -> float:
    """Runs a simulated clock of a device and its host; returns the mean milliseconds of a step.

    ``way``: "without" masks; "ahead", where the forward pass is launched before the tokens of the step before are
    known, and the choice is begun when they are; "waiting", where the whole step is launched when they are.
    """
    host_s = device_s = landed_s = 0.0
    forward_s, choice_s = forward_ms / 1000, DEVICE_CHOICE_MS / 1000
    for build_s, commit_s, mask_s in times:
        if way == "waiting":
            # The masks are computed while the forward pass runs.
            host_s += build_s
            landed_s = max(host_s + forward_s, host_s + mask_s) + choice_s
            host_s = landed_s + commit_s
            continue
        host_s += build_s
        forward_over_s = max(device_s, host_s) + forward_s
        host_s = max(host_s, landed_s) + commit_s + (mask_s if way == "ahead" else 0.0)
        landed_s = device_s = (max(forward_over_s, host_s) if way == "ahead" else forward_over_s) + choice_s
    return max(host_s, landed_s) / len(times) * 1000


def device(engine: Engine, rounds: int) -> dict[str, Any]:
    """Simulates steps of 16 streams on a device that runs ahead, with this host's times."""
    times = host_times(engine, rounds)
    names = ("build_ms", "commit_ms", "masks_ms")
    result: dict[str, Any] = {name: spread([each[place] * 1000 for each in times]) for place, name in enumerate(names)}
    for forward_ms in DEVICE_FORWARD_MS:
        ways = {way: step_ms(times, forward_ms, way) for way in ("without", "ahead", "waiting")}
        result[f"forward {forward_ms:g} ms"] = ways | {
            f"{way}_ratio": ways[way] / ways["without"] for way in ("ahead", "waiting")
        }
    return result


@contextmanager
def wide_model() -> Iterator[str]:
    """Makes the model of a wide vocabulary for as long as it is measured."""
    source = plain_folder(MODEL)
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        cache = os.environ.get("PILLION_CACHE")
        try:
            os.environ["PILLION_CACHE"] = name
            yield str(save_wide_model(source, pathlib.Path(name, "wide"), WIDE_VOCABULARY))
        finally:
            os.environ.pop("PILLION_CACHE")
            if cache is not None:
                os.environ["PILLION_CACHE"] = cache


def show(result: dict[str, Any]) -> None:
    """Prints the tables."""
    table = Table(title=f"a step of {STREAMS} streams")
    for heading in ("vocabulary", "streams", "ms", "over without", "tokens"):
        table.add_column(heading, justify="right")
    for vocabulary, found in result["steps"].items():
        for name, one in found.items():
            ratio = f"{one['ratio']['median']:.3f} ({one['ratio']['low']:.3f}-{one['ratio']['high']:.3f})"
            table.add_row(vocabulary, name, f"{one['step_ms']['median']:.2f}", ratio, f"{one['tokens_per_step']:.1f}")
    show_table(table)
    table = Table(title="others, medians (least to greatest)")
    for heading in ("what", "figure"):
        table.add_column(heading)
    for streams, one in result["forced"].items():
        table.add_row(f"tokens/s, forced tokens together over one by one, {streams} streams", _of(one["ratio"]))
    for name in ("cold_ms", "cached_ms"):
        table.add_row(f"ms of a gateway's check of a schema, {name.removesuffix('_ms')}", _of(result["edge"][name]))
    for name in (NEW, KNOWN, NONE):
        table.add_row(f"p99 ms between tokens of 15 streams beside {name}", _of(result["first_use"][name]["p99"]))
    for base in (KNOWN, NONE):
        table.add_row(f"p99 beside {NEW} over that beside {base}", _of(result["first_use"][f"p99_ratio_{base}"]))
    for forward_ms in DEVICE_FORWARD_MS:
        one = result["device"][f"forward {forward_ms:g} ms"]
        table.add_row(
            f"simulated device, forward {forward_ms:g} ms: step over without, ahead / waiting",
            f"{one['ahead_ratio']:.3f} / {one['waiting_ratio']:.3f}",
        )
    show_table(table)


def _of(one: dict[str, float]) -> str:
    return f"{one['median']:.3g} ({one['min']:.3g}-{one['max']:.3g})"


def main() -> None:
    """Measure, print, write results/structured.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round of forced tokens")
    parser.add_argument("--schemas", type=int, default=30, help="that the gateway checks")
    parser.add_argument("--beside-s", type=float, default=6.0, help="of each round of first uses")
    args = parser.parse_args()
    engine = Engine(MODEL)
    result: dict[str, Any] = {"streams": STREAMS, "context_tokens": CONTEXT_TOKENS, "threads": THREADS}
    result["steps"] = {str(engine.backend.vocab_size): steps(engine, args.steps)}
    result["forced"] = forced(engine, args.rounds, args.seconds)
    result["device"] = device(engine, args.steps)
    engine.close()
    result["edge"] = asyncio.run(edge(MODEL, args.schemas))
    with wide_model() as name:
        engine = Engine(name)
        result["steps"][str(engine.backend.vocab_size)] = steps(engine, args.steps)
        engine.close()
    result["first_use"] = first_use(args.rounds, args.beside_s)
    show(result)
    print(f"written to {save('structured', result)}")


if __name__ == "__main__":
    main()
