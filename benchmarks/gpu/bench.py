"""What the sections share: rows of a result, the device, and how long kernels take on it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

# Data that a measurement goes round in, so that nothing comes from the L2 (60 MB of an H200): several times as much.
ROTATED_BYTES = 4 * 64 * 2**20
MIN_REPEATS, MAX_REPEATS = 10, 200
# Of one measurement, beside its warm-up.
MEASURE_S = 0.5

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: least, middle and greatest of the repeats."""

    min_s: float
    median_s: float
    max_s: float

    def scaled(self, factor: float) -> Times:
        """Of ``factor`` times the work."""
        return Times(self.min_s * factor, self.median_s * factor, self.max_s * factor)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured, unique within its section.
        value, unit: the figure; None where it could not be taken, and ``note`` says why.
        share: the figure over its limit, or of the time that the limit would take over the time taken; ``of``: of what.
        target: such as ">= 0.85", of ``share``; "": none.
        more: everything else worth keeping, spreads among it.
    """

    name: str
    value: float | None
    unit: str
    share: float | None = None
    of: str = ""
    target: str = ""
    note: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none, or nothing was measured."""
        if not self.target or self.share is None:
            return None
        sense, bound = self.target.split()
        return self.share >= float(bound) if sense == ">=" else self.share <= float(bound)

    def as_json(self) -> dict[str, Any]:
        """Its fields, and ``met``."""
        return {**asdict(self), "met": self.met}


class Bench:
    """What a section measures with.

    Args:
        smoke: tiny shapes on the CPU, each thing once: whether it runs is all that counts.
        rows: where rows go as soon as they are known, as JSON lines: a section that fails later keeps them.
    """

    def __init__(self, *, smoke: bool, rows: Path) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda:0")
        self._rows = rows
        self._bandwidth: float | None = None
        torch.manual_seed(0)

    def tell(self, row: Row) -> None:
        """Keep a row; what a smoke run took is held to nothing."""
        if self.smoke:
            row = replace(row, target="")
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row.as_json()) + "\n")
        print(line_of(row), flush=True)

    def attempt(self, name: str, measure: Callable[[], None]) -> None:
        """Run one part of a section; what it fails with becomes a row, and the other parts go on."""
        try:
            measure()
        except Exception as error:  # noqa: BLE001  (whatever it is: it belongs into the result)
            self.tell(Row(name, None, "", note=f"failed: {type(error).__name__}: {str(error)[:300]}"))

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, calls: Sequence[Call], *, graph: bool = True) -> Times:
        """How long one of ``calls`` takes, run in a row over and over.

        They do the same work on different data, ROTATED_BYTES together or more. Each repeat runs all of them, between
        two events on the stream; with ``graph`` as one CUDA graph, so that no launch by the host is in the figure.
        """
        if self.device.type != "cuda":
            return _host_time(calls[0])
        for call in calls:
            call()
        self.wait()
        run = _captured(calls) if graph else _in_a_row(calls)
        run()
        self.wait()
        began_s = time.perf_counter()
        run()
        self.wait()
        once_s = time.perf_counter() - began_s
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(MEASURE_S / max(once_s, 1e-6))))
        events = [_event() for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.wait()
        return _times([a.elapsed_time(b) / 1e3 / len(calls) for a, b in pairwise(events)])

    @property
    def bandwidth(self) -> float:
        """Bytes a second, read and written together, of the better of a copy and an elementwise kernel; taken once."""
        if self._bandwidth is None:
            size = 2**14 if self.smoke else 2**30
            source = torch.ones(size // 4, dtype=torch.float32, device=self.device)
            target = torch.empty_like(source)
            ways: dict[str, Call] = {
                "copy": lambda: target.copy_(source),
                "elementwise": lambda: torch.add(source, 1.0, out=target),
            }
            found = {name: 2 * size / self.time([call]).median_s for name, call in ways.items()}
            self._bandwidth = max(found.values())
            rates = {f"{name}_gb_per_s": rate / 1e9 for name, rate in found.items()}
            self.tell(Row("limit: copy bandwidth, read and written", self._bandwidth / 1e9, "GB/s", more=rates))
        return self._bandwidth

    def product_rate(self, rows: int, inputs: int, outputs: int) -> float:
        """FLOP/s of a bfloat16 product [rows, inputs] x [outputs, inputs]^T of random numbers, as the model has it."""
        made = (torch.randn(size, inputs, device=self.device).bfloat16() for size in (rows, outputs))
        left, weight = made
        out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=self.device)
        took = self.time([lambda: torch.mm(left, weight.T, out=out)])
        rate = 2.0 * rows * inputs * outputs / took.median_s
        shape = f"{rows} x {inputs} x {outputs}"
        self.tell(Row(f"limit: bf16 product {shape}", rate / 1e12, "TFLOP/s", more=spread(took)))
        return rate

    def tell_bytes(self, name: str, took: Times, size: float, target: str = "", **more: Any) -> None:
        """A row of something that memory limits: microseconds, and its share of the copy bandwidth."""
        share = size / self.bandwidth / took.median_s
        more = {**spread(took), "gb_per_s": size / took.median_s / 1e9, **more}
        self.tell(Row(name, took.median_s * 1e6, "us", share, "copy bandwidth", target, more=more))

    def tell_flops(self, name: str, took: Times, flops: float, rate: float, target: str = "", **more: Any) -> None:
        """A row of something that arithmetic limits: microseconds, and its share of the products' rate."""
        more = {**spread(took), "tflop_per_s": flops / took.median_s / 1e12, **more}
        self.tell(
            Row(name, took.median_s * 1e6, "us", flops / rate / took.median_s, "bf16 products", target, more=more)
        )


def rotations(size_bytes: float, smoke: bool, most: int = 64) -> int:
    """How many pieces of data of this size a measurement goes round in."""
    return 1 if smoke else max(1, min(most, -(-ROTATED_BYTES // max(1, int(size_bytes)))))


def spread(took: Times) -> dict[str, float]:
    """For a row's ``more``."""
    return {"min_us": took.min_s * 1e6, "max_us": took.max_s * 1e6}


def line_of(row: Row) -> str:
    """A row as a line on the terminal."""
    if row.value is None:
        return f"{row.name}: {row.note}"
    share = "" if row.share is None else f", {row.share:.2f} of {row.of}" if row.of else f", {row.share:.2f}"
    verdict = {True: f" (target {row.target}: met)", False: f" (target {row.target}: MISSED)", None: ""}[row.met]
    return f"{row.name}: {row.value:.4g} {row.unit}{share}{verdict}{' ' + row.note if row.note else ''}"


def _times(seconds: Sequence[float]) -> Times:
    return Times(min(seconds), statistics.median(seconds), max(seconds))


def _host_time(call: Call) -> Times:
    began_s = time.perf_counter()
    call()
    return _times([time.perf_counter() - began_s])


def _in_a_row(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _captured(calls: Sequence[Call]) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
