"""Conversion of a GGUF file's metadata to tokenizer.json, as llama.cpp reads them (src/llama-vocab.cpp).

tokenizer.ggml.model   kind
llama                  SentencePiece's BPE: merges are ordered by the scores of tokens, and texts are not split
gpt2                   byte-level BPE with a list of merges; ``tokenizer.ggml.pre`` names the text splitting
gemma4                 character-level BPE with a list of merges

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pillion.engine.models.config_keys import words
from pillion.engine.quantized.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from pillion.errors import ConfigError

# Types of special tokens in tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"
# Key of tokenizer_config.json -> name in keys of the metadata.
_SPECIAL_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
# Tokens that end a turn, of any type. Without "</s>", which is an HTML tag in some vocabularies.
_END_TOKENS = words(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT>
    _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
    """
)


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A GGUF file's tokenizer: contents of tokenizer.json (``codec``) and tokenizer_config.json, chat templates by path
    in a model folder, and ids of EOS tokens."""

    codec: Mapping[str, Any]
    config: Mapping[str, Any]
    templates: Mapping[str, str]
    end_ids: Sequence[int]


def read_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Convert the tokenizer in a GGUF file's metadata. Raises ConfigError for an unsupported kind and for inconsistent
    metadata."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(metadata)
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise ConfigError("its vocabulary has duplicate tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    types = [1] * len(tokens) if types is None else types.tolist()
    if kind == "llama":
        parts, pre = _sentencepiece(metadata, tokens, ids), PreTokenizer((), add_bos=True)
    elif kind in ("gpt2", "gemma4"):
        pre = _pre_tokenizer("gemma4" if kind == "gemma4" else metadata.get("tokenizer.ggml.pre") or "default")
        parts = _bpe(metadata, ids, pre)
    else:
        raise ConfigError(f"its tokenizer is of the kind {kind!r}, which is not supported: use the model's folder")
    specials = {name: tokens[number] for name, number in _special_ids(metadata, kind, len(tokens)).items()}
    ends = _ends(metadata, tokens, ids, specials)
    adds = {name: metadata.get(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos")}
    adds["bos"] = pre.add_bos if adds["bos"] is None or (not pre.byte_level and pre.add_bos) else adds["bos"]
    codec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(metadata, tokens, types, ends)),
        "post_processor": _post_processor(ids, specials, adds),
        **parts,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **specials,
        **{f"add_{name}_token": bool(value) for name, value in adds.items()},
    }
    return GgufTokenizer(codec, config, _templates(metadata), sorted(ids[token] for token in ends))


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ConfigError("its metadata have no vocabulary")
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        if key in metadata and len(metadata[key]) < len(tokens):
            raise ConfigError(f"{key} has {len(metadata[key])} items for {len(tokens)} tokens")
    return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]


def _pre_tokenizer(name: str) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        raise ConfigError(f"its tokenizer.ggml.pre is {name!r}, which is not known: use the model's folder")
    return PRE_TOKENIZERS[name]


def _special_ids(metadata: Mapping[str, Any], kind: str, count: int) -> dict[str, int]:
    ids = {"bos_token": 1, "eos_token": 2, "unk_token": 0} if kind == "llama" else {}
    for name, key in _SPECIAL_NAMES.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and number < count:
            ids[name] = number
    return {name: number for name, number in ids.items() if number < count}


def _ends(
    metadata: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int], specials: Mapping[str, str]
) -> set[str]:
    """Return the tokens that end a text or a turn: those of _END_TOKENS, EOS, EOT and EOM."""
    end_tokens = {token for token in _END_TOKENS if token in ids}
    # In vocabularies with both tokens of one of these pairs, "<|end|>" only ends a message within a turn.
    if "<|end|>" in end_tokens and (
        end_tokens >= {"<|return|>", "<|call|>"} or end_tokens >= {"<|flush|>", "<|calls|>"}
    ):
        end_tokens.remove("<|end|>")
    ids_in_metadata = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
    end_tokens.update(tokens[number] for number in ids_in_metadata if isinstance(number, int) and number < len(tokens))
    return end_tokens | ({specials["eos_token"]} if "eos_token" in specials else set())


def _added_tokens(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], ends: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield the items of ``added_tokens`` in tokenizer.json, which are matched before a text is split."""
    name = str(metadata.get("general.name", "")).lower()
    # Phi-3's special tokens, except three, swallow the spaces after them.
    strips = "phi-3" in name or "phi3" in name
    for index, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        special = kind in (_CONTROL, _UNKNOWN) or token in ends
        if special or kind == _USER_DEFINED:
            yield {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and token not in ("<unk>", "<s>", "<|endoftext|>"),
                "normalized": False,
                "special": special,
            }


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the parts of tokenizer.json for SentencePiece's BPE."""
    # The normalizer also prepends a space after each special token.
    prepends_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    scores = metadata.get("tokenizer.ggml.scores")
    model = {
        **_bpe_model(ids, _merges_of(tokens, [0.0] * len(tokens) if scores is None else scores.tolist())),
        "unk_token": tokens[_special_ids(metadata, "llama", len(tokens)).get("unk_token", 0)],
        "fuse_unk": True,
        "byte_fallback": True,
    }
    return {
        "normalizer": _sequence(
            "normalizers", *([{"type": "Prepend", "prepend": _SPACE}] if prepends_space else []), _replace(" ", _SPACE)
        ),
        "pre_tokenizer": None,
        "decoder": _character_decoder(strips=bool(prepends_space)),
        "model": model,
    }


def _merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens whose concatenation is a token, by descending score of that token."""
    known = frozenset(tokens)
    order = sorted(range(len(tokens)), key=lambda index: -scores[index])
    return [
        (token[:middle], token[middle:])
        for token in map(tokens.__getitem__, order)
        for middle in range(1, len(token))
        if token[:middle] in known and token[middle:] in known
    ]


def _bpe(metadata: Mapping[str, Any], ids: Mapping[str, int], pre: PreTokenizer) -> dict[str, Any]:
    """Return the parts of tokenizer.json for BPE with a list of merges."""
    merge_strings = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merge_strings, list):
        raise ConfigError("its metadata have no tokenizer.ggml.merges")
    merges = []
    for merge in merge_strings:
        space = merge.find(" ", 1)
        if space < 0:
            raise ConfigError(f"its tokenizer.ggml.merges have {merge!r}, which is not a pair")
        merges.append((merge[:space], merge[space + 1 :]))
    model = {**_bpe_model(ids, merges), "ignore_merges": pre.ignore_merges, "byte_fallback": not pre.byte_level}
    splits = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in pre.splits
    ]
    if not pre.byte_level:
        return {
            "normalizer": _replace(" ", _SPACE),
            "pre_tokenizer": _sequence("pretokenizers", *splits),
            "decoder": _character_decoder(strips=False),
            "model": model,
        }
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": _sequence("pretokenizers", *splits, by_bytes),
        "decoder": by_bytes,
        "model": model,
    }


def _bpe_model(ids: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {"type": "BPE", "dropout": None, "unk_token": None, "vocab": ids, "merges": merges}


def _character_decoder(*, strips: bool) -> dict[str, Any]:
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strips else []
    return _sequence("decoders", _replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip)


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _sequence(name: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(parts)}


def _post_processor(
    ids: Mapping[str, int], specials: Mapping[str, str], adds: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the post-processor that adds BOS and EOS; None if it adds neither. ``adds``: whether to add "bos" and
    "eos"."""
    bos, eos = (specials.get(f"{name}_token") if adds[name] else None for name in ("bos", "eos"))
    if bos is None and eos is None:
        return None

    def around(part: str, number: int) -> list[dict[str, Any]]:
        def special(token: str | None) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": token, "type_id": number}}] if token else []

        return [*special(bos), {"Sequence": {"id": part, "type_id": number}}, *special(eos)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (bos, eos) if token is not None
        },
    }


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {
        "chat_template.jinja": metadata.get("tokenizer.chat_template"),
        "additional_chat_templates/tool_use.jinja": metadata.get("tokenizer.chat_template.tool_use"),
    }
    return {path: text for path, text in templates.items() if isinstance(text, str)}
