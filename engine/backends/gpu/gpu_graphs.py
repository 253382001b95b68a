"""CUDA graphs of whole steps, one per padded size.

A step's kernels read their work from the record on the device (:mod:`pillion.engine.backends.gpu.gpu_step`), and their
grids do not depend on it. So one graph serves every step of a size, with decodes, chunks or both, without piecewise
capture. vLLM needs a graph mode per kind of batch, because the grids of its attention kernels depend on the batch.

    sizes_for --> capture: each shape runs once, then is captured --> shape_of(step) --> run: replay
                     '-- out of time or memory: steps of missing sizes use the next larger graph, or none

Ranks capture together, shape by shape, and either all of them keep a graph or none does, because steps padded
differently would deadlock. Each rank first runs a shape without collectives, because a rank that runs out of memory
would leave the others blocked in the step.

Launching a step kernel by kernel takes long: 20 to 38 ms for the 32 layers of Llama 3 8B on the host of an H200, which
computes 1,200 tokens in that time. The process is blocked meanwhile, so large steps have graphs as well.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pillion.engine.backends.gpu.device_memory import event_on
from pillion.engine.backends.gpu.gpu_step import StepShape
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.gpu_ranks.rank_group import GpuRankGroup

# Larger steps are launched kernel by kernel.
MAX_GRAPH_TOKENS = 8192
# Larger sizes are captured last, because they gain the least.
FEW_TOKENS = 2048
# (step, end): sizes up to ``end`` tokens are multiples of ``step``. Padding is at most an eighth of a step, except for
# the smallest ones, which are memory-bound.
STEPS_UP_TO_TOKENS = ((8, 64), (64, 1024), (128, FEW_TOKENS), (256, 4096), (512, MAX_GRAPH_TOKENS))
# Max padding: computing more tokens would take longer than launching kernel by kernel.
MAX_PADDING_TOKENS = 1024
MAX_CAPTURE_S = 60.0

RunStep = Callable[[StepShape], torch.Tensor]


def sizes_for(max_tokens: int) -> tuple[int, ...]:
    """Return padded sizes up to ``max_tokens``, ascending: 1, 2, 4, 8, 16 ... 64, 128, 192 ... 1024, 1152 ..."""
    largest = min(max_tokens, MAX_GRAPH_TOKENS)
    sizes, begin = {1, 2, 4}, 0
    for step, end in STEPS_UP_TO_TOKENS:
        sizes.update(range(begin + step, end + 1, step))
        begin = end
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


class StepGraphs:
    """The CUDA graphs of a backend over one pool.

    Args:
        run: runs the step in the record, padded to a shape, with sampling; returns logits [samples, vocab].
        device: if not CUDA, nothing is captured, but steps are padded alike.
        eager: True to capture nothing.
        adapters: True if steps may have rows with adapters, which need separate graphs.
        ranks: the worker's other ranks, or None.
    """

    def __init__(
        self,
        run: RunStep,
        max_tokens: int,
        max_samples: int,
        device: torch.device,
        *,
        eager: bool,
        adapters: bool = False,
        ranks: GpuRankGroup | None = None,
    ) -> None:
        self._run = run
        self._sizes = sizes_for(max_tokens)
        self._max_samples = max_samples
        self._device = device
        self._eager = eager or device.type != "cuda"
        self._adapters = adapters
        self._ranks = ranks
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def shape_of(self, tokens: int, samples: int, chunks: bool, adapters: bool = False, vectors: int = 0) -> StepShape:
        """Return the shape to which a step is padded: that of the smallest captured graph that fits, or the step's own.
        Steps with ``vectors`` have no graphs."""
        if vectors:
            return StepShape(tokens, samples, chunks, adapters, vectors)
        at = bisect_left(self._sizes, tokens)
        for size in self._sizes[at:] if self._graphs or self._pads_without_graph else ():
            if size - tokens > MAX_PADDING_TOKENS:
                break
            # A graph with chunks also fits a step without: its chunk kernel then has no work.
            for shape in dict.fromkeys(self._shape(size, with_chunks, adapters) for with_chunks in (chunks, True)):
                if samples <= shape.samples and (self._pads_without_graph or shape in self._graphs):
                    return shape
        return StepShape(tokens, samples, chunks, adapters)

    def run(self, shape: StepShape) -> torch.Tensor:
        """Run the step in the record; return its logits, which the next step of this shape overwrites."""
        captured = self._graphs.get(shape)
        if captured is None:
            return self._run(shape)
        graph, logits = captured
        graph.replay()
        return logits

    def shapes(self) -> Iterator[StepShape]:
        """Yield the shapes to capture, the largest first, because all graphs share its memory."""
        *smaller, largest = self._sizes
        few = bisect_right(smaller, FEW_TOKENS)
        for size in (largest, *reversed(smaller[:few]), *smaller[few:]):
            for chunks in (True, False):
                # Steps without chunks sample all rows, so they have at most max_samples.
                if chunks or size <= self._max_samples:
                    for adapters in (True, False) if self._adapters else (False,):
                        yield self._shape(size, chunks, adapters)

    def capture(self, progress: Progress) -> None:
        """Capture all shapes, as far as MAX_CAPTURE_S and the memory allow. The record must be an empty step."""
        if self._eager:
            return
        began_s, pool = time.monotonic(), torch.cuda.graph_pool_handle()
        shapes = list(self.shapes())
        for number, shape in enumerate(shapes):
            if not self._agree(time.monotonic() - began_s <= MAX_CAPTURE_S and self._fits(shape)):
                progress(
                    f"CUDA graphs: {number} of {len(shapes)} in {MAX_CAPTURE_S:.0f} s and the remaining memory;"
                    " other steps run without"
                )
                return
            if number % 8 == 0:
                progress(f"CUDA graphs: {number} of {len(shapes)}")
            captured = self._capture_shape(shape, pool)
            if not self._agree(captured is not None):
                progress(
                    f"CUDA graphs: {number} of {len(shapes)} fit into the remaining memory; other steps run without"
                )
                return
            assert captured is not None
            self._graphs[shape] = captured
        progress(f"CUDA graphs: {len(shapes)} in {time.monotonic() - began_s:.1f} s")

    def _agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is True on all ranks."""
        return ok if self._ranks is None else self._ranks.agree(ok)

    def _fits(self, shape: StepShape) -> bool:
        """Return whether this rank has memory for a step of the shape, by running it without collectives; torch keeps
        the memory that it allocates."""
        if self._ranks is None:
            return True
        try:
            with self._ranks.no_collectives():
                self._run(shape)
        except torch.OutOfMemoryError:
            return False
        return True

    def _settle(self) -> None:
        """Wait for the device. Raises BackendLost if other ranks take too long."""
        if self._ranks is not None:
            self._ranks.wait(event_on(self._device))
        torch.cuda.synchronize(self._device)

    def _capture_shape(self, shape: StepShape, pool: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
        """Capture a graph of the shape; return it with its logits, None if memory runs out."""
        try:
            # First-use compilation and allocation must happen outside of the capture.
            self._run(shape)
            self._settle()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads of a program may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = self._run(shape)
        except torch.OutOfMemoryError:
            return None
        return graph, logits

    def close(self) -> None:
        """Release the CUDA graphs and their memory. Idempotent."""
        self._graphs.clear()

    @property
    def _pads_without_graph(self) -> bool:
        """True in Triton's interpreter: steps are padded without graphs, so that tests cover padding."""
        return self._device.type != "cuda"

    def _shape(self, size: int, chunks: bool, adapters: bool) -> StepShape:
        return StepShape(size, min(size, self._max_samples), chunks, adapters)
