"""Tokenizers small enough to read: one token per byte, and a SentencePiece-like one with byte fallback."""

from __future__ import annotations

import json
import pathlib

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Make a tokenizer: ids 0 .. 255 are bytes in the byte alphabet's order, 256 is <bos>, 257 <eos>, 258 a word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    codec = tokenizers.Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    codec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.decoder = decoders.ByteLevel()
    codec.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    codec.add_tokens([AddedToken("añadido", special=False)])
    return codec


def fallback_tokenizer() -> tokenizers.Tokenizer:
    """Make a tokenizer of words with their leading space; other characters fall back to byte tokens."""
    words = ["▁", "▁Hello", "▁world", "lo", "▁the", "!", "a", "b", "e", "l", "o"]
    vocab = {"<unk>": 0, "<s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    vocab |= {word: 258 + n for n, word in enumerate(words)}
    codec = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    codec.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    codec.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    codec.add_special_tokens([AddedToken("<s>", special=True)])
    return codec


def write_tokenizer(
    folder: pathlib.Path, codec: tokenizers.Tokenizer, *, template: str = TEMPLATE, bos: str = "<bos>", **config: object
) -> pathlib.Path:
    """Write the tokenizer files of a model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    codec.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": {"content": bos}, "eos_token": "<eos>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def with_bos(codec: tokenizers.Tokenizer, bos: str = "<bos>") -> tokenizers.Tokenizer:
    """Make the tokenizer begin every text with ``bos``, like Llama's."""
    codec.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, codec.token_to_id(bos))]
    )
    return codec
