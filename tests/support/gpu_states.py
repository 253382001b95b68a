"""Texts whose states are in scattered slots of a pool, each in two sets of slots: a step reads one and writes the
other."""

from __future__ import annotations

from tests.support.gpu import DEVICE  # isort: skip  (before the kernels)

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pillion.engine.backends.gpu.gpu_step import StepShape
from pillion.engine.gpu_states.state_record import StateRecord
from pillion.engine.models.state_layout import state_layout
from pillion.kernels.gpu_states.state_places import StepOfStates
from pillion.kernels.state_pieces import CHUNK
from pillion.kernels.step import LayerState, StateSlots
from tests.support.batches import Sequences

# Most pieces fit into the smaller blocks, so that such a state spans several.
BLOCK_BYTES, MAX_TOKENS = (4096, 16384), 48


@dataclass(frozen=True)
class PiecePlaces:
    """Places of the pieces of a layer's state, int32 [pieces, 2]: pages, and offsets in values."""

    inputs: torch.Tensor
    memory: torch.Tensor
    sides: torch.Tensor


class TextsWithStates:
    """Texts of a model with one layer, and their states after their past steps. Unwritten memory is NaN."""

    def __init__(self, state: LayerState, texts: int) -> None:
        layouts = ((state_layout([state], size, CHUNK), size) for size in BLOCK_BYTES)
        layout, block_bytes = next((layout, size) for layout, size in layouts if layout is not None)
        (pieces,) = layout.layers
        assert pieces is not None
        self._state, pages = state, -(-layout.nbytes // block_bytes)
        parts = ([(page, at // 4) for page, at in part] for part in (pieces.inputs, pieces.memory, pieces.sides))
        tensors = (torch.tensor(part, dtype=torch.int32, device=DEVICE).view(-1, 2) for part in parts)
        self.places = PiecePlaces(*tensors)
        order = np.random.default_rng(texts).permutation(2 * texts * pages + 1).astype(np.int32)
        self._slots = [list(each) for each in order[1:].reshape(texts, 2, pages)]
        self.pool = torch.full((len(order), block_bytes // 4), torch.nan, device=DEVICE)
        self._record = StateRecord(self.pool, MAX_TOKENS, texts + 1, pages, DEVICE)
        self._record.clear()
        self._sequences = Sequences(100, 16)
        self._sequences.add(texts)
        self._lengths = [0] * texts

    def step(
        self, parts: Sequence[tuple[int, int]], padding: int = 0
    ) -> tuple[StepOfStates, list[tuple[int, int, int]]]:
        """Begin a step of some tokens of some texts; return the kernels' input, and each part's text and token range.
        The texts' states are then those after the step."""
        mine = [(text, self._lengths[text], self._lengths[text] + count) for text, count in parts]
        reads = [self._slots[text][0] if begin else self._slots[text][0] * 0 - 1 for text, begin, _ in mine]
        writes = [self._slots[text][1] for text, _, _ in mine]
        batch = self._sequences.step([(text, [0] * count) for text, count in parts])
        states = StateSlots(np.stack(reads), np.stack(writes))
        self._record.check(states, len(parts))
        self._record.send(replace(batch, states=states), StepShape(batch.num_tokens + padding, 0, chunks=True))
        for text, _, end in mine:
            self._slots[text].reverse()
            self._lengths[text] = end
        return self._record.step, mine

    def inputs(self, text: int) -> torch.Tensor:
        """Return the last inputs [tokens, channels] of a text."""
        tokens, channels = self._state.inputs
        pieces = self._pieces(text, self.places.inputs, tokens, 64)
        return torch.cat(pieces, 1)[:, :channels] if pieces else torch.zeros(tokens, channels)

    def memory(self, text: int) -> torch.Tensor:
        """Return the matrices [heads, rows, columns] of a text at the begin of its last chunk."""
        if not self._state.memory:
            return torch.zeros(0)
        heads, rows, columns = self._state.memory
        depth, width = (columns, rows) if self._state.transposed else (rows, columns)
        pieces = self._pieces(text, self.places.memory, depth, 16)
        each = width // 16
        found = torch.stack([torch.cat(pieces[head * each : head * each + each], 1) for head in range(heads)])
        return found.mT if self._state.transposed else found

    def _pieces(self, text: int, places: torch.Tensor, rows: int, columns: int) -> list[torch.Tensor]:
        slots = self._slots[text][0]
        return [
            self.pool[slots[page], at : at + rows * columns].view(rows, columns).clone() for page, at in places.tolist()
        ]
