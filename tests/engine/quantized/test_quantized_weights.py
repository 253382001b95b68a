"""Packed quantized weights: what a damaged file says of them is not believed."""

from __future__ import annotations

from math import inf, nan

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
    codes = weights.tensors["layers.0.o.row_codes"]
    assert weights.linear("layers.0.o").row_codes is not None
    for place, wrong in ((0, nan), (0, 3), (0, 0.5), (1, 0), (1, -1), (1, inf), (1, nan), (2, nan), (2, 128), (2, 0.5)):
        weights.tensors["layers.0.o.row_codes"] = codes.clone()
        weights.tensors["layers.0.o.row_codes"][place] = wrong
        with pytest.raises(ConfigError, match="do not fit together"):
            weights.linear("layers.0.o")
    weights.tensors["layers.0.o.row_codes"] = codes[:2]
    with pytest.raises(ConfigError, match="do not fit together"):
        weights.linear("layers.0.o")
    weights.tensors["layers.0.o.row_codes"] = codes
    # Sums of more products than this leave 32 bits.
    monkeypatch.setattr(quantized_packing, "MAX_DOT_INPUTS", weights.linear("layers.0.o").depth - 16)
    with pytest.raises(ConfigError, match="do not fit together"):
        weights.linear("layers.0.o")
