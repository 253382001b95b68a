"""Text models inside vision-language models, against transformers, which makes and saves the whole models."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import parse_config
from pillion.engine.models.families import FAMILIES, TEXT_OF
from pillion.engine.models.family_rows import TEXT_AS
from pillion.errors import ConfigError
from tests.support.damaged_weights import CHANGES
from tests.support.families import tokens_of
from tests.support.hybrids import StateDriver
from tests.support.text_parts import WHOLE, as_published, whole_model
from tests.support.torch_model import BackendDriver

LONG = set(WHOLE) - {"qwen2_vl", "glm4v", "internvl", "idefics3"}


def saved(folder, name: str) -> torch.nn.Module:
    """Save a random model with a tokenizer like published ones; return it."""
    model = whole_model(name)
    save_model(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    tensors = as_published(name, load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in WHOLE])
def test_text_logits_match_the_whole_model(name, tmp_path, own_cache):
    model, text = saved(tmp_path, name), tokens_of(40, 2)
    text = [token for token in text if token > 8]
    with torch.inference_mode():
        # Cohere's whole models in transformers ignore the logit scale of their text models.
        factor = getattr(model.config.text_config, "logit_scale", 1.0)
        wanted = model(torch.tensor([text])).logits[0].float() * factor
    carries = parse_config(json.loads((tmp_path / "config.json").read_text())).linear is not None
    kind = StateDriver if carries and name != "lfm2_vl" else BackendDriver
    driver = kind(prepare(ModelFlags(model=str(tmp_path), dtype="float32")))
    torch.testing.assert_close(driver.run_all(driver.sequences.add()[0], text, [17]), wanted, atol=1e-3, rtol=1e-4)


def test_an_old_config_of_qwen_2_vl_has_the_text_model_s_keys_beside_the_others(tmp_path, own_cache):
    model, text = saved(tmp_path, "qwen2_vl"), tokens_of(40, 3)
    text = [token for token in text if token > 8]
    raw = json.loads((tmp_path / "config.json").read_text())
    flat = {**raw.pop("text_config"), **raw, "vision_token_id": 7}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(flat))
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0].float()
    driver = BackendDriver(prepare(ModelFlags(model=str(tmp_path), dtype="float32")))
    torch.testing.assert_close(driver.run_all(driver.sequences.add()[0], text, [17]), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"qwen2: config\.json has residual_scaling = 0.5"):
        parse_config({**flat, "residual_scaling": 0.5})


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_a_rotary_base_that_a_text_config_leaves_out_is_that_of_transformers(name):
    raw = CONFIG_MAPPING[name]().to_dict()
    wanted = raw["text_config"].pop("rope_parameters")["rope_theta"]
    assert {rope.theta for rope in parse_config(raw).ropes} == {wanted}


def test_unknown_options_are_refused_by_name(tmp_path, own_cache):
    saved(tmp_path, "idefics3")
    tensors = load_file(tmp_path / "model.safetensors")
    other = {"model.text_model.layers.1.self_attn.k_sum.weight": torch.ones(3)}
    save_file({**tensors, **other}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.safetensors holds model\.layers\.1\.self_attn\.k_sum\.weight"):
        BackendDriver(prepare(ModelFlags(model=str(tmp_path), dtype="float32")))
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"idefics3: .*text_config of model_type = 'mamba'"):
        parse_config({**raw, "text_config": {**raw["text_config"], "model_type": "mamba"}})
    with pytest.raises(ConfigError, match=r"idefics3: config\.json has pooled = 3"):
        parse_config({**raw, "pooled": 3})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "idefics3" else pytest.mark.long) for name in WHOLE]
)
def test_damaged_weights_are_named_by_their_file_and_tensor(name, tmp_path, own_cache):
    saved(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    prefixes = ("model.language_model.", "language_model.", "model.text_model.", "model.layers.")
    part = max(part for part in tensors if part.startswith(prefixes) and re.search(r"layers\.1\..*weight", part))
    # Detection of damage does not depend on the model; its name in the error does.
    for change in CHANGES if name not in LONG else ("missing", "no numbers"):
        alter, words = CHANGES[change]
        damaged = {**tensors, part: alter(tensors[part].clone())}
        save_file({key: one for key, one in damaged.items() if one is not None}, file, metadata={"format": "pt"})
        # A missing tensor has its name without the vision prefix.
        shown = ".*" + re.escape(part[part.index("layers.") :]) if change == "missing" else re.escape(part)
        expected = words.format(folder=re.escape(str(tmp_path)), file=re.escape(str(file)), name=shown)
        with pytest.raises(ConfigError, match=expected):
            BackendDriver(prepare(ModelFlags(model=str(tmp_path), dtype="float32")))


def test_every_nested_text_model_has_a_family():
    assert set(WHOLE) == set(TEXT_OF)
    kinds = {kind for one in TEXT_OF.values() for kind in one}
    assert set(TEXT_AS) < kinds
    assert {TEXT_AS[kind][0] if kind in TEXT_AS else kind for kind in kinds} <= set(FAMILIES)
