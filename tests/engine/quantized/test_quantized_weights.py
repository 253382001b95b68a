"""Packed quantized weights: sizes in a damaged file are checked."""

from __future__ import annotations

import pytest

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.backends.cpu.cpu_weights import load_cpu_weights
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.kernels.cpu.quantized import quantized_packing

pytestmark = pytest.mark.usefixtures("own_cache")


def test_damaged_numbers_of_rounded_rows_are_refused(tmp_path, monkeypatch):
    folder = str(save_model(tmp_path / "model"))
    prepared = prepare(ModelFlags(model=folder, dtype="float32", quantization="int8-dynamic"))
    weights = load_cpu_weights(prepared, load_config(prepared.folder), lambda line: None)
    assert weights.linear("layers.0.o").kind == quantized_packing.INT8_DOTS
    # Sums of more products exceed 32 bits.
    monkeypatch.setattr(quantized_packing, "MAX_DOT_INPUTS", weights.linear("layers.0.o").depth - 16)
    with pytest.raises(ConfigError, match="are inconsistent"):
        weights.linear("layers.0.o")
