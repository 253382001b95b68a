"""Logits of a classifier's labels from the vector of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


class Labeller(Protocol):
    """Head that computes the logits of a classifier's labels."""

    def logits(self, vector: Float32) -> Float32:
        """Return the logits [labels] of a text's vector [hidden]."""


@dataclass(frozen=True, slots=True)
class VectorHead:
    """A classifier's head: one row of ``weight`` [labels, hidden], float32, per label."""

    weight: Float32

    def logits(self, vector: Float32) -> Float32:
        """Return the logits [labels] of a vector [hidden], each summed separately in float64, so that its bits depend
        on the vector only."""
        logits: Float32 = (self.weight.astype(np.float64) * vector).sum(1).astype(np.float32)
        return logits
