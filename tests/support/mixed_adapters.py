"""Steps that mix random adapters of several ranks and the base, for tests of each backend beside torch."""

from __future__ import annotations

from typing import Any

import torch

from lab.testbed.random_adapter import random_adapter
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.config_parser import load_config
from tests.support.torch_model import BackendDriver

# Ranks of queries, keys and values (or of gate and up) of the adapter in each slot; the first one leaves some layers.
RANKS = ((3,), (16, 8, 5), (9, 16))
LEFT = ("layers.0.o", "layers.1.gate_up", "layers.1.qkv", "layers.0.experts.down", "layers.1.router")
# The slot of each sequence's adapter.
SLOTS = (2, -1, 0, 1, 0)
CUTS = ((0, 9), (9, 10), (10, 18))


def place_adapters(backend: Any, prepared: PreparedModel, *, experts: bool = False) -> None:
    """Packs and places the adapters of RANKS. With ``experts`` all have pairs for experts and routers."""
    config = load_config(prepared.folder)
    dtype = torch.bfloat16 if prepared.dtype == "bfloat16" else torch.float32
    for slot, ranks in enumerate(RANKS):
        weights = random_adapter(config, slot, ranks, dtype, leave=() if slot else LEFT, experts=experts)
        backend.adapters.place(slot, backend.adapters.pack(weights))


def with_adapters(driver: BackendDriver, *, experts: bool = False) -> BackendDriver:
    """A driver of a backend that has no adapters yet, with those of RANKS, as :func:`place_adapters` places them."""
    driver.backend.bind_adapters(len(RANKS), 16)
    place_adapters(driver.backend, driver.prepared, experts=experts)
    return driver


def mixed_steps(driver: BackendDriver, text: list[int]) -> torch.Tensor:
    """Logits of the last row of each sequence in each step of CUTS; their adapters are SLOTS."""
    numbers = [driver.sequences.add(adapter=slot)[0] for slot in SLOTS]
    return torch.stack([driver.step(*((number, text[begin:end]) for number in numbers)) for begin, end in CUTS])
