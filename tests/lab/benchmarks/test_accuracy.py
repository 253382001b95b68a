"""Accuracy of quantized weights: sums over tokens against plain formulas, and windows of a text."""

from __future__ import annotations

import math

import pytest
import torch

from lab.benchmarks.accuracy import Accuracy, TextScorer, windows
from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints.prepare import prepare
from tests.support.own_cache import model_cache


def test_sums_match_torch():
    generator = torch.Generator().manual_seed(1)
    exact, other = torch.log_softmax(torch.randn(2, 9, 50, generator=generator, dtype=torch.float64), -1)
    ids = torch.randint(0, 50, (9,), generator=generator)
    found = Accuracy()
    found.add(ids.tolist(), exact, other)
    wanted = torch.nn.functional.cross_entropy(other[:-1], ids[1:])
    assert found.perplexity == pytest.approx(math.exp(wanted))
    divergence = torch.nn.functional.kl_div(other[:-1], exact[:-1], reduction="batchmean", log_target=True)
    assert found.mean_divergence == pytest.approx(float(divergence))
    assert found.agreement == (exact[:-1].argmax(1) == other[:-1].argmax(1)).sum() / 8


def test_windows_of_a_text_are_scored_separately(tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", model_cache(tmp_path / "cache"))
    folder = save_model(tmp_path / "model")
    scorer = TextScorer(TorchBackend(prepare(ModelFlags(model=str(folder), dtype="float32")), 16, 1), 32)
    texts, found = list(windows(list(range(2, 252)), 32)), Accuracy()
    assert [len(text) for text in texts] == [32] * 7
    for text in texts:
        exact = scorer.score(text)
        found.add(text, exact, scorer.score(text))
    assert (found.tokens, found.agreement) == (7 * 31, 1.0)
    assert found.mean_divergence == pytest.approx(0.0, abs=1e-6)
