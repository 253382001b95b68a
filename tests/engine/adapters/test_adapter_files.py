"""Adapter files: rejected by name if invalid or unsupported; the digest covers what changes results."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.testbed.random_adapter import random_adapter_folder
from pillion.engine.adapters.adapter_files import AdapterFiles, modules
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.host.adapter_folders import MAX_HEADER_BYTES
from tests.support.adapters import edit_config, edit_tensors, make_adapter
from tests.support.families import FAMILIES, make_model

ATTENTION_OF_LAYER_0 = "base_model.model.model.layers.0.self_attn."
Q_A, Q_B = f"{ATTENTION_OF_LAYER_0}q_proj.lora_A.weight", f"{ATTENTION_OF_LAYER_0}q_proj.lora_B.weight"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), FAMILIES["llama-gqa-tied"])[0]


@pytest.fixture(scope="module")
def good(model_folder, tmp_path_factory):
    config = {"r": 4, "target_modules": ["q_proj", "o_proj"]}
    return make_adapter(model_folder, tmp_path_factory.mktemp("good") / "adapter", **config)


@pytest.fixture
def adapter(good, tmp_path):
    return shutil.copytree(good, tmp_path / "adapter")


def check(adapter, model_folder, max_rank=0):
    files = AdapterFiles(adapter)
    pairs = files.pairs(load_config(model_folder), max_rank)
    files.digest(files.check_numbers)
    files.check_changes(pairs)
    return pairs


def refused(adapter, model_folder, words, max_rank=0):
    with pytest.raises(ConfigError) as error:
        check(adapter, model_folder, max_rank)
    assert str(adapter) in error.value.message
    assert words in error.value.message
    assert "\n" not in error.value.message


def test_a_valid_adapter(adapter, model_folder):
    pairs = check(adapter, model_folder, max_rank=4)
    assert {pair.projection.layer for pair in pairs} == {f"layers.{n}.{part}" for n in (0, 1) for part in ("qkv", "o")}
    assert {pair.rank for pair in pairs} == {4}
    assert {pair.scale for pair in pairs} == {2.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"peft_type": "IA3"},
            "peft_type = 'IA3' is not supported; only LORA is; PEFT's merge_and_unload",
        ),
        ({"peft_type": "PREFIX_TUNING"}, r"peft_type = 'PREFIX_TUNING' is not supported; only LORA is"),
        ({"use_dora": True}, "use_dora = True is not supported; PEFT's merge_and_unload"),
        ({"bias": "lora_only"}, "bias = 'lora_only' is not supported; PEFT's merge_and_unload"),
        ({"lora_bias": True}, "lora_bias = True is not supported; PEFT's merge"),
        ({"modules_to_save": ["lm_head"]}, "PEFT's merge_and_unload merges it into a"),
        (
            {"target_parameters": ["q_proj.weight", "k_proj.weight"]},
            "model.layers.0.self_attn.k_proj.weight as a target",
        ),
        (
            {"target_modules": ["o_proj"], "target_parameters": ["k_proj.weight"]},
            "whose module its config does not name",
        ),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        (
            {"fan_in_fan_out": True},
            "fan_in_fan_out = True is not supported: it means weights of the layout [inputs, outputs]",
        ),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"a_key_of_next_year": 3}, "a_key_of_next_year = 3 is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa_niter_16' is not supported"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"r": 0}, "r must be a whole number above 0, not 0"),
        ({"r": "8"}, "r must be a whole number"),
        ({"r": None}, "r must be a whole number"),
        ({"lora_alpha": -1}, "lora_alpha must be above 0"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj must be a whole number above 0"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must map expressions"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: '(' is not a regular expression"),
        ({"rank_pattern": {"(?i)q_proj": 8}}, "rank_pattern: '(?i)q_proj' is not a regular expression"),
        ({"layers_to_transform": [0], "layers_pattern": "(?i)layers"}, "layers_pattern: '(?i)layers' is not a regular"),
        ({"rank_pattern": {str(n): 4 for n in range(1025)}}, "rank_pattern has more than 1024 expressions"),
        ({"target_modules": r"(.*\.?)*!"}, "may backtrack too long"),
        ({"exclude_modules": r"(.*\.?)*!"}, "may backtrack too long"),
        ({"rank_pattern": {r"(.*\.?)*!": 4}}, "may backtrack too long"),
        ({"alpha_pattern": {r"(.*\.?)*!": 4}}, "may backtrack too long"),
        ({"layers_to_transform": [0], "layers_pattern": "(a*)*b"}, "may backtrack too long"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a finite number"),
        ({"lora_alpha": 1e300}, "lora_alpha must be at most"),
        ({"lora_alpha": 10**400}, "lora_alpha is too large"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "q_proj must be a finite number"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern must map expressions"),
        ({"target_modules": None}, "target_modules is empty"),
        ({"target_modules": [3]}, "target_modules must be a list of str"),
        ({"target_modules": "("}, "target_modules: '(' is not a regular expression"),
        ({"target_modules": "a" * 5000}, "more than 4096 characters"),
        ({"layers_to_transform": "first"}, "layers_to_transform must be a list of int"),
        ({"r": 5}, "_proj.lora_A.weight is [4, 64]; rank and model require [5, 64]"),
        ({"rank_pattern": {"o_proj": 5}}, "o_proj.lora_A.weight is [4, 64]"),
        ({"target_modules": ["q_proj"]}, "whose module its config does not name as a target"),
        ({"layers_to_transform": [0]}, "whose module its config does not name as a target"),
        ({"exclude_modules": ["o_proj"]}, "whose module its config does not name as a target"),
        ({"target_modules": ["q_proj", "o_proj", "k_proj"]}, "names model.layers.0.self_attn.k_proj as a target"),
    ],
)
def test_invalid_adapter_configs_are_refused(changes, words, adapter, model_folder):
    refused(edit_config(adapter, **changes), model_folder, words)


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_a_deeply_nested_config(depth, adapter, model_folder):
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', f'"use_dora": {"[" * depth}{"]" * depth}'))
    refused(adapter, model_folder, "adapter_config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {Q_A: t[Q_A][:, 1:]}, "q_proj.lora_A.weight is [4, 63]; rank and model require [4, 64]"),
        (lambda t: t | {Q_B: t[Q_B][1:]}, "q_proj.lora_B.weight is [63, 4]; rank and model require [64, 4]"),
        (lambda t: t | {Q_A: t[Q_A][0]}, "q_proj.lora_A.weight is [64]"),
        (lambda t: {n: x for n, x in t.items() if n != Q_A}, "and no lora_A of model.layers.0.self_attn.q_proj"),
        (lambda t: {n: x for n, x in t.items() if n != Q_B}, "and no lora_B of model.layers.0.self_attn.q_proj"),
        (lambda t: {n: x for n, x in t.items() if n not in (Q_A, Q_B)}, "for which adapter_model.safetensors has no"),
        (
            lambda t: {n.replace("q_proj", "qkv_proj"): x for n, x in t.items()},
            "qkv_proj, which a llama model does not have",
        ),
        (lambda t: {}, "contains no tensors"),
        (lambda t: t | {Q_B: t[Q_B] * float("nan")}, "q_proj.lora_B.weight contains NaN or infinities"),
        (lambda t: t | {Q_A: t[Q_A] * float("inf")}, "q_proj.lora_A.weight contains NaN or infinities"),
        (lambda t: t | {Q_A: (t[Q_A] * float("inf")).bfloat16()}, "contains NaN or infinities"),
        (lambda t: t | {Q_A: (t[Q_A] * float("inf")).half()}, "contains NaN or infinities"),
        (
            lambda t: t | {Q_B: torch.full_like(t[Q_B], 1e30)},
            "q_proj.lora_B.weight times its scale up to 2e+30: they may",
        ),
        (lambda t: t | {Q_A: torch.full_like(t[Q_A], -1e30)}, "q_proj.lora_A.weight has numbers up to 1e+30"),
        (lambda t: t | {Q_A: torch.full_like(t[Q_A], 1e30), Q_B: t[Q_B] * 0}, "numbers up to 1e+30"),
        (lambda t: t | {Q_A: torch.full_like(t[Q_A], 3e38).bfloat16()}, "numbers up to 3e+38"),
        (lambda t: t | {Q_A: t[Q_A] * 0 + 400, Q_B: t[Q_B] * 0 - 400}, "may change weights by more than 1000000"),
        (lambda t: t | {Q_A: t[Q_A].double()}, "q_proj.lora_A.weight is F64; only F32, F16, BF16 are supported"),
        (lambda t: t | {"other.weight": t[Q_A]}, "it has a tensor other.weight: adapters have no such tensor"),
        (lambda t: t | {Q_A.replace("lora_A.weight", "lora_magnitude_vector"): t[Q_A]}, "adapters have no such tensor"),
        (lambda t: t | {Q_A.replace("lora_A.weight", "lora_B.bias"): t[Q_A]}, "adapters have no such tensor"),
        (
            lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": t[Q_A]},
            "embed_tokens.lora_embedding_A: adapters of embeddings are not supported",
        ),
        (lambda t: t | module_of(t, "lm_head"), "is for lm_head, which cannot be served: adapters of the head"),
        (
            lambda t: {"base_model.model.lm_head.base_layer.weight": t[Q_A], **t},
            "lm_head.base_layer.weight: adapters of the head are not supported; PEFT's merge_and_unload merges",
        ),
        (lambda t: t | module_of(t, "model.embed_tokens"), "adapters of embeddings are not supported"),
        (lambda t: t | module_of(t, "model.layers.0.mlp.gate"), "mlp.gate, which a llama model does not have"),
        (lambda t: t | module_of(t, "model.layers.1.mlp.experts"), "experts, which a llama model does not have"),
        (lambda t: t | module_of(t, "model.layers.1.mlp.experts.3.up_proj"), "which a llama model does not have"),
        (lambda t: t | module_of(t, "model.layers.2.self_attn.q_proj"), "the model has 2 layers"),
        (lambda t: t | module_of(t, "model.layers.0.self_attn.c_attn"), "which a llama model does not have"),
        (lambda t: t | module_of(t, "model.layers.0.self_attn.qkv_proj"), "which a llama model does not have"),
    ],
)
def test_invalid_adapter_tensors_are_refused(change, words, adapter, model_folder):
    refused(edit_tensors(adapter, change), model_folder, words)


def module_of(tensors, module):
    return {f"base_model.model.{module}.lora_{half}.weight": tensors[name] for half, name in (("A", Q_A), ("B", Q_B))}


def test_weights_of_modules_as_parameters(adapter, model_folder):
    """PEFT uses the same tensor names for a module's weight as a module or as a parameter."""
    edit_config(adapter, target_modules=["o_proj"], target_parameters=["q_proj.weight"], alpha_pattern={"weight": 2})
    pairs = check(adapter, model_folder)
    assert {pair.projection.layer.split(".")[2]: pair.scale for pair in pairs} == {"qkv": 0.5, "o": 2.0}


def test_parameters_of_a_model_with_transposed_matrices(adapter, tmp_path):
    """PEFT swaps inputs and outputs of transposed matrices."""
    folder = make_model(tmp_path / "gpt2", FAMILIES["gpt2"])[0]
    refused(
        edit_config(adapter, target_parameters=["c_fc.weight"]), folder, "target_parameters is not supported for gpt2"
    )


def test_a_rank_above_the_limit_is_refused(adapter, model_folder):
    refused(adapter, model_folder, "_proj has rank 4, and --max-lora-rank is 3", max_rank=3)


def test_layers_not_named_by_the_flag(adapter, model_folder):
    files, model = AdapterFiles(adapter), load_config(model_folder)
    for targets in (["self_attn.q_proj", "o_proj"], ["qkv_proj", "0.self_attn.o_proj", "1.self_attn.o_proj"]):
        assert files.pairs(model, 4, targets) == files.pairs(model, 4)
    for targets, outside in ((["o_proj"], "0.self_attn.q"), (["q_proj", "0.self_attn.o_proj"], "1.self_attn.o")):
        with pytest.raises(ConfigError) as error:
            files.pairs(model, 4, targets)
        allowed = ",".join(targets)
        assert f"it changes model.layers.{outside}_proj, but --lora-target-modules allows only {allowed}" in str(error)


def test_pickles_and_missing_files(adapter, model_folder):
    tensors = adapter / "adapter_model.safetensors"
    tensors.rename(adapter / "adapter_model.bin")
    refused(
        adapter,
        model_folder,
        "adapter_model.bin is pickled, and a pickle may run arbitrary code; if you trust it, PEFT",
    )
    (adapter / "adapter_model.bin").unlink()
    refused(adapter, model_folder, "it has no adapter_model.safetensors")
    (adapter / "adapter_config.json").unlink()
    refused(adapter, model_folder, "it has no adapter_config.json")
    refused(adapter / "nowhere", model_folder, "it has no adapter_config.json")


def test_damaged_files(adapter, model_folder):
    tensors, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    whole = tensors.read_bytes()
    for content in (b"", whole[:-1], whole[:100], b"\xff" * 100):
        tensors.write_bytes(content)
        refused(adapter, model_folder, "adapter_model.safetensors cannot be read")
    # Headers are read whole, so their length is bounded.
    tensors.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * (MAX_HEADER_BYTES + 1))
    refused(adapter, model_folder, f"its header is longer than {MAX_HEADER_BYTES} bytes")
    for text in ("", "[]", "{", '"LORA"', "{}"):
        config.write_text(text)
        refused(adapter, model_folder, "adapter_config.json")
    config.write_text('{"r": "' + "1" * 2**20 + '"}')
    refused(adapter, model_folder, "is longer than 1048576 bytes")


def test_large_weights_with_a_small_product_are_served(adapter, model_folder):
    """Only the change of a weight counts: large factors with a small product are accepted."""
    edit_tensors(adapter, lambda t: t | {Q_A: torch.full_like(t[Q_A], 1e5), Q_B: torch.full_like(t[Q_B], 1e-5)})
    assert len(check(adapter, model_folder)) == 4


def test_training_only_keys_are_ignored(adapter, model_folder):
    """Training-only keys change nothing."""
    before = AdapterFiles(adapter).digest()
    changes = {"lora_dropout": 0.3, "fan_in_fan_out": False, "init_lora_weights": "eva", "eva_config": {"rho": 2}}
    edit_config(adapter, **changes, base_model_name_or_path="elsewhere", a_key_of_next_year=None)
    assert len(check(adapter, model_folder)) == 4
    assert AdapterFiles(adapter).digest() == before


def test_the_digest_covers_what_changes_an_adapter(adapter):
    first = AdapterFiles(adapter).digest()
    tensors = load_file(adapter / "adapter_model.safetensors")
    # The order of tensors and the header's metadata are not part of the digest.
    save_file(dict(reversed(tensors.items())), adapter / "adapter_model.safetensors", metadata={"by": "another tool"})
    edit_config(adapter, target_modules=["o_proj", "q_proj"])
    assert AdapterFiles(adapter).digest() == first
    found = {first}
    for changes in ({"lora_alpha": 9}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 4}}):
        found.add(AdapterFiles(edit_config(adapter, **changes)).digest())
    one = tensors[Q_A].clone()
    one[0, 0] = torch.nextafter(one[0, 0], torch.tensor(9.0))
    found.add(AdapterFiles(edit_tensors(adapter, lambda t: t | {Q_A: one})).digest())
    assert len(found) == 5


def test_images_have_another_prefix(adapter, model_folder):
    """The decoder of a vision-language model has another prefix, which expressions match."""
    edit_tensors(adapter, lambda t: {n.replace("model.layers", "model.language_model.layers"): x for n, x in t.items()})
    edit_config(adapter, target_modules=r"model\.language_model\.layers\.\d+\.self_attn\.(q|o)_proj")
    assert len(check(adapter, model_folder)) == 4


@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen3-moe-some-dense"])
def test_random_adapters_of_every_projection_are_valid(family, tmp_path):
    """The benchmarks' adapters have one name per projection; checkpoints split some."""
    folder = make_model(tmp_path / "model", FAMILIES[family])[0]
    adapter = random_adapter_folder(load_config(folder), tmp_path / "adapter", 1, 4)
    projections = {one for one in modules(load_config(folder)).values() if not one.exact}
    assert {pair.projection for pair in check(adapter, folder)} == projections


def test_dense_layers_among_experts(tmp_path):
    """Adapters of MoE models cover dense layers and attention."""
    folder = make_model(tmp_path / "moe", FAMILIES["qwen3-moe-some-dense"])[0]
    config = load_config(folder)
    dense = [index for index, has_experts in enumerate(config.moe.layers) if not has_experts]
    shapes = {"A": (2, config.hidden_size), "B": (config.intermediate_size, 2)}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(
        {
            f"base_model.model.model.layers.{layer}.mlp.up_proj.lora_{half}.weight": torch.ones(shape)
            for layer in dense
            for half, shape in shapes.items()
        },
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up_proj"]})
    )
    assert [pair.projection.layer for pair in check(adapter, folder)] == [f"layers.{n}.gate_up" for n in dense]
