"""A checkpoint with a head although its config ties the head to the embedding."""

from __future__ import annotations

import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from tests.support.torch_model import BackendDriver


@pytest.mark.parametrize("other", [False, True])
def test_the_head_in_the_file_overrides_a_tied_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head.flip(0).contiguous() if other else head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = list(range(10, 40))
    with torch.inference_mode():
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = oracle(torch.tensor([text])).logits[0]
    driver = BackendDriver(prepare(ModelFlags(model=str(folder), dtype="float32")))
    found = driver.run_all(driver.sequences.add()[0], text, [7])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
