"""MXFP4 experts: their values and logits match transformers' reading of the same tensors."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.checkpoints.checkpoint import decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix
from tests.support.cpu_model import CpuDriver, needs_kernels
from tests.support.families import FAMILIES, PROMPT_TOKENS, make_model, tokens_of
from tests.support.quantized import experts_in_mxfp4
from tests.support.rank_model import RankGroup
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")

TEXT = tokens_of(PROMPT_TOKENS, 2)
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folders(own_cache, tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """Return a folder whose experts are random blocks and powers of two, and one with transformers' values of them.
    Some groups of the first layer are nearly 0, with scales too small for float16."""
    few, wide = (tmp_path_factory.mktemp(name) / "model" for name in ("few", "wide"))
    make_model(wide, {**FAMILIES["gpt-oss"], "intermediate_size": 96})
    experts_in_mxfp4(wide, few, tiny=EXPERTS)
    return few, wide


@pytest.fixture(scope="module")
def wanted(folders) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([TEXT])).logits[0].float()
    assert logits.std() > 0.5
    return logits


def prepared(folder: pathlib.Path, dtype: str = "float32"):
    return prepare(ModelFlags(model=str(folder), dtype=dtype))


def run(driver: BackendDriver, chunks=(33, 1, 2)) -> torch.Tensor:
    return driver.run_all(driver.sequences.add()[0], TEXT, chunks)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_mxfp4_values_match_transformers(folders):
    few, wide = folders
    config, codes = load_config(few), 0
    assert config.quantization.words == "mxfp4, 4-bit floats in groups of 32"
    with open_checkpoint(few, config) as ours, open_checkpoint(wide, load_config(wide)) as theirs:
        for key in decoder_tensors(config):
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(ours.load(key, dtype), theirs.load(key, dtype)), key
            codes += isinstance(ours.load_matrix(key, torch.float32), QuantizedMatrix)
    assert codes == 3 * 5 * 2


def test_logits_on_torch(folders, wanted):
    close(run(BackendDriver(prepared(folders[0]))), wanted)
    few, wide = (run(BackendDriver(prepared(folder, "bfloat16"))) for folder in folders)
    assert torch.equal(few, wide), "bfloat16 holds the numbers"


@needs_kernels
def test_logits_on_the_cpu_kernels(folders, wanted):
    driver = CpuDriver(prepared(folders[0]))
    close(run(driver), wanted)
    weights = driver.backend.model.weights
    kinds = [weights.linear(f"layers.{index}.experts.gate_up").kind for index in range(3)]
    assert kinds == ["fp4_e2m1", "fp4_e2m1_half", "fp4_e2m1_half"]
    few, wide = (run(CpuDriver(prepared(folder, "bfloat16"))) for folder in folders)
    torch.testing.assert_close(few, wide, atol=0.05 * float(wanted.std()), rtol=0)


@needs_kernels
def test_logits_of_two_ranks(folders, wanted):
    ready = prepared(folders[0])
    group = RankGroup(ready, 2)
    close(run(BackendDriver(ready, backend=group)), wanted)
    group.close()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (f"{EXPERTS}_scales", lambda tensor: None, "gate_up_proj_scales is missing"),
        (f"{EXPERTS}_blocks", lambda tensor: None, "gate_up_proj_blocks is missing"),
        (f"{EXPERTS}_blocks", lambda tensor: tensor[..., :8], r"gate_up_proj_blocks is \[5, 192, 2, 8\]"),
        (f"{EXPERTS}_scales", lambda tensor: tensor.float(), "gate_up_proj_scales is F32, not U8"),
        (f"{EXPERTS}_scales", lambda tensor: tensor.fill_(255), "gate_up_proj_scales contains NaN"),
        (f"{EXPERTS}_bias", lambda tensor: None, "lacks model.layers.0.mlp.experts.gate_up_proj_bias"),
    ],
)
def test_damaged_experts_are_refused_by_name(folders, tmp_path, name, change, words):
    folder = shutil.copytree(folders[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    found = change(tensors.pop(name))
    if found is not None:
        tensors[name] = found.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        BackendDriver(prepared(folder))


def test_groups_must_divide_the_inputs(folders, tmp_path):
    folder = shutil.copytree(folders[0], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 80}))
    with pytest.raises(ConfigError, match="gate_up_proj: groups of 32 do not divide its 80 inputs"):
        BackendDriver(prepared(folder))
