"""Kinds of damage to a checkpoint's tensor, and the error message of each."""

from __future__ import annotations

from collections.abc import Callable

import torch

# ``folder``, ``file`` and ``name`` are replaced by the tensor's location, escaped; a change to None removes it.
CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "missing": (lambda _: None, r"{folder} lacks {name}, which a \S+ model needs"),
    "another shape": (lambda tensor: tensor[:-1].clone(), r"{file}: {name} is \[.*\], but config\.json requires \["),
    "another type": (
        lambda tensor: tensor.to(torch.int16),
        r"{file}: {name} is I16; only F64, F32, F16, BF16 are supported",
    ),
    "no numbers": (lambda tensor: tensor.fill_(torch.nan), r"{file}: {name} contains NaN or infinities in float32"),
}
