"""Converts GGUF files into Hugging Face folders, by means of transformers.

Matrices whose type :mod:`pillion.engine.quantized.gguf_blocks` knows stay quantized, in the layout of
:mod:`pillion.engine.quantized.formats.pillion_format`. Only the functions import torch and transformers, so that a
start with a converted model stays quick.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pillion.engine.checkpoints.model_files import Progress, first_line
from pillion.engine.models.config_json import token_ids
from pillion.engine.models.config_parser import parse_config
from pillion.engine.quantized.gguf_header import check_header
from pillion.errors import ConfigError
from pillion.types import SAMPLING_OPTIONS

# GGUF files of these architectures are read and tested; those of Llama, SmolLM2 and Mistral are all "llama".
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3")
# transformers ignores these metadata of GGUF files, by architecture: the key, and its name in config.json.
_IGNORED_METADATA = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "phi3": {"attention.sliding_window": "sliding_window"},
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
}
# The Gemma models with this many layers divide scores by the root of hidden / heads, and others by the root of a head's
# values; transformers assumes 256 for all. GGUF files have no key for it: llama.cpp goes by the number of layers, too.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# These tensors are divisors of the rotary embedding's frequencies: for any length, and for short and long texts.
_ROPE_FACTORS = "rope_freqs.weight"
_ROPE_SHORT, _ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_FACTORS = (_ROPE_FACTORS, _ROPE_SHORT, _ROPE_LONG)
# These tokens end a turn in the chat formats of models whose GGUF files name only the token that ends a text.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
# This matches the tensor of one projection of all experts of a layer.
_EXPERTS = re.compile(r"(?P<stem>blk\.\d+\.ffn_(?P<projection>gate|up|down)_exps)\.weight")
# These metadata of GGUF files recommend sampling values; a generation_config.json has these names for them.
_SAMPLING = {one.gguf: one.recommended_as for one in SAMPLING_OPTIONS.values() if one.gguf}
_PLAIN_TYPES = {"F64", "F32", "F16", "BF16"}
_PRIVATE_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert_gguf(source: Path, folder: Path, dtype: str, progress: Progress) -> None:
    """Fills ``folder`` with config, tokenizer and weights: quantized matrices as they are, others in ``dtype``
    ("bfloat16" or "float32").

    In float32 the weights are exactly those that transformers makes of the file. Raises ConfigError for a file that is
    damaged or holds an architecture that is not known.
    """
    progress(f"reading {source.name}")
    try:
        from gguf import GGUFReader
        from transformers import AutoConfig, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(f"reading GGUF needs the package {error.name}, which is not installed") from None
    logging.disable_progress_bar()
    with _blaming(source):
        check_header(source)
        reader = GGUFReader(source)
        refuse_unread(reader)
        read = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
        drop_strange_ids(read, reader)
        config = {k: v for k, v in json.loads(read.to_json_string(use_diff=False)).items() if k not in _PRIVATE_KEYS}
        add_ignored_metadata(config, reader)
        add_rope(config, reader)
        parse_config(config)
        progress("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        config["eos_token_id"] = turn_ends(config, reader, tokenizer)
    _convert_weights(source, reader, read, folder, dtype, progress)
    few = sorted({tensor.tensor_type.name for tensor in reader.tensors} & _quantized_types())
    if few:
        config["quantization_config"] = {"quant_method": "pillion", "weights": ", ".join(few)}
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    if sampling := recommended_sampling(reader):
        (folder / "generation_config.json").write_text(json.dumps(sampling, indent=2), "utf-8")


@contextlib.contextmanager
def _blaming(source: Path) -> Iterator[None]:
    """Turns whatever foreign readers raise over foreign bytes in the block into a ConfigError about the file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}") from None
    except Exception as error:  # noqa: BLE001  (the readers raise errors of many kinds)
        raise ConfigError(
            f"{source} cannot be read as GGUF; it may be damaged, or cut short: {first_line(error)}"
        ) from None


def quantized_types(source: Path) -> str:
    """Names the types of a GGUF file's quantized tensors, or "". Raises ConfigError for a file that is damaged."""
    from gguf import GGUFReader

    with _blaming(source):
        check_header(source)
        return ", ".join(sorted({one.tensor_type.name for one in GGUFReader(source).tensors} - _PLAIN_TYPES))


def _quantized_types() -> set[str]:
    from pillion.engine.quantized.gguf_blocks import BLOCK_LAYOUTS

    return set(BLOCK_LAYOUTS)


def _convert_weights(source: Path, reader: Any, config: Any, folder: Path, dtype: str, progress: Progress) -> None:
    import torch

    from pillion.engine.quantized.formats.pillion_format import stored_tensors
    from pillion.engine.quantized.shards import write_shards

    widened = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    for kind in sorted(widened.keys() - _PLAIN_TYPES - _quantized_types()):
        progress(f"widening {widened[kind]} tensors of the type {kind} to {dtype}")
    progress("converting weights")
    with write_shards(folder) as writer:
        for name, matrix in _matrices(source, reader, config):
            if isinstance(matrix, torch.Tensor):
                writer.add({name: matrix.to(getattr(torch, dtype)).contiguous()})
            else:
                writer.add(stored_tensors(name, matrix))


def _matrices(source: Path, reader: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """Yields each tensor by its Hugging Face name, quantized or in floating point.

    Names, and the changes of tensors, come from transformers, to which a model on the meta device gives the names.
    Where transformers changes a quantized matrix it permutes the rows, so the change is applied to the rows' numbers.
    """
    import numpy as np
    import torch
    from gguf import dequantize
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    from pillion.engine.quantized.gguf_blocks import BLOCK_LAYOUTS, read_blocks

    with _blaming(source):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        architecture = _metadata(reader, "general.architecture")
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        names = get_gguf_hf_weights_map(_Childless(model), processor)
        if not all(_is_named(tensor.name, names) for tensor in reader.tensors):
            names = get_gguf_hf_weights_map(model, processor)
        if config.tie_word_embeddings:
            names.pop("output.weight", None)
        for tensor in reader.tensors:
            layout = BLOCK_LAYOUTS.get(tensor.tensor_type.name)
            for part, name, data in _parts(tensor, names):
                if layout is None or data.ndim < 2:
                    numbers = dequantize(data, tensor.tensor_type)
                    yield name, torch.from_numpy(np.copy(processor.process(weights=numbers, name=part).weights))
                    continue
                matrix = read_blocks(layout, torch.from_numpy(np.copy(data)))
                for numbers in (matrix.scales, matrix.offsets):
                    if numbers is not None and not bool(numbers.isfinite().all()):
                        raise ConfigError(f"{tensor.name} holds scales that are NaN or infinite")
                rows = processor.process(weights=np.arange(len(data))[:, None], name=part).weights[:, 0]
                yield name, matrix.rows(torch.from_numpy(np.copy(rows)))


class _Childless:
    """Stands for a model without its modules, so that transformers makes its table of names once.

    transformers makes the whole table again for every module of a model, only to find names that the model itself does
    not have: hundreds of times, which take seconds.
    """

    def __init__(self, model: Any) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


def _is_named(name: str, names: dict[str, str]) -> bool:
    """Says whether nothing is missing from a table for a tensor of this name in GGUF."""
    experts = _EXPERTS.fullmatch(name)
    return (experts["stem"] if experts else name) in names or name in _FACTORS


def _parts(tensor: Any, names: dict[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Yields a tensor's name in GGUF, its Hugging Face name and its data; for all experts of a layer, one after
    another. A tensor that transformers does not know yields nothing."""
    experts = _EXPERTS.fullmatch(tensor.name)
    if experts is None:
        if tensor.name in names:
            yield tensor.name, names[tensor.name], tensor.data
        return
    room = names[experts["stem"]].rpartition(".")[0]
    for index, data in enumerate(tensor.data):
        yield tensor.name.replace("_exps", ""), f"{room}.{index}.{experts['projection']}_proj.weight", data


def _metadata(reader: Any, key: str) -> Any:
    """Returns the value of a key in a GGUF file, or None; ``{}`` in the key stands for the architecture."""
    field = reader.get_field("general.architecture")
    name = field.contents() if field else "llama"
    field = reader.get_field(key.format(name))
    return field.contents() if field else None


def add_ignored_metadata(config: dict[str, Any], reader: Any) -> None:
    name = _metadata(reader, "general.architecture")
    for key, ours in _IGNORED_METADATA.get(name, {}).items():
        value = _metadata(reader, "{}." + key)
        if value is not None:
            config[ours] = value
    if name in _GEMMA_27B_LAYERS:
        each = config["hidden_size"] // config["num_attention_heads"]
        largest = config.get("num_hidden_layers") == _GEMMA_27B_LAYERS[name]
        config["query_pre_attn_scalar"] = each if largest else config.get("head_dim") or each


def refuse_unread(reader: Any) -> None:
    """Raises ConfigError for files that transformers cannot read, or reads wrongly.

    Mixtral's GGUF files have the architecture of Llama, as which transformers would read them without their experts.
    """
    name = _metadata(reader, "general.architecture")
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ConfigError(f"GGUF files of the architecture {name!r} are not read ({known} are): use the model's folder")
    if name != "qwen3moe" and _metadata(reader, "{}.expert_count"):
        raise ConfigError("mixture of experts is read from Hugging Face folders, and from GGUF files of qwen3moe alone")


def drop_strange_ids(config: Any, reader: Any) -> None:
    """Takes the ids out of a config that no metadata give: transformers' own defaults, such as 32000 for the padding of
    Phi-3, are those of another vocabulary, and a table of embeddings without that row cannot be made."""
    for key, name in (("pad_token_id", "padding"), ("bos_token_id", "bos"), ("eos_token_id", "eos")):
        value = getattr(config, key, None)
        given = _metadata(reader, f"tokenizer.ggml.{name}_token_id")
        if given is None and isinstance(value, int) and value >= config.vocab_size:
            setattr(config, key, None)


def recommended_sampling(reader: Any) -> dict[str, Any]:
    """Returns the sampling values that a file's metadata recommend, by the keys of a generation_config.json."""
    found = {key: _metadata(reader, f"general.sampling.{name}") for name, key in _SAMPLING.items()}
    # A file holds numbers in 32 bits; the shortest decimal number with the same bits is the one that its author wrote.
    return {
        key: float(f"{value:.7g}") if isinstance(value, float) else value
        for key, value in found.items()
        if value is not None
    }


def add_rope(config: dict[str, Any], reader: Any) -> None:
    """Adds rope scaling from metadata and tensors that transformers ignores: without it positions would be wrong."""
    rope = config.setdefault("rope_parameters", {})
    rope = rope.get("full_attention", rope)  # Gemma 3 scales only its layers with full attention.
    kind, factor = _metadata(reader, "{}.rope.scaling.type"), _metadata(reader, "{}.rope.scaling.factor")
    original = _metadata(reader, "{}.rope.scaling.original_context_length")
    if kind in ("linear", "yarn"):
        rope.update(rope_type=kind, factor=float(factor or 1.0))
        if original is not None:
            rope["original_max_position_embeddings"] = int(original)
    factors = {
        tensor.name: [float(number) for number in tensor.data] for tensor in reader.tensors if "rope_f" in tensor.name
    }
    if _ROPE_FACTORS in factors:
        one = factors[_ROPE_FACTORS]
        rope.update(rope_type="longrope", short_factor=one, long_factor=one, factor=1.0, attention_factor=1.0)
    if _ROPE_SHORT in factors and _ROPE_LONG in factors:
        rope.update(rope_type="longrope", short_factor=factors[_ROPE_SHORT], long_factor=factors[_ROPE_LONG])
        config["original_max_position_embeddings"] = int(original or config["max_position_embeddings"])
    rotary_dim = _metadata(reader, "phi3.rope.dimension_count")
    if rotary_dim is not None:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rope["partial_rotary_factor"] = rotary_dim / head_dim


def turn_ends(config: dict[str, Any], reader: Any, tokenizer: Any) -> list[int]:
    """Returns tokens that end a text and tokens that end a chat turn, from the file's metadata and from its chat
    template."""
    ends = {*token_ids(config.get("eos_token_id")), *token_ids(_metadata(reader, "tokenizer.ggml.eot_token_id"))}
    vocabulary, template = tokenizer.get_vocab(), str(tokenizer.chat_template or "")
    ends.update(vocabulary[token] for token in _END_OF_TURN if token in vocabulary and token in template)
    return sorted(ends)
