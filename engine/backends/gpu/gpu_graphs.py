"""CUDA graphs of whole steps: recorded once per padded size, replayed by one call.

A step's kernels read what to do from the record on the device (:mod:`pillion.engine.backends.gpu.gpu_step`), and
their grids do not depend
on it. So one graph serves every step of a size, with decodes, chunks or both: nothing is captured piecewise, and a
mixed step costs the host as little as one of decodes alone. vLLM needs a graph mode per kind of batch because its
attention kernels' grids follow the batch.

    sizes_for --> warm_up: each shape runs once, then is captured, largest first --> find(step) --> replay
                     '-- out of time: the sizes that are missing run as the next larger one, or without a graph

Steps beyond MAX_GRAPH_TOKENS compute for so long that launching kernel by kernel hides behind them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pillion.engine.backends.gpu.gpu_step import StepShape
from pillion.engine.checkpoints.model_files import Progress

# A step of more tokens is launched kernel by kernel.
MAX_GRAPH_TOKENS = 512
# Sizes are multiples of this from here on; below, those that small batches have.
SIZE_STEP_TOKENS = 8
COARSE_STEP_TOKENS = 64
FINE_UP_TO_TOKENS = 64
SMALLEST_SIZES = (1, 2, 4)
# Longest time that capturing may take when a worker starts.
MAX_CAPTURE_S = 60.0

Run = Callable[[StepShape], torch.Tensor]


def sizes_for(max_tokens: int) -> tuple[int, ...]:
    """Padded sizes up to ``max_tokens``, rising: 1, 2, 4, 8, 16 ... 64, 128, 192 ..."""
    most = min(max_tokens, MAX_GRAPH_TOKENS)
    fine = range(SIZE_STEP_TOKENS, FINE_UP_TO_TOKENS + 1, SIZE_STEP_TOKENS)
    coarse = range(FINE_UP_TO_TOKENS + COARSE_STEP_TOKENS, MAX_GRAPH_TOKENS + 1, COARSE_STEP_TOKENS)
    sizes = {size for size in (*SMALLEST_SIZES, *fine, *coarse) if size < most}
    return tuple(sorted(sizes | {most}))


class StepGraphs:
    """Of one backend and one pool: graphs hold its address.

    Args:
        run: the forward pass of a shape over the record on the device; gives logits [samples, vocab].
        max_tokens, max_samples: of a step.
        device: graphs are for CUDA; elsewhere every step runs as it is, padded alike.
        eager: capture nothing.
    """

    def __init__(self, run: Run, max_tokens: int, max_samples: int, device: torch.device, *, eager: bool) -> None:
        self._run = run
        self._sizes = sizes_for(max_tokens)
        self._max_samples = max_samples
        self._device = device
        self._eager = eager or device.type != "cuda"
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def shape_of(self, tokens: int, samples: int, chunks: bool) -> StepShape:
        """The shape that a step runs as: that of a graph where one fits, else its own."""
        at = bisect_left(self._sizes, tokens)
        for size in self._sizes[at:] if self._graphs or self._padded_anyway else ():
            # The launch for chunks finds nothing to do in a step without any.
            for shape in dict.fromkeys((self._shape(size, chunks), self._shape(size, True))):
                if samples <= shape.samples and (self._padded_anyway or shape in self._graphs):
                    return shape
        return StepShape(tokens, samples, chunks)

    def run(self, shape: StepShape) -> torch.Tensor:
        """Logits of a step whose record is on its way; the next run of the same shape writes there again."""
        found = self._graphs.get(shape)
        if found is None:
            return self._run(shape)
        graph, logits = found
        graph.replay()
        return logits

    def shapes(self) -> Iterator[StepShape]:
        """What is captured, largest first: the graphs share memory, and the first one asks for the most."""
        for size in reversed(self._sizes):
            for chunks in (True, False):
                # A step of decodes alone has as many rows as it has sequences.
                if chunks or size <= self._max_samples:
                    yield self._shape(size, chunks)

    def capture(self, progress: Progress) -> None:
        """Captures all shapes, or as many as MAX_CAPTURE_S allows. The record on the device must be harmless."""
        if self._eager:
            return
        began_s, pool = time.monotonic(), torch.cuda.graph_pool_handle()
        shapes = list(self.shapes())
        for number, shape in enumerate(shapes):
            if time.monotonic() - began_s > MAX_CAPTURE_S:
                progress(f"CUDA graphs: {number} of {len(shapes)} in {MAX_CAPTURE_S:.0f} s, the rest runs without")
                return
            if number % 8 == 0:
                progress(f"CUDA graphs: {number} of {len(shapes)}")
            try:
                self._graphs[shape] = self._captured(shape, pool)
            except torch.OutOfMemoryError:
                progress(f"CUDA graphs: {number} of {len(shapes)} fit into what the pool leaves, the rest runs without")
                return
        progress(f"CUDA graphs: {len(shapes)} in {time.monotonic() - began_s:.1f} s")

    def _captured(self, shape: StepShape, pool: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        # Whatever is compiled, tuned or allocated on first use happens before the capture.
        self._run(shape)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile: those of a program that has an LLM in it.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = self._run(shape)
        return graph, logits

    def close(self) -> None:
        """Lets go of graphs and their memory. Idempotent."""
        self._graphs.clear()

    @property
    def _padded_anyway(self) -> bool:
        """In the interpreter steps are padded as graphs would have them, so that tests see padding."""
        return self._device.type != "cuda"

    def _shape(self, size: int, chunks: bool) -> StepShape:
        return StepShape(size, min(size, self._max_samples), chunks)
