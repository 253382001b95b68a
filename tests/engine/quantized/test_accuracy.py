"""What quantized weights cost: sums over tokens against plain formulas, and the table of `pillion prepare`."""

from __future__ import annotations

import math

import pytest
import torch
from click.testing import CliRunner

from lab.testbed.tiny_model import save_model
from pillion.cli.app import cli
from pillion.config import ModelFlags
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.quantized.accuracy import Accuracy, TextScorer, compare, windows
from tests.support.own_cache import model_cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PILLION_CACHE", model_cache(tmp_path / "cache"))
    return save_model(tmp_path / "model")


def test_sums_are_those_of_torch():
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


def test_a_comparison_is_bounded_by_its_time(folder):
    scorer = TextScorer(TorchBackend(prepare(ModelFlags(model=str(folder), dtype="float32")), 16, 1), 32)
    texts = list(windows(list(range(2, 252)), 32))
    assert [len(text) for text in texts] == [32] * 7
    assert compare(scorer, scorer, texts, 0.0)[1].tokens == 31
    exact, other = compare(scorer, scorer, texts, 600.0)
    assert (other.tokens, other.agreement) == (7 * 31, 1.0)
    assert other.mean_divergence == pytest.approx(0.0, abs=1e-6)
    assert exact.perplexity == other.perplexity


def test_prepare_prints_what_quantization_costs(folder):
    arguments = ["prepare", str(folder), "--dtype", "float32", "--cpu-kernels", "torch", "--quantization", "int4"]
    found = CliRunner().invoke(cli, [*arguments, "--measure"], terminal_width=200)
    assert found.exit_code == 0, found.output
    assert "tokens of Python's documentation" in " ".join(found.output.split())
    rows = [line.split("│") for line in found.output.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == ["plain", "int4"]
    assert float(rows[0][3]) == 0
    assert float(rows[1][3]) > 0
    # Without a terminal there is no table, unless it is asked for.
    assert "perplexity" not in CliRunner().invoke(cli, arguments).output
