"""A model with a vocabulary of any size: the demo model, whose tokenizer gets longer tokens and whose table gets rows.

The new tokens join two tokens of English letters that the tokenizer has, a word and what may stand after it, as the
merges of a larger vocabulary do. Their rows of the embedding are random. Its answers are worth nothing, but a step, a
mask over its vocabulary and a look at its tokens cost what they cost in a model of that size.
"""

from __future__ import annotations

import json
import pathlib
import random
import shutil

import torch
from safetensors.torch import load_file, save_file

TABLE = "model.embed_tokens.weight"


def save_wide_model(source: pathlib.Path, folder: pathlib.Path, vocab_size: int) -> pathlib.Path:
    """Writes the model of ``source``, a Hugging Face folder, with ``vocab_size`` tokens to ``folder``; returns that."""
    folder.mkdir(parents=True)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    _grow(tokenizer["model"], vocab_size)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tensors = load_file(source / "model.safetensors")
    table = tensors[TABLE]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(vocab_size - len(table), table.shape[1], generator=generator) * table.float().std()
    tensors[TABLE] = torch.cat((table, rows.to(table.dtype)))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _grow(model: dict[str, object], vocab_size: int) -> None:
    """Adds tokens and their merges to a byte-level BPE."""
    vocab, merges = model["vocab"], model["merges"]
    assert isinstance(vocab, dict)
    assert isinstance(merges, list)
    words = [token for token in vocab if token[0] == "Ġ" and token[1:].isascii() and token[1:].isalpha()]
    ends = [token for token in vocab if token.isascii() and token.isalpha()]
    draw = random.Random(0)
    while len(vocab) < vocab_size:
        pair = [draw.choice(words), draw.choice(ends)]
        if "".join(pair) not in vocab:
            vocab["".join(pair)] = len(vocab)
            merges.append(pair)
