"""Small random-weight models in Hugging Face folders, with tokenizer and chat template, made in a second."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

# transformers lists this text model only among the vision models.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

BOS, EOS = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_prompt(seed: int, length: int) -> list[int]:
    """Return a prompt of byte tokens without special ones; prompts of one seed are prefixes of each other."""
    return [2 + (seed * 7919 + position * 104729) % 256 for position in range(length)]


def save_tokenizer(folder: pathlib.Path, template: str = TEMPLATE, marks: tuple[str, ...] = ()) -> int:
    """Write a byte-level tokenizer without merges; return its vocabulary size, 258 plus ``marks``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {BOS: 0, EOS: 1, **{letter: i + 2 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocab) + len(marks)


def save_model(
    folder: pathlib.Path,
    *,
    seed: int = 0,
    model_type: str = "llama",
    stacked_experts: bool = False,
    template: str = TEMPLATE,
    marks: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    **overrides: Any,
) -> pathlib.Path:
    """Write a random model of ``model_type`` with two layers and GQA; return ``folder``.

    Args:
        template: the chat template.
        marks: additional special tokens.
        without: keys to remove from the config.
        stacked_experts: one tensor for all experts of a layer, as in transformers 5.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = save_tokenizer(folder, template, marks)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        **overrides,
    }
    for key in without:
        del shape[key]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Keep the logarithms of state decay: scaled, no token would leave a trace.
            if parameter.dim() > 1 and not name.endswith("A_log"):
                # With the default initialization, logits are too flat for a meaningful argmax.
                parameter.mul_(6.0)
    model.save_pretrained(folder, save_original_format=not stacked_experts)
    return folder
