"""GGUF files of each architecture against their source models and transformers."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.checkpoint import decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.quantized import gguf_files as convert
from pillion.engine.quantized.gguf_architectures import ARCHITECTURES, read_config
from pillion.engine.quantized.gguf_reader import GgufModel, read_gguf
from pillion.errors import ConfigError
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix, plain
from tests.support.torch_model import BackendDriver, perturb_vectors

SHORT, LONG = [1.0, 1.25, 1.5, 1.75], [1.0, 2.0, 4.0, 8.0]
PHI3_ROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": SHORT, "long_factor": LONG}
GEMMA = {"sliding_window": 24, "query_pre_attn_scalar": 16}

# Overrides of a tiny model, and the metadata that llama.cpp's converter writes beside sizes.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"rope.dimension_count": 16}),
    "qwen2": ({}, {}),
    "qwen3": ({"head_dim": 32}, {"attention.key_length": 32}),
    "qwen3moe": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"norm_topk_prob": True, "stacked_experts": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48, "attention.key_length": 16},
    ),
    "phi3": (
        {"tie_word_embeddings": False, "pad_token_id": 2, "partial_rotary_factor": 0.5, "sliding_window": 24}
        | {"original_max_position_embeddings": 32, "rope_parameters": PHI3_ROPE},
        {"attention.sliding_window": 24, "rope.dimension_count": 8, "rope.scaling.original_context_length": 32},
    ),
    "gemma2": (
        {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
        {"attention.key_length": 16, "attention.sliding_window": 24}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        {**GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 7}
        | {"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}}},
        {"attention.key_length": 16, "attention.sliding_window": 24}
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
}


# The vocabulary of lab.testbed.tiny_model, by bytes.
TOKENS = ["<|im_start|>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, *[6] * 256],
    "tokenizer.ggml.scores": [0.0] * 258,
}

# Types written by gguf's package, and types of random bytes under sane scales: offsets of these float16.
MADE = ("Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1")
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def packed_in(kind: str, tensor: np.ndarray) -> np.ndarray:
    """Return the blocks of ``tensor``, or random ones for as many numbers of about 0.1."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in HALVES:
        return gguf.quantize(tensor, number)
    numbers, size = gguf.GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(len(tensor))
    blocks = generator.integers(0, 256, (*tensor.shape[:-1], tensor.shape[-1] // numbers, size), np.uint8)
    for at in HALVES[kind]:
        halves = (generator.random((*blocks.shape[:-1], 1)) * 1e-4).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(*tensor.shape[:-1], -1)


def write_gguf(
    path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    metadata: dict[str, Any],
    types: dict[str, str] | None = None,
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**VOCABULARY, **metadata}.items():
        key = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add |= {list: writer.add_array, bool: writer.add_bool}
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, packed_in(kind, tensor), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Convert tensors like llama.cpp's converter: other names, and 1 added to Gemma's norms."""
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(known, model.config.num_hidden_layers)
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            layer = name.split(".")[2]
            found |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            continue
        stem, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        shifted = tensor + 1 if architecture.startswith("gemma") and stem.endswith("norm") else tensor
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            # Pairs (i, i + D/2) of a head become neighbours.
            shifted = (
                tensor.view(-1, 2, model.config.head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            )
        found[f"{names.get_name(stem)}.{suffix}"] = shifted
    return {name: tensor.contiguous().numpy() for name, tensor in found.items()}


def sizes(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "embedding_length": config.hidden_size,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
    }


def sizes_without_padding(config: Any) -> dict[str, Any]:
    return {key: value for key, value in SIZES(config).items() if "padding" not in key}


SIZES = sizes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path / "cache"))


def prepared_from(path, name: str, tmp_path, kinds: tuple[str, ...] = (), **overrides: Any) -> Any:
    """Save a random model, in the types ``kinds`` in turn if given; return transformers' model, and ours prepared."""
    settings, metadata = FILES[name]
    folder = save_model(tmp_path / "model", **{"model_type": name, **settings, **overrides})
    perturb_vectors(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = gguf_tensors(model, name)
    matrices = [key for key, tensor in tensors.items() if tensor.ndim > 1 and "gate_inp" not in key]
    types = {key: kinds[at % len(kinds)] for at, key in enumerate(matrices)} if kinds else {}
    if name == "phi3":
        tensors |= {
            f"rope_factors_{key}.weight": np.array(PHI3_ROPE[f"{key}_factor"], np.float32) for key in ("short", "long")
        }
    write_gguf(path, name, tensors, sizes(model.config) | metadata, types)
    return model, prepare(ModelFlags(model=str(path), dtype="float32", max_model_len=100))


def check_logits(model: Any, prepared: Any) -> None:
    text = torch.randint(0, 258, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    driver = BackendDriver(prepared)
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0]
    found = driver.run_all(driver.sequences.add()[0], text, [33])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("name", FILES)
def test_logits_of_a_gguf_file_match_its_model(name, tmp_path):
    model, prepared = prepared_from(tmp_path / "a.gguf", name, tmp_path)
    assert prepared.eos_token_ids == (1, 2)  # <|im_end|> is in the vocabulary and the chat template.
    plain = load_config(tmp_path / "model")
    eps = load_config(prepared.folder).rms_norm_eps
    assert eps == pytest.approx(plain.rms_norm_eps)  # GGUF stores it as float32.
    assert (
        dataclasses.replace(load_config(prepared.folder), eos_token_ids=(1,), rms_norm_eps=plain.rms_norm_eps) == plain
    )
    check_logits(model, prepared)


@pytest.mark.parametrize(
    ("name", "kinds"), [*((name, MADE) for name in FILES), *((name, tuple(HALVES)) for name in ("llama", "qwen3moe"))]
)
def test_quantized_matrices_stay_quantized_and_match_transformers(name, kinds, tmp_path, monkeypatch):
    """Weights equal transformers' bit by bit, for Llama's reordered rows, Gemma's norms with 1 added, and separate
    experts."""
    wide = kinds != MADE  # K types have blocks of 256 inputs.
    sizes_of = {"hidden_size": 256, "intermediate_size": 512} if wide else {}
    if name == "qwen3moe":
        inner = 256 if wide else 64
        sizes_of |= {"moe_intermediate_size": inner, "head_dim": inner // 4}
        monkeypatch.setitem(FILES[name][1], "expert_feed_forward_length", inner)
        monkeypatch.setitem(FILES[name][1], "attention.key_length", inner // 4)
    elif wide:
        sizes_of["head_dim"] = 64
        monkeypatch.setitem(FILES[name][1], "rope.dimension_count", 64)
    path = tmp_path / "a.gguf"
    model, prepared = prepared_from(path, name, tmp_path, kinds, **sizes_of)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(theirs, strict=False)
    config = load_config(prepared.folder)
    assert config.quantization.method == "pillion"
    with open_checkpoint(prepared.folder, config) as checkpoint:
        for key, checkpoint_names in decoder_tensors(config).items():
            found = checkpoint.load_matrix(key, torch.float32)
            assert isinstance(found, QuantizedMatrix) == key.endswith(
                ("weight", "gate_up", "down", "embedding", "head")
            )
            wanted = next(
                torch.cat([theirs[one.name] if one.part is None else theirs[one.name][one.part] for one in stacked])
                for stacked in checkpoint_names
                if all(one.name in theirs for one in stacked)
            )
            assert torch.equal(plain(found, torch.float32), wanted), key
    check_logits(model, prepared)


def read(path, architecture: str = "llama", tensors: dict[str, np.ndarray] | None = None, **metadata: Any) -> GgufModel:
    """Return a model with only ``tensors`` and the required metadata."""
    least = {
        "context_length": 100,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    given = {key.replace("__", "."): value for key, value in metadata.items()}
    padding = {f"blk.{number}.x.weight": np.zeros(1, np.float32) for number in range(99)}
    write_gguf(path / "a.gguf", architecture, {**padding, **(tensors or {})}, {**least, **given})
    return read_gguf([path / "a.gguf"])


def test_rope_scaling_is_not_lost(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    scaling |= {"yarn_attn_factor": 1.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    given = {f"rope__scaling__{key}": value for key, value in scaling.items()}
    wanted = {"rope_theta": 5.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    wanted |= {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0}
    assert read_config(read(tmp_path, rope__freq_base=5.0, **given))["rope_parameters"] == wanted


def test_an_old_name_of_linear_scaling_is_read(tmp_path):
    found = read_config(read(tmp_path, rope__scale_linear=2.0))["rope_parameters"]
    assert found == {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 2.0}


def test_rope_factors_are_not_lost(tmp_path):
    found = read_config(read(tmp_path, tensors={"rope_freqs.weight": np.array([1, 2, 8], np.float32)}))
    assert found["rope_parameters"]["rope_type"] == "longrope"
    assert found["rope_parameters"]["long_factor"] == [1.0, 2.0, 8.0]


def test_the_largest_gemmas_scale_scores_differently(tmp_path):
    sizes = {"embedding_length": 4608, "attention__head_count": 32}
    assert read_config(read(tmp_path, "gemma2", block_count=46, **sizes))["query_pre_attn_scalar"] == 144
    for head_dim, wanted in ((128, 128), (256, 256), (None, 144)):
        given = {} if head_dim is None else {"attention__key_length": head_dim}
        assert (
            read_config(read(tmp_path, "gemma3", block_count=26, **sizes, **given))["query_pre_attn_scalar"] == wanted
        )


def test_layers_with_a_window_are_those_that_the_metadata_name(tmp_path):
    window = {"attention__sliding_window": 24}
    assert read_config(read(tmp_path, "gemma3"))["layer_types"] == ["full_attention"] * 2
    assert "layer_types" not in read_config(read(tmp_path, "gemma3", **window))
    given = {"attention__sliding_window_pattern": [False, True], "rope__freq_base_swa": 500.0}
    found = read_config(read(tmp_path, "gemma3", **window, **given))
    assert found["layer_types"] == ["full_attention", "sliding_attention"]
    assert found["rope_local_base_freq"] == 500.0
    assert read_config(read(tmp_path, "gemma2", attention__sliding_window_pattern=3))["sliding_window_pattern"] == 3


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"qwen2\.expert_count = 8, which is not supported"):
        read_config(read(tmp_path, "qwen2", expert_count=8))
    with pytest.raises(ConfigError, match=r"lack llama\.expert_used_count"):
        read_config(read(tmp_path, expert_count=8))
    with pytest.raises(ConfigError, match=r"'falcon' is not supported .llama, qwen2"):
        read_config(read(tmp_path, "falcon"))
    write_gguf(tmp_path / "b.gguf", "falcon", {}, {})
    with pytest.raises(ConfigError, match=r"b\.gguf: .*'falcon' is not supported"):
        prepare(ModelFlags(model=str(tmp_path / "b.gguf")))
    for key, value in {
        "attention.head_count_kv": [2, 4],
        "attention.value_length": 32,
        "rope.dimension_count": 8,
        "attention.causal": False,
        "rope.scaling.type": "other",
        "residual_scale": 2.0,
        "nextn_predict_layers": 1,
    }.items():
        with pytest.raises(ConfigError, match=re.escape(key)):
            read_config(read(tmp_path, **{key: value}))
    with pytest.raises(ConfigError, match=r"lack llama\.embedding_length"):
        read_config(GgufModel({"llama.context_length": 1}, []))


# Keys of an architecture that llama.cpp's loader reads for all or for the listed ones (src/llama-model.cpp,
# src/models/), with values that change numbers. Keys of training, files and labels are omitted.
READ_BY_LLAMA_CPP = {
    **dict.fromkeys(("attention.causal", "rope.scaling.finetuned"), False),
    **dict.fromkeys(("embedding_length_out", "nextn_predict_layers", "expert_group_count", "vocab_size"), 3),
    **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 32),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), 32),
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor"), 3.0),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.attn_factor", "logit_scale", "attention.scale"), 3.0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), 3.0),
    **dict.fromkeys(("attention.sliding_window", "attention.sliding_window_pattern", "attention.max_alibi_bias"), 3),
    **dict.fromkeys(("embedding_scale", "residual_scale", "attention.clamp_kqv", "attention.temperature_scale"), 3.0),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_weights_scale", "leading_dense_block_count"), 2),
}
NO_EFFECT = {"rope.scaling.finetuned"}
# Required keys of each architecture.
NEEDED: dict[str, dict[str, Any]] = {
    "llama": {"expert_count": 4, "expert_used_count": 1},
    "deepseek2": {"attention.key_length": 48, "attention.value_length": 24, "rope.dimension_count": 16},
    **{name: {"attention.head_count_kv": [0, 2]} for name in ("lfm2", "lfm2moe")},
    **{name: {"ssm.inner_size": 64, "ssm.time_step_rank": 2} for name in ("qwen35", "qwen35moe", "qwen3next")},
    "gemma4": {
        "attention.head_count_kv": 2,
        "attention.sliding_window_pattern": [True, False],
        "attention.key_length": 16,
        "attention.key_length_swa": 16,
    },
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_metadata_that_llama_cpp_reads_are_dropped(name, tmp_path):
    """Each key changes the config or is rejected by its name."""
    kind = "linear" if name == "gemma4" else "yarn"
    scaled = {"rope.scaling.type": kind, "rope.scaling.factor": 2.0, **NEEDED.get(name, {})}
    factors = {"rope_freqs.weight": np.ones(8, np.float32)} if name == "gemma4" else {}
    plain = read_config(read(tmp_path, name, factors, **scaled))
    follows = "rope.scaling.attn_factor" if name == "phi3" else ""
    for key, value in READ_BY_LLAMA_CPP.items():
        try:
            found = read_config(read(tmp_path, name, factors, **{**scaled, key: value}))
        except ConfigError as error:
            assert key in error.message, key  # noqa: PT017
        else:
            assert (found == plain) == (key in NO_EFFECT or key == follows), key


def test_a_tensor_that_is_not_known_is_refused(tmp_path, converted):
    small_file(tmp_path / "a.gguf", more={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(ConfigError, match=r"a\.gguf: its tensor blk\.0\.attn_sinks\.weight is not supported"):
        converted(tmp_path / "a.gguf")


SMALL = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=258)


def small_file(
    path, kind: str = "Q4_0", more: dict[str, np.ndarray] | None = None, width: int = 64
) -> dict[str, np.ndarray]:
    """Write a model of one layer with all matrices of one type."""
    widths = {"hidden_size": width, "intermediate_size": width, "head_dim": width // 4}
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL.to_dict(), **widths}))
    tensors = gguf_tensors(model, "llama") | (more or {})
    types = {key: kind for key, tensor in tensors.items() if tensor.ndim > 1}
    write_gguf(path, "llama", tensors, sizes(model.config), types)
    return tensors


@pytest.fixture
def converted(tmp_path):
    """Convert the file and return its output."""

    def convert_file(path):
        lines: list[str] = []
        folder = tmp_path / "converted"
        folder.mkdir(exist_ok=True)
        convert.convert_gguf([path], folder, "float32", lines.append)
        return folder, lines

    return convert_file


def test_other_types_are_dequantized_with_a_log(tmp_path, converted):
    tensors = small_file(tmp_path / "a.gguf", "TQ2_0", width=256)
    folder, lines = converted(tmp_path / "a.gguf")
    assert "widening 9 tensors of the type TQ2_0 to float32" in lines
    config = load_config(folder)
    assert not config.quantization
    kind = gguf.GGMLQuantizationType.TQ2_0
    wanted = gguf.dequantize(gguf.quantize(tensors["blk.0.ffn_up.weight"], kind), kind)
    with open_checkpoint(folder, config) as checkpoint:
        found = checkpoint.load("layers.0.gate_up.weight", torch.float32)
    assert torch.equal(found[256:], torch.from_numpy(wanted))


def test_nan_scales_are_refused_by_name(tmp_path, converted):
    small_file(tmp_path / "a.gguf")
    place = next(one for one in gguf.GGUFReader(tmp_path / "a.gguf").tensors if one.name == "blk.0.attn_v.weight")
    content = bytearray((tmp_path / "a.gguf").read_bytes())
    content[place.data_offset : place.data_offset + 2] = np.array([np.nan], np.float16).tobytes()
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.gguf: blk.0.attn_v.weight contains NaN or infinite scales"):
        converted(tmp_path / "a.gguf")


def test_a_file_that_ends_early_is_refused(tmp_path, converted):
    small_file(tmp_path / "a.gguf")
    content = (tmp_path / "a.gguf").read_bytes()
    for length in (len(content) - 100, len(content) // 2):
        (tmp_path / "a.gguf").write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"a\.gguf: its header counts .* it may be damaged or truncated"):
            converted(tmp_path / "a.gguf")


def test_rows_of_partial_blocks_are_refused(tmp_path, converted):
    small_file(tmp_path / "a.gguf")
    content = (tmp_path / "a.gguf").read_bytes()
    name = b"blk.0.attn_v.weight"
    # After the name: the number of dimensions, and the first of them, the row length.
    at = content.index(name) + len(name) + 4
    (tmp_path / "a.gguf").write_bytes(content[:at] + (60).to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(ConfigError, match=r"a.gguf: the rows of blk.0.attn_v.weight have 60 numbers"):
        converted(tmp_path / "a.gguf")


def test_sampling_values_in_the_metadata_are_recommended(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32(gguf.Keys.General.SAMPLING_TEMP, 0.6)
    writer.add_float32(gguf.Keys.General.SAMPLING_TOP_P, 0.95)
    writer.add_int32(gguf.Keys.General.SAMPLING_TOP_K, 20)
    writer.add_int32(gguf.Keys.General.SAMPLING_MIROSTAT, 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = convert.recommended_sampling(read_gguf([tmp_path / "m.gguf"]).metadata)
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def test_a_full_disk_is_reported_as_an_os_error(tmp_path, monkeypatch) -> None:
    from safetensors import SafetensorError

    from pillion.engine.quantized import shards

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(OSError, match="No space left on device") as caught, shards.write_shards(tmp_path) as writer:
        writer.add({"a": torch.zeros(1)})
    assert caught.value.errno == 28


def test_a_model_in_parts_equals_one_file(tmp_path):
    """The fingerprint is the same, so workers of both share blocks."""
    tensors = small_file(tmp_path / "whole.gguf")
    types = {key: "Q4_0" for key, tensor in tensors.items() if tensor.ndim > 1}
    whole = prepare(ModelFlags(model=str(tmp_path / "whole.gguf"), dtype="float32"))
    names = [*tensors]
    for number, part in enumerate((names[:5], names[5:])):
        split = {"split.no": number, "split.count": 2}
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        given = {**sizes(SMALL), **split} if number == 0 else split
        write_gguf(path, "llama", {name: tensors[name] for name in part}, given, types)
    parts = prepare(ModelFlags(model=str(path), dtype="float32"))
    assert (parts.name, parts.fingerprint) == ("m", whole.fingerprint)
    path.unlink()
    with pytest.raises(ConfigError, match="such as m-00002-of-00002"):
        prepare(ModelFlags(model=str(tmp_path / "m-00001-of-00002.gguf"), dtype="float32"))


def test_neither_transformers_nor_the_gguf_package_is_imported(tmp_path):
    """They took most of a first start."""
    small_file(tmp_path / "a.gguf", "Q4_0")
    program = (
        "import sys; from pillion.config import ModelFlags; from pillion.engine.checkpoints.prepare import prepare;"
        f"prepare(ModelFlags(model={str(tmp_path / 'a.gguf')!r}), print); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *lines, modules = done.stdout.splitlines()
    assert lines == ["reading a.gguf", "converting weights", "fingerprinting weights"]
    assert not {"transformers", "gguf", "tokenizers"} & {*modules.split()}


def test_a_phi3_file_needs_no_padding(tmp_path, monkeypatch) -> None:
    """transformers' default for Phi-3 is 32000, beyond a smaller vocabulary."""
    monkeypatch.setattr(f"{__name__}.sizes", sizes_without_padding)
    model, prepared = prepared_from(tmp_path / "a.gguf", "phi3", tmp_path)
    check_logits(model, prepared)
