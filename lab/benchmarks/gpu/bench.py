"""Shared by all sections: rows of a result, the device, and timers of its kernels."""

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

# Bytes that a measurement rotates through, several times the L2 cache (60 MB on an H200), so that it never hits it.
ROTATED_BYTES = 4 * 64 * 2**20
MIN_REPEATS, MAX_REPEATS = 10, 200
# Seconds of one measurement.
MEASURE_S = 0.5

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: minimum, median and maximum of the repeats."""

    min_s: float
    median_s: float
    max_s: float

    def scaled(self, factor: float) -> Times:
        return Times(self.min_s * factor, self.median_s * factor, self.max_s * factor)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a section.

    Attributes:
        name: unique within the section.
        value, unit: the figure; None with the reason in ``note``.
        share: the figure over its limit, or the time at the limit over the measured time; ``of`` names the limit.
        target: of ``share``, e.g. ">= 0.85"; "" for none.
        more: further figures, e.g. spreads.
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
        """True if the target is met; None without a target or a figure."""
        if not self.target or self.share is None:
            return None
        sense, bound = self.target.split()
        return self.share >= float(bound) if sense == ">=" else self.share <= float(bound)

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and ``met``."""
        return {**asdict(self), "met": self.met}


def failure(name: str, error: Exception) -> Row:
    return Row(name, None, "", note=f"failed: {type(error).__name__}: {str(error)[:300]}")


class Bench:
    """The tools of a section: its device, its timers, and the file of its rows.

    Args:
        smoke: run everything once with tiny shapes on the CPU.
        rows: file to which each row is written at once as a line of JSON, in case the section fails later.
        measure_s: seconds of one measurement, after its warm-up.
        only: words; attempt only measurements whose names contain one of them. (): all.
    """

    def __init__(self, *, smoke: bool, rows: Path, measure_s: float = MEASURE_S, only: Sequence[str] = ()) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda:0")
        self._rows = rows
        self._measure_s = measure_s
        self.only = only
        self._bandwidth: float | None = None
        torch.manual_seed(0)

    def report(self, row: Row) -> None:
        """Write and print a row. Rows of a smoke run have no target."""
        if self.smoke:
            row = replace(row, target="")
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row.as_json()) + "\n")
        print(line_of(row), flush=True)

    def attempt(self, name: str, measure: Callable[[], None]) -> None:
        """Run one measurement of a section; a failure becomes a row, and the section continues."""
        if self.only and not any(word in name for word in self.only):
            return
        try:
            measure()
        except Exception as error:  # noqa: BLE001  (whatever it is: it belongs into the result)
            self.report(failure(name, error))

    def wait(self) -> None:
        """Synchronize the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, calls: Sequence[Call], *, graph: bool = True) -> Times:
        """Measure the seconds of one of ``calls``.

        The calls do the same work on different data of at least ROTATED_BYTES. Each repeat runs all of them between two
        events on the stream; with ``graph`` as one CUDA graph, without the host's launches.
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
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(self._measure_s / max(once_s, 1e-6))))
        events = [_event() for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.wait()
        return _times([a.elapsed_time(b) / 1e3 / len(calls) for a, b in pairwise(events)])

    @property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of the faster of a copy and an elementwise kernel; measured once."""
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
            self.report(Row("limit: copy bandwidth, read and written", self._bandwidth / 1e9, "GB/s", more=rates))
        return self._bandwidth

    def product_rate(self, rows: int, inputs: int, outputs: int) -> float:
        """Measure the FLOP/s of a bfloat16 product [rows, inputs] x [outputs, inputs]^T of random numbers."""
        made = (torch.randn(size, inputs, device=self.device).bfloat16() for size in (rows, outputs))
        left, weight = made
        out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=self.device)
        times = self.time([lambda: torch.mm(left, weight.T, out=out)])
        rate = 2.0 * rows * inputs * outputs / times.median_s
        shape = f"{rows} x {inputs} x {outputs}"
        self.report(Row(f"limit: bf16 product {shape}", rate / 1e12, "TFLOP/s", more=spread(times)))
        return rate

    def report_bytes(self, name: str, times: Times, size: float, target: str = "", **more: Any) -> None:
        """Report a memory-bound figure: microseconds, and the share of the copy bandwidth."""
        share = size / self.bandwidth / times.median_s
        more = {**spread(times), "gb_per_s": size / times.median_s / 1e9, **more}
        self.report(Row(name, times.median_s * 1e6, "us", share, "copy bandwidth", target, more=more))

    def report_flops(self, name: str, times: Times, flops: float, rate: float, target: str = "", **more: Any) -> None:
        """Report a compute-bound figure: microseconds, and the share of the products' rate."""
        more = {**spread(times), "tflop_per_s": flops / times.median_s / 1e12, **more}
        self.report(
            Row(name, times.median_s * 1e6, "us", flops / rate / times.median_s, "bf16 products", target, more=more)
        )


def rotations(size_bytes: float, smoke: bool, most: int = 64) -> int:
    """Return the number of copies of data of this size to rotate through."""
    return 1 if smoke else max(1, min(most, -(-ROTATED_BYTES // max(1, int(size_bytes)))))


def spread(times: Times) -> dict[str, float]:
    """Return the extremes in us, for a row's ``more``."""
    return {"min_us": times.min_s * 1e6, "max_us": times.max_s * 1e6}


def line_of(row: Row) -> str:
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
