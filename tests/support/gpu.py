"""Device of the GPU kernel tests: a CUDA device if there is one, else Triton's interpreter.

Import this before any module of ``pillion.kernels.gpu``: Triton decides when a kernel is defined.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

NATIVE = torch.cuda.is_available()
if not NATIVE:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if NATIVE else "cpu")


def rounded(dtype: torch.dtype, roundings: int = 1) -> dict[str, float]:
    """Return rtol and atol for values of size 1 after this number of roundings to ``dtype``.

    Triton's interpreter truncates bfloat16 instead of rounding, so its tolerance is doubled.
    """
    unit = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    slack = roundings * unit * (1 if NATIVE or dtype != torch.bfloat16 else 2)
    return {"rtol": slack, "atol": slack}


def add_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's products independent of the tile's shape, element by element.

    Its own products are numpy's, and a BLAS chooses its kernel by the shapes: on some processors a row's bits then
    depend on the number of rows beside it. On a GPU they do not.
    """
    if NATIVE:
        return
    from triton.runtime import interpreter

    def create_dot(
        self: Any, left: Any, right: Any, start: Any, input_precision: object, max_num_imprecise_acc: object
    ) -> Any:
        product = np.einsum("mk,kn->mn", left.data, right.data, dtype=start.data.dtype)
        return interpreter.TensorHandle(product + start.data, start.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
