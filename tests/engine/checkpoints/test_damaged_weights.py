"""Damaged weights of each kind of model are rejected with the file and the tensor's name."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pillion.config import ModelFlags
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints.prepare import prepare
from pillion.errors import ConfigError
from tests.support.damaged_weights import CHANGES
from tests.support.families import FAMILIES, make_model
from tests.support.hybrids import HYBRIDS

pytestmark = pytest.mark.usefixtures("own_cache")

# A model of each kind, and a tensor of its second file that other kinds do not have.
KINDS = {
    "dense": ("llama-mqa-biases", "model.layers.1.self_attn.v_proj.bias"),
    "experts": ("qwen3-moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
    "stacked experts": ("gpt-oss", "model.layers.1.mlp.experts.gate_up_proj"),
    "a router's bias": ("deepseek-v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
    "latents": ("mistral4", "model.layers.1.self_attn.kv_b_proj.weight"),
    "a latents' norm": ("glm4-moe-lite", "model.layers.1.self_attn.kv_a_layernorm.weight"),
    "sinks": ("gpt-oss", "model.layers.1.self_attn.sinks"),
    "turned matrices": ("gpt2", "transformer.h.1.attn.c_attn.weight"),
    "rates by rows": ("kimi-linear", "model.layers.2.self_attn.dt_bias"),
    "decays": ("kimi-linear", "model.layers.2.self_attn.A_log"),
    "a convolution's part": ("kimi-linear", "model.layers.2.self_attn.k_conv1d.weight"),
}


SHORT = ("stacked experts", "latents", "decays")


@pytest.fixture(scope="module")
def shards(own_cache: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Make each model once, in two files."""
    made: dict[str, pathlib.Path] = {}

    def make(family: str) -> pathlib.Path:
        if family not in made:
            folder, _ = make_model(tmp_path_factory.mktemp("model") / "model", (FAMILIES | HYBRIDS)[family])
            tensors = load_file(folder / "model.safetensors")
            second = {name for name in tensors if ".1." in name or ".2." in name}
            for file, names in (("one", tensors.keys() - second), ("two", second)):
                save_file({name: tensors[name] for name in names}, folder / f"{file}.safetensors")
            (folder / "model.safetensors").unlink()
            index = {"weight_map": {name: f"{'two' if name in second else 'one'}.safetensors" for name in tensors}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            made[family] = folder
        return made[family]

    return make


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("stacked experts", "latents", "decays") else pytest.mark.long)
        for kind in KINDS
    ],
)
@pytest.mark.parametrize("change", CHANGES)
def test_the_file_and_the_tensor_are_named(
    kind: str, change: str, shards: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    family, name = KINDS[kind]
    folder = shutil.copytree(shards(family), tmp_path / "model")
    file = folder / "two.safetensors"
    tensors = load_file(file)
    alter, words = CHANGES[change]
    if (found := alter(tensors.pop(name))) is not None:
        tensors[name] = found
    save_file(tensors, file)
    expected = words.format(folder=re.escape(str(folder)), file=re.escape(str(file)), name=re.escape(name))
    with pytest.raises(ConfigError, match=expected):
        TorchBackend(prepare(ModelFlags(model=str(folder), dtype="float32")), 16, 0)


def test_a_shard_that_is_cut_short_is_named(shards: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(shards("mistral4"), tmp_path / "model")
    file = folder / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"{re.escape(str(file))} \(.* bytes\) is truncated"):
        TorchBackend(prepare(ModelFlags(model=str(folder), dtype="float32")), 16, 0)
    file.unlink()
    with pytest.raises(ConfigError, match=r"two\.safetensors"):
        TorchBackend(prepare(ModelFlags(model=str(folder), dtype="float32")), 16, 0)
