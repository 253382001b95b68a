"""Tokenizers of GGUF files against llama.cpp, whose tokens of October 2026 are in llama_cpp_tokens.json, and
transformers."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

from pillion.engine.quantized.gguf_pre_tokenizers import PRE_TOKENIZERS
from pillion.engine.quantized.gguf_tokenizer import read_tokenizer
from pillion.errors import ConfigError
from pillion.gateway.tokens.tokenizer import ModelTokenizer

RECORDED = json.loads((pathlib.Path(__file__).with_name("llama_cpp_tokens.json")).read_text("utf-8"))
TEXTS, BPE, SPM = RECORDED["texts"], RECORDED["bpe"], RECORDED["spm"]
ROWS = {name: row for row in RECORDED["rows"] for name in row["files"]}
MAX_TOKENS = 1000
# Kinds whose expressions llama.cpp rewrites without combining marks and capitals; Pillion uses the models' own.
REWRITTEN = ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "youtu")
MARKS_OR_CAPITALS = ("e\u0301a\u0308", "word\u0301s", "CamelCase")
# Names split by code in llama.cpp, or of unsupported models.
NOT_READ = frozenset(["kimi-k2", "superbpe", "afmoe", "chameleon", "whitespace", "granite-embed-multi-97m"])


def metadata_of(name: str) -> dict[str, Any]:
    """Return the recorded metadata of the file ``name``."""
    model, _, kind = name.partition("-")
    vocabulary = BPE if model == "bpe" else SPM
    tokens, types = vocabulary["tokens"], vocabulary["types"]
    if name == "spm-phi3":
        types = [one if token.strip() else 1 for token, one in zip(tokens, types, strict=True)]
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(types, np.int32)}
    if model == "spm":
        own = {"noprefix": {"tokenizer.ggml.add_space_prefix": False}, "phi3": {"general.name": "Phi-3 mini"}}
        own["nobos"] = {"tokenizer.ggml.add_bos_token": False}
        scores = np.array(SPM["scores"], np.float32)
        return found | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores} | own.get(kind, {})
    merges = BPE["merges"] if model == "bpe" else merges_by_score()
    found |= {"tokenizer.ggml.model": "gemma4" if model == "gemma4" else "gpt2", "tokenizer.ggml.pre": kind}
    return found | {"tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 1}


def merges_by_score() -> list[str]:
    """Return the pairs of the SentencePiece vocabulary as a list of merges."""
    scores = dict(zip(SPM["tokens"], SPM["scores"], strict=True))
    pairs = [
        (token[:middle], token[middle:])
        for token in SPM["tokens"]
        for middle in range(1, len(token))
        if token[:middle] in scores and token[middle:] in scores and " " not in token
    ]
    return [" ".join(pair) for pair in sorted(pairs, key=lambda pair: -scores["".join(pair)])]


def codec_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(read_tokenizer(metadata).codec))


@pytest.mark.parametrize("name", ROWS)
def test_tokens_match_llama_cpp(name: str) -> None:
    metadata, row = metadata_of(name), ROWS[name]
    codec = codec_of(metadata)
    for text, wanted in zip(TEXTS, row["ids"], strict=True):
        if name.removeprefix("bpe-") in REWRITTEN and text.startswith(MARKS_OR_CAPITALS):
            continue
        found = codec.encode(text, add_special_tokens=False).ids
        assert found == wanted, text
        # A SentencePiece text gets a space after each special token.
        if not name.startswith("spm") or name == "spm-noprefix" or text == TEXTS[0]:
            assert codec.decode(found, skip_special_tokens=False) == text
    assert (codec.encode("a").ids != codec.encode("a", add_special_tokens=False).ids) == row["bos"]
    assert read_tokenizer(metadata).config["add_bos_token"] == row["bos"]


def test_every_kind_that_is_read_was_recorded() -> None:
    assert {name.partition("-")[2] for name in ROWS if not name.startswith("spm")} == set(PRE_TOKENIZERS)
    assert not NOT_READ & set(PRE_TOKENIZERS)
    for kind in NOT_READ:
        with pytest.raises(ConfigError, match=f"tokenizer.ggml.pre is '{kind}', which is not known"):
            read_tokenizer(metadata_of("bpe-gpt-2") | {"tokenizer.ggml.pre": kind})


@pytest.mark.parametrize("kind", GGUF_PRE_TOKENIZER_SPLITS)
def test_texts_are_split_as_in_transformers(kind: str) -> None:
    """For kinds known to transformers, the expression is that of the models' own tokenizers."""
    ours, theirs = PRE_TOKENIZERS[kind].splits, GGUF_PRE_TOKENIZER_SPLITS[kind]
    assert len(ours) == 1
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in (ours[0], theirs)]
    for text in TEXTS:
        found, wanted = (split.pre_tokenize_str(text) for split in splits)
        assert found == wanted, text


def test_merges_by_score_match_transformers() -> None:
    """The rules agree for texts without leading spaces, special tokens and tokens of spaces."""
    metadata = metadata_of("spm-phi3") | {"tokenizer.ggml.add_bos_token": False}
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = {"tokenizer_type": "llama", "tokens": tokens, "scores": SPM["scores"], "token_type": [1] * len(tokens)}
    theirs, _ = convert_gguf_tokenizer("llama", tokenizer)
    ours = codec_of(metadata)
    plain = [text for text in TEXTS if text.strip() == text and not any(mark in text for mark in ("<", "\n", "  "))]
    assert len(plain) > 15
    for text in plain:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids, text


# Tokenizer keys without effect, with their purpose.
NO_EFFECT = {
    "REMOVE_EXTRA_WS": "Unigram",
    "PRECOMPILED_CHARSMAP": "Unigram",
    "TOKEN_TYPE_COUNT": "BERT",
    "ADD_SEP": "BERT",
    "HF_JSON": "no converter writes it, and llama.cpp does not read it",
    "RWKV": "RWKV",
    "CHAT_TEMPLATES": "the names of templates, whose texts have keys of their own",
    **{f"FIM_{name}_ID": "fill-in-the-middle" for name in ("PRE", "SUF", "MID", "PAD", "REP", "SEP")},
    **{f"{name}_ID": "an old name for fill-in-the-middle" for name in ("PREFIX", "SUFFIX", "MIDDLE")},
}
CHANGED = {
    "MODEL": "gpt2",
    "PRE": "smollm",
    "ADD_PREFIX": False,
    "ADD_BOS": False,
    "ADD_EOS": True,
    "CHAT_TEMPLATE": "a",
    "CHAT_TEMPLATE_N": "a",
    "HF_JSON": "{}",
}


@pytest.mark.parametrize("name", [name for name in vars(gguf.Keys.Tokenizer) if not name.startswith("_")])
def test_no_key_of_a_tokenizer_is_dropped(name: str) -> None:
    """Each key known to the gguf package changes the result, or has a reason why not."""
    key = getattr(gguf.Keys.Tokenizer, name).format(name="tool_use")
    metadata = metadata_of("bpe-llama-bpe" if name in ("PRE", "MERGES") else "spm")
    metadata |= {"tokenizer.ggml.eos_token_id": 2}
    value: Any = CHANGED.get(name, 7 if name.endswith("_ID") else 1)
    if name in ("LIST", "MERGES", "SCORES", "TOKEN_TYPE"):
        value = metadata[key][::-1]
    plain = read_tokenizer(metadata)
    with contextlib.suppress(ConfigError):
        assert (read_tokenizer(metadata | {key: value}) == plain) == (name in NO_EFFECT)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "bert"}, "of the kind 'bert', which is not supported"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "duplicate tokens"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.token_type": np.array([1])}, "token_type has 1 items"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab', which is not a pair"),
    ],
)
def test_metadata_that_contradict_each_other_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tokenizer(metadata_of("bpe-gpt-2") | change)


def ends(tokens: list[str], **named: int) -> list[str]:
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": []}
    metadata |= {f"tokenizer.ggml.{name}_token_id": number for name, number in named.items()}
    found = read_tokenizer(metadata | {"tokenizer.ggml.tokens": tokens})
    return [tokens[number] for number in found.end_ids]


def test_tokens_that_end_a_turn_are_found_by_their_texts() -> None:
    """Like llama.cpp, except "</s>", an HTML tag in vocabularies with another end."""
    assert ends(["a", "<|eot_id|>", "<|eom_id|>", "</s>"]) == ["<|eot_id|>", "<|eom_id|>"]
    assert ends(["a", "</s>", "b"], eos=1, eot=2, eom=99) == ["</s>", "b"]
    assert ends(["<|end|>", "<|endoftext|>"]) == ["<|end|>", "<|endoftext|>"]
    assert ends(["<|end|>", "<|return|>", "<|call|>"]) == ["<|return|>", "<|call|>"]


def test_metadata_in_the_converted_folder(tmp_path: pathlib.Path) -> None:
    named = {"eos": 2, "unknown": 0, "padding": 3, "seperator": 4, "mask": 5}
    metadata = metadata_of("bpe-llama-bpe") | {
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in named.items()},
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
    }
    found = read_tokenizer(metadata)
    assert found.templates == {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"}
    assert found.config["sep_token"] == "<think>"
    assert found.config["mask_token"] == "</think>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(found.codec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(found.config))
    (tmp_path / "chat_template.jinja").write_text("plain")
    tokenizer = ModelTokenizer.load(tmp_path)
    assert tokenizer.adds_bos
    assert tokenizer.specials["eos_token"] == "<|im_end|>"
    hello = BPE["tokens"].index("Hello")
    assert tokenizer.encode_text("Hello", MAX_TOKENS) == (1, hello, 2)


def test_a_token_that_is_marked_as_text_may_end_a_turn() -> None:
    """Some converters wrongly mark such tokens as plain."""
    metadata = metadata_of("bpe-gpt-2")
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[2] = 1
    codec = codec_of(metadata | {"tokenizer.ggml.token_type": types})
    assert codec.encode("a<|im_end|>", add_special_tokens=False).ids[-1] == 2
