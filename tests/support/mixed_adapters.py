"""Steps that mix random adapters of several ranks and the base model, for comparing each backend with torch."""

from __future__ import annotations

from typing import Any

import torch

from lab.testbed.random_adapter import random_adapter
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.config_parser import load_config
from tests.support.torch_model import BackendDriver

# Ranks of queries, keys and values (or of gate and up) by slot; the first adapter omits some layers.
RANKS = ((3,), (16, 8, 5), (9, 16))
LEFT = ("layers.0.o", "layers.1.gate_up", "layers.1.qkv", "layers.0.experts.down", "layers.1.router")
SLOTS = (2, -1, 0, 1, 0)
CUTS = ((0, 9), (9, 10), (10, 18))


def place_adapters(backend: Any, prepared: PreparedModel, *, experts: bool = False) -> None:
    """Pack and place the adapters of RANKS. With ``experts`` all have pairs for experts and routers."""
    config = load_config(prepared.folder)
    dtype = torch.bfloat16 if prepared.dtype == "bfloat16" else torch.float32
    for slot, ranks in enumerate(RANKS):
        weights = random_adapter(config, slot, ranks, dtype, leave=() if slot else LEFT, experts=experts)
        backend.adapters.place(slot, backend.adapters.pack(weights))


def with_adapters(driver: BackendDriver, *, experts: bool = False) -> BackendDriver:
    """Return a driver of a backend without adapters, with those of RANKS placed by :func:`place_adapters`."""
    driver.backend.bind_adapters(len(RANKS), 16)
    place_adapters(driver.backend, driver.prepared, experts=experts)
    return driver


def mixed_steps(driver: BackendDriver, text: list[int]) -> torch.Tensor:
    """Return the logits of each sequence's last row in each step of CUTS, with adapters SLOTS."""
    numbers = [driver.sequences.add(adapter=slot)[0] for slot in SLOTS]
    return torch.stack([driver.step(*((number, text[begin:end]) for number in numbers)) for begin, end in CUTS])
