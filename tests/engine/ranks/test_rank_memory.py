"""The memory of ranks: passed by descriptor, and verified."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pillion.engine.models.config_parser import parse_config
from pillion.engine.ranks.rank_memory import TURNS, RankMemory
from pillion.errors import ConfigError, Internal

CONFIG = parse_config(
    {
        "model_type": "llama",
        "vocab_size": 258,
        "hidden_size": 40,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
)


def test_rank_memory_is_opened_by_its_descriptor():
    """Parts are separate, aligned to cache lines, and have room for whole panels of a product."""
    mine = RankMemory.create(CONFIG, 3, 50)
    other = RankMemory.open(os.dup(mine.fd))
    assert (other.ranks, other.max_tokens) == (3, 50)
    parts = [mine.words, *(mine.partials(turn) for turn in range(TURNS)), mine.logits]
    for number, part in enumerate(parts, 1):
        assert part.ctypes.data % 64 == 0
        part[:] = number
    found = [other.words, *(other.partials(turn) for turn in range(TURNS)), other.logits]
    assert [set(np.unique(part).tolist()) for part in found] == [{1}, {2}, {3}, {4}]
    assert mine.rank_bytes >= 50 * 64 * 4
    assert mine.logits.nbytes >= 50 * 288 * 4
    mine.close()
    other.close()
    mine.close()
    assert found[1][0] == 2, "arrays outlive the memory's close"


def test_an_abort_is_seen_by_all_ranks():
    mine = RankMemory.create(CONFIG, 2, 50)
    other = RankMemory.open(os.dup(mine.fd))
    mine.check_integrity()
    mine.words[128] = 7
    with pytest.raises(Internal, match=r"phases \[7, 0\]"):
        other.check_integrity()
    assert not mine.aborted
    other.abort()
    assert mine.aborted
    mine.check_integrity()


@pytest.mark.parametrize("size", [0, 100, 4096, 100_000])
def test_memory_of_another_kind_is_refused(size):
    descriptor = os.memfd_create("other")
    os.ftruncate(descriptor, size)
    with pytest.raises(ConfigError, match="this is not the memory of ranks"):
        RankMemory.open(descriptor)
    os.close(descriptor)


def test_memory_of_another_length_is_refused():
    mine = RankMemory.create(CONFIG, 2, 50)
    os.ftruncate(mine.fd, os.fstat(mine.fd).st_size + 4096)
    with pytest.raises(ConfigError, match="this is not the memory of ranks"):
        RankMemory.open(os.dup(mine.fd))
    mine.close()
