"""Conversion of the vocabulary of Moonshot's models (Kimi K2, Moonlight) to tokenizer.json. Imports no torch.

Their folders have a ``tiktoken.model`` and a program that reads it. The program is not run. It splits texts by one
regular expression, merges bytes in the order of ranks, and takes the tokens after the last rank from
tokenizer_config.json.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pillion.engine.models.config_json import read_json
from pillion.errors import ConfigError

VOCABULARY_NAME = "tiktoken.model"


def has_vocabulary(folder: Path) -> bool:
    """Return whether a folder has a tiktoken.model, and a tokenizer_config.json that names Moonshot's class."""
    config = folder / "tokenizer_config.json"
    is_supported = config.is_file() and read_json(config).get("tokenizer_class") == "TikTokenTokenizer"
    return is_supported and (folder / VOCABULARY_NAME).is_file()


def _split_pattern() -> str:
    """Return the regular expression whose matches are the substrings to merge: runs of Chinese characters, words of
    other letters with an English ending, up to three digits, other symbols, and spaces."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    before, ending = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return "|".join(
        (
            r"[\p{Han}]+",
            f"{before}{upper}*{lower}+{ending}",
            f"{before}{upper}+{lower}*{ending}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


def write_tokenizer(source: Path, folder: Path) -> None:
    """Convert the vocabulary in ``source`` to a tokenizer.json in ``folder``. Raises ConfigError for a damaged
    vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks = _ranks(source / VOCABULARY_NAME)
    letters = bytes_to_unicode()
    spelling = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = [(spelling[left], spelling[right]) for left, right in _merges(ranks)]
    vocabulary = {spelling[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_split_pattern()), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for name, special in _named_tokens(source, len(ranks)):
        tokenizer.add_tokens([AddedToken(name, special=special, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))


def _ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks of tokens by their bytes, in ascending order. Raises ConfigError for a damaged file."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise ConfigError(f"{path} is damaged: it lacks ranks, has some twice, or has no token for some byte")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield every pair of tokens whose concatenation is a token, in the order of that token's rank."""
    for token in ranks:
        for middle in range(1, len(token)):
            if token[:middle] in ranks and token[middle:] in ranks:
                yield token[:middle], token[middle:]


def _named_tokens(source: Path, first: int) -> Iterator[tuple[str, bool]]:
    """Yield the tokens with ids from ``first`` to the end of the model's vocabulary, and whether each is special. Ids
    without a name become reserved tokens."""
    added_tokens: dict[int, Mapping[str, Any]] = {
        int(number): token
        for number, token in (read_json(source / "tokenizer_config.json").get("added_tokens_decoder") or {}).items()
    }
    if min(added_tokens, default=first) < first:
        raise ConfigError(f"{source}: tokenizer_config.json names token {min(added_tokens)}, also in {VOCABULARY_NAME}")
    model = read_json(source / "config.json") if (source / "config.json").is_file() else {}
    count = model.get("vocab_size", (model.get("text_config") or {}).get("vocab_size", 0))
    for number in range(first, max(count, max(added_tokens, default=0) + 1)):
        token = added_tokens.get(number, {})
        yield token.get("content", f"<|reserved_token_{number}|>"), bool(token.get("special", True))
