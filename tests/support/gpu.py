"""The device of the tests of GPU kernels: a CUDA device if there is one, else Triton's interpreter.

Import this before any module of ``pillion.kernels.gpu``: Triton decides when a kernel is defined.
"""

from __future__ import annotations

import os

import torch

NATIVE = torch.cuda.is_available()
if not NATIVE:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if NATIVE else "cpu")


def rounded(dtype: torch.dtype, roundings: int = 1) -> dict[str, float]:
    """rtol and atol for values of size 1 that were rounded to ``dtype`` so often.

    Triton's interpreter cuts bfloat16 off where a GPU rounds, so it is allowed twice as much.
    """
    unit = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    slack = roundings * unit * (1 if NATIVE or dtype != torch.bfloat16 else 2)
    return {"rtol": slack, "atol": slack}
