"""Tokenizers of Moonshot's models against tiktoken's algorithm."""

from __future__ import annotations

import base64
import itertools
import json
import pathlib
from collections import Counter

import pytest
from tokenizers import Tokenizer

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.checkpoints.tiktoken_files import has_vocabulary, write_tokenizer
from pillion.errors import ConfigError

TEXTS = (
    ["Hello", ",", " world", "!", "\n\n", "It's", " the", " the", " ", " there"],
    ["中文", "English", "混合", " Pascal", "，", "北京市"],
    ["123", "456", "7", " ", "89", "  \n", "HTTPServer", " don't", " DON'T", "\t", "x"],
    ["Größe", " élan", " русский", " 👩\u200d🚀", " ..."],
)
NAMED = {"2": ("<|end|>", True), "4": ("<|call|>", False)}


def learned(count: int) -> dict[bytes, int]:
    """Return ranks of all bytes in reverse order, and of ``count`` merges of the texts' most frequent pairs."""
    ranks = {bytes([byte]): 255 - byte for byte in range(256)}
    pieces = [[bytes([byte]) for byte in piece.encode()] for piece in itertools.chain(*TEXTS)]
    for rank in range(256, 256 + count):
        pairs = Counter(pair for piece in pieces for pair in itertools.pairwise(piece))
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[left + right] = rank
        for piece in pieces:
            for place in reversed(range(len(piece) - 1)):
                if piece[place : place + 2] == [left, right]:
                    piece[place : place + 2] = [left + right]
    return ranks


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Apply tiktoken's algorithm: keep a known token, else repeatedly merge the neighbours of the lowest rank."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        found = [(ranks[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        place = min(found)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def write_source(folder: pathlib.Path, ranks: dict[bytes, int], vocab_size: int) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    named = {
        str(len(ranks) + int(number)): {"content": content, "special": special}
        for number, (content, special) in NAMED.items()
        if len(ranks) + int(number) < vocab_size
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["x.Y", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": named}))
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return folder


@pytest.mark.parametrize("merges", [0, 60])
def test_texts_are_split_and_merged_as_tiktoken_does(merges, tmp_path):
    ranks = learned(merges)
    source = write_source(tmp_path / "source", ranks, len(ranks) + 6)
    assert has_vocabulary(source)
    write_tokenizer(source, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for pieces in TEXTS:
        found = tokenizer.encode("".join(pieces), add_special_tokens=False).ids
        assert found == [token for piece in pieces for token in merged(piece.encode(), ranks)]
        assert tokenizer.decode(found) == "".join(pieces)
    count = len(ranks)
    assert tokenizer.encode(f"a<|end|><|call|><|reserved_token_{count}|>").ids[1:] == [count + 2, count + 4, count]
    assert tokenizer.decode([count + 2, count + 4]) == "<|call|>"
    assert tokenizer.get_vocab_size() == count + 6


def test_a_model_with_a_tiktoken_vocabulary_is_prepared(own_cache, tmp_path):
    folder = save_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    write_source(folder, learned(0), 258)
    prepared = prepare(ModelFlags(model=str(folder), dtype="float32"))
    tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    assert tokenizer.encode("Hi").ids == [255 - ord("H"), 255 - ord("i")]
    assert (prepared.folder / "tokenizer_config.json").is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [*lines, "!! 256"], "cannot be read"),
        (lambda lines: [*lines, "YWI="], "cannot be read"),
        (lambda lines: [*lines, "YWI= 300"], "is damaged"),
        (lambda lines: lines[1:], "is damaged"),
    ],
)
def test_damaged_vocabularies_are_refused(change, words, tmp_path):
    source = write_source(tmp_path / "source", learned(0), 262)
    path = source / "tiktoken.model"
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with pytest.raises(ConfigError, match=words):
        write_tokenizer(source, tmp_path)


def test_names_of_tokens_that_have_a_rank_are_refused(tmp_path):
    source = write_source(tmp_path / "source", learned(0), 262)
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"7": {"content": "<|x|>"}}}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"names token 7, also in tiktoken\.model"):
        write_tokenizer(source, tmp_path)
