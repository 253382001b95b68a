"""`python -m lab.benchmarks.pooling`: vectors of texts a second, and what streams feel of them, beside vLLM's pooling
runner and sentence-transformers.

Each system is measured with texts of 64 and of 512 tokens: alone, and beside 8 streams of answers. Texts are random
ids, so no prefix is cached; `--callers` of them are under way at once, each as a call of its own.

- Pillion: one cluster gives vectors and answers.
- vLLM: a server with the pooling runner gives vectors. It answers nothing, so a second server on the same cores has the
  streams, and rests while there are none.
- sentence-transformers, where it is installed: vectors alone, in this process, `--callers` texts in a batch.

Streams' waits between tokens stand beside those of the same system without texts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import random
import shlex
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from rich.table import Table

from lab.benchmarks.closed_loop import TOKEN_RANGE
from lab.benchmarks.peers import HOST, VLLM_OVERRIDES, about_kernels, serving_vllm
from lab.benchmarks.report import save, show_table
from lab.testbed.cluster import served
from lab.testbed.plain_model import plain_folder
from lab.testbed.ports import free_port
from pillion import __version__
from pillion.loadgen.figures import percentile
from pillion.loadgen.openai_target import READ_BYTES, EventReader

MODEL = "demo"
TEXT_TOKENS = (64, 512)
STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS = 8, 64, 1024
MAX_MODEL_LEN_TOKENS = 2048
# Nothing is counted before the streams and the callers have run for so long.
WARM_UP_S = 2.0
PILLION, VLLM, SENTENCES = "pillion", "vllm", "sentence-transformers"


@dataclass(slots=True)
class TextFigures:
    """What one load measured: the latency of each text, and the waits between tokens of all streams, in seconds."""

    texts_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0

    def summary(self) -> dict[str, float | None]:
        """Returns the figures of the result."""
        return {
            "texts_per_s": len(self.texts_s) / self.duration_s if self.texts_s else None,
            "text_p50_ms": _percentile_ms(self.texts_s, 50),
            "text_p99_ms": _percentile_ms(self.texts_s, 99),
            "itl_p50_ms": _percentile_ms(self.waits_s, 50),
            "itl_p99_ms": _percentile_ms(self.waits_s, 99),
        }


def _percentile_ms(values: Sequence[float], share: int) -> float | None:
    return percentile(sorted(values), share) * 1000 if values else None


@dataclass(frozen=True, slots=True)
class PoolingSystem:
    """Where one system's vectors and answers come from: base URLs, and the name under which its model is served."""

    name: str
    version: str
    texts_url: str
    streams_url: str
    model: str
    about: str = ""


def ids_of(draw: random.Random, count: int) -> list[int]:
    """Returns a text of so many random tokens."""
    return [draw.randrange(*TOKEN_RANGE) for _ in range(count)]


class PersistentConnection:
    """An HTTP/1.1 connection that is kept for one caller's calls, one after the other."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urllib.parse.urlsplit(url).netloc.split(":")
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Sends a call; yields each event of its answer, or its whole body. Raises RuntimeError for another status than
        200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, int(self._port))
        reader, writer = self._streams
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = EventReader()
        while not answer.done:
            data = await reader.read(READ_BYTES)
            if not data:
                raise RuntimeError(f"{path}: the server closed the connection")
            for payload in answer.feed(data):
                if answer.status != HTTPStatus.OK:
                    raise RuntimeError(f"{path}: {answer.status} {payload[:500]!r}")
                yield payload

    def close(self) -> None:
        """Closes the connection, which cancels what the server still does for it."""
        if self._streams is not None:
            self._streams[1].close()


async def run_load(
    system: PoolingSystem, tokens: int, callers: int, streams: int, seconds: float, seed: int
) -> TextFigures:
    """Runs callers with texts of ``tokens`` (0: none) and streams for so long, once both have begun."""
    # Each load has texts of its own: those of another one would be found in the pool.
    figures, draw = TextFigures(), random.Random(f"{seed} {tokens} {streams}")
    counting = asyncio.Event()

    async def texts() -> None:
        connection = PersistentConnection(system.texts_url)
        stack.callback(connection.close)
        while True:
            body = {"model": system.model, "input": ids_of(draw, tokens), "encoding_format": "base64"}
            begin = time.perf_counter()
            async for _ in connection.post("/v1/embeddings", body):
                pass
            if counting.is_set():
                figures.texts_s.append(time.perf_counter() - begin)

    async def stream() -> None:
        connection = PersistentConnection(system.streams_url)
        stack.callback(connection.close)
        while True:
            last, body = 0.0, stream_body(system.model, ids_of(draw, STREAM_PROMPT_TOKENS))
            async for _ in connection.post("/v1/completions", body):
                now = time.perf_counter()
                if last and counting.is_set():
                    figures.waits_s.append(now - last)
                last = now

    with contextlib.ExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(stream()) for _ in range(streams)]
            work += [group.create_task(texts()) for _ in range(callers if tokens else 0)]
            await asyncio.sleep(WARM_UP_S)
            counting.set()
            begin = time.perf_counter()
            await asyncio.sleep(seconds)
            figures.duration_s = time.perf_counter() - begin
            for task in work:
                task.cancel()
    return figures


def stream_body(model: str, prompt: list[int]) -> dict[str, Any]:
    """Returns the body of one stream's call."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": STREAM_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }


@contextlib.contextmanager
def pillion_served(args: argparse.Namespace) -> Iterator[PoolingSystem]:
    """Runs `pillion serve` with its own defaults."""
    port = free_port()
    flags = (f"--http-port={port}", f"--max-model-len={MAX_MODEL_LEN_TOKENS}", *shlex.split(args.pillion_flags))
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), args.model, *flags, split_policy="") as cluster,
    ):
        url = f"http://{HOST}:{port}"
        yield PoolingSystem(PILLION, __version__, url, url, "", about_kernels(cluster.log.read_text("utf-8")))


@contextlib.contextmanager
def vllm_served(args: argparse.Namespace, program: str, streams: bool) -> Iterator[PoolingSystem]:
    """Runs vLLM's pooling runner, and, where there are ``streams``, a second server for them beside it."""
    folder = plain_folder(args.model)
    usual = ("--max-model-len", str(MAX_MODEL_LEN_TOKENS), *shlex.split(args.vllm_flags))
    overrides = ("--hf-overrides", json.dumps(VLLM_OVERRIDES))
    with contextlib.ExitStack() as stack:
        logs = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pil-")))
        pooling = (*usual, *overrides, "--runner", "pooling", "--no-enable-prefix-caching")
        texts, version, _ = stack.enter_context(
            serving_vllm(program, folder, args.dtype, pooling, logs / "pooling.log")
        )
        answers = texts
        if streams:
            flags = (*usual, *overrides)
            answers, _, _ = stack.enter_context(serving_vllm(program, folder, args.dtype, flags, logs / "vllm.log"))
        yield PoolingSystem(VLLM, version, texts, answers, "peer", "two servers on the same cores" if streams else "")


def sentences(args: argparse.Namespace, tokens: int) -> TextFigures:
    """Measures sentence-transformers on the same folder, with the last token's row, normalized."""
    package = importlib.import_module("sentence_transformers")
    parts = importlib.import_module("sentence_transformers.models")
    word = parts.Transformer(str(plain_folder(args.model)), max_seq_length=MAX_MODEL_LEN_TOKENS)
    pooling = parts.Pooling(word.get_word_embedding_dimension(), pooling_mode="lasttoken")
    model = package.SentenceTransformer(modules=[word, pooling, parts.Normalize()], device="cpu")
    draw, figures = random.Random(args.seed), TextFigures()
    end = None
    for turn in itertools.count():
        texts = [model.tokenizer.decode(ids_of(draw, tokens)) for _ in range(args.callers)]
        begin = time.perf_counter()
        model.encode(texts, batch_size=args.callers)
        took_s = time.perf_counter() - begin
        if turn:
            # The first batch lets the library make what it keeps.
            figures.texts_s += [took_s] * len(texts)
            figures.duration_s += took_s
        end = end or time.perf_counter() + args.seconds
        if time.perf_counter() > end and turn:
            return figures
    raise AssertionError("the loop above ends by its clock")


def measured(system: PoolingSystem, args: argparse.Namespace, streams: int) -> Iterator[dict[str, Any]]:
    """Yields the row of each load: streams alone first, then each length of texts."""
    for tokens in (*(() if not streams else (0,)), *args.tokens):
        load = run_load(system, tokens, args.callers, streams, args.seconds, args.seed)
        figures = asyncio.run(load)
        yield {
            "system": system.name,
            "version": system.version,
            "about": system.about,
            "text_tokens": tokens,
            "streams": streams,
            **figures.summary(),
        }


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all systems that are there, one after the other, in each round."""
    rows: list[dict[str, Any]] = []
    vllm = shutil.which(args.vllm) if args.vllm else None
    for number in range(args.rounds):
        round_rows: list[dict[str, Any]] = []
        with pillion_served(args) as system:
            for streams in (0, STREAMS):
                round_rows += measured(system, args, streams)
        for streams in (0, STREAMS) if vllm else ():
            with vllm_served(args, str(vllm), bool(streams)) as system:
                round_rows += measured(system, args, streams)
        if importlib.util.find_spec("sentence_transformers"):
            for tokens in args.tokens:
                figures = sentences(args, tokens)
                found = {"system": SENTENCES, "text_tokens": tokens, "streams": 0, **figures.summary()}
                round_rows.append(found)
        rows += [{"round": number, **row} for row in round_rows]
        args.seed += 1
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of all rounds."""
    table = Table(title="Vectors of texts")
    names = ("texts_per_s", "text_p50_ms", "text_p99_ms", "itl_p50_ms", "itl_p99_ms")
    for name in ("round", "system", "text_tokens", "streams", *names):
        table.add_column(name, justify="left" if name == "system" else "right")
    for row in rows:
        figures = ("" if row[name] is None else f"{row[name]:.1f}" for name in names)
        table.add_row(str(row["round"]), row["system"], str(row["text_tokens"]), str(row["streams"]), *figures)
    show_table(table)


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", default="bfloat16", help="vLLM's")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TEXT_TOKENS), help="of a text")
    parser.add_argument("--callers", type=int, default=16, help="texts that are under way at once")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pillion-flags", default="", metavar="FLAGS", help="more flags of `pillion serve`")
    parser.add_argument(
        "--vllm", default=os.environ.get("PILLION_VLLM", ""), metavar="PATH", help="a CPU build's `vllm`"
    )
    parser.add_argument("--vllm-flags", default="", metavar="FLAGS", help="more flags of `vllm serve`")
    args = parser.parse_args()
    rows = run(args)
    show(rows)
    options = {name: value for name, value in vars(args).items() if name != "vllm"}
    print(f"written to {save('pooling', {'options': options, 'rows': rows})}")


if __name__ == "__main__":
    main()
