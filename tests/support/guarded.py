"""Guard regions around a kernel's output: an overrun is detected, in the interpreter and on a device alike."""

from __future__ import annotations

import torch

from tests.support.gpu import DEVICE

# Elements on each side; more than one row of the tests' shapes.
MARGIN = 4096
MARK = 77


class Guarded:
    """A contiguous tensor ``inside`` between two margins, filled with a sentinel."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        count = torch.Size(shape).numel()
        self.whole = torch.full((count + 2 * MARGIN,), MARK, dtype=dtype, device=DEVICE)
        self.inside = self.whole[MARGIN : MARGIN + count].view(shape)

    def margins_are_whole(self) -> bool:
        return bool((self.whole[:MARGIN] == MARK).all() and (self.whole[-MARGIN:] == MARK).all())
