"""Values of ``tokenizer.ggml.pre`` in GGUF files -> text splitting and other options that llama.cpp derives from them.

Names and their effects are those of ``llama_vocab::impl::load`` in src/llama-vocab.cpp. Expressions are those of the
models' own tokenizers, which llama.cpp quotes and rewrites for C++. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Text splitting, and other options, of a kind of BPE vocabulary.

    Attributes:
        splits: regular expressions, applied in order to the substrings so far: matches become substrings, and so do the
            gaps between them.
        ignore_merges: True if a substring that is a token becomes that token without merges.
        add_bos: True if texts begin with BOS, for files whose metadata lack this option.
        byte_level: True if tokens have GPT-2's letters for bytes; False if they have "▁" for a space, and "<0x0A>" for
            a byte outside of the vocabulary's characters.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


_ENDINGS, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s+(?!\S)|\s+"
_WORD, _SIGNS, _LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _OTHERS = r"[^\r\n\p{L}\p{N}]?", rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"
_CASED = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?"
_GPT4O = rf"{_CASED}|\p{{N}}{{1,3}}|{_OTHERS}"
_SIGNED_WORD = r"""[!"#$%&'()*\+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_NO_STOPS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_OF_GPT2 = PreTokenizer((_GPT2,))


def _named(names: str, pre: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), pre)


PRE_TOKENIZERS = {
    # Also for files without the key.
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    **_named("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    "jais-2": PreTokenizer(
        (
            _LLAMA3.replace(
                _SPACES,
                # Runs of spaces, by powers of two.
                "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
                + r"|\s",
            ),
        )
    ),
    **_named(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((_QWEN2,))
    ),
    "qwen35": PreTokenizer(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
            rf"|{_LINES}|{_SPACES}",
        )
    ),
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(f"{_ENDINGS}|"),)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "seed-coder": PreTokenizer((rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}",)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_ENDINGS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
            rf"|\s*[\r\n]|{_SPACES}",
        )
    ),
    "tekken": PreTokenizer(
        (rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_OTHERS}",),
        ignore_merges=True,
        add_bos=True,
    ),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    **_named("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    "youtu": PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+"
            "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            f"|[\u3105-\u312f]+|{_HAN_AND_KANA}",
            rf"{_CASED}|\p{{N}}|{_OTHERS}",
        ),
        ignore_merges=True,
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            # Without Georgian letters, which have no case.
            "\\s?[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u10d0-\u10ff]]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")),
    **_named(
        "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
        PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, rf"{_SIGNED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}")),
    ),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _HAN_AND_KANA,
            rf"{_SIGNED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
            r"\p{N}",
        )
    ),
    **_named(
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*"
                rf"|\s*[\r\n]|{_SPACES}",
            )
        ),
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    **_named("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert", _OF_GPT2),
    **_named("mpt olmo jais trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe", _OF_GPT2),
    **_named("poro-chat bloom gpt3-finnish", PreTokenizer((_NO_STOPS,))),
    "viking": PreTokenizer((_NO_STOPS, r"\p{N}")),
    **_named("gemma4 granite-embed-multi-311m", PreTokenizer((r"[^\n]+|\n+",), add_bos=True, byte_level=False)),
    "sarvam-moe": PreTokenizer((r"[^\n]+|\n+",), byte_level=False),
}
