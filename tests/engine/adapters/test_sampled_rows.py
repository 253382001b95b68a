"""Adapters on the rows that continue after the last attention, for each family on torch."""

from __future__ import annotations

import pytest
import torch

from lab.testbed.random_adapter import random_adapter
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from tests.support.families import FAMILIES, FIRST, OF_LATENTS, make_model, tokens_of
from tests.support.torch_model import BackendDriver

# `make test` runs the families that write latents, and one for each way after attention.
SHORT = {*OF_LATENTS, "llama-gqa-tied", "gemma4", "cohere", "gpt-oss", "qwen2-moe"}
CASES = [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in {*FIRST.values(), *OF_LATENTS}]


@pytest.mark.parametrize("family", sorted(CASES, key=lambda case: case.values[0]))
def test_a_prompt_in_one_step_matches_one_token_at_a_time(family, tmp_path):
    """A step of one row drops no rows after attention, so it is the reference."""
    prepared = prepare(make_model(tmp_path / "model", FAMILIES[family])[1])
    driver, config = BackendDriver(prepared), load_config(prepared.folder)
    driver.backend.bind_adapters(2, 16)
    for slot in (0, 1):
        weights = random_adapter(config, slot, (3, 16), torch.float32, experts=True)
        driver.backend.adapters.place(slot, driver.backend.adapters.pack(weights))
    texts = {slot: tokens_of(count, slot + 2) for slot, count in ((1, 1), (-1, 2), (0, 9))}
    wanted = []
    for slot, text in texts.items():
        (alone,) = driver.sequences.add(adapter=slot)
        wanted.append([driver.step((alone, [token])) for token in text][-1])
    together = [(driver.sequences.add(adapter=slot)[0], text) for slot, text in texts.items()]
    found, expected = driver.step(*together), torch.cat(wanted)
    torch.testing.assert_close(found, expected, atol=1e-3 * float(expected.std()), rtol=1e-3)
