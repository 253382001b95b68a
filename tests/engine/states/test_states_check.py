"""What models with states cannot be served with yet is refused by name, before weights are read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pillion.config import DecodeFlags, WorkerFlags
from pillion.engine.backends.loading import choose_kernels, load_model
from pillion.engine.checkpoints.prepare import prepare
from pillion.errors import ConfigError
from pillion.speculative_config import SpeculativeConfig
from tests.support.families import make_model
from tests.support.hybrids import HYBRIDS

pytestmark = pytest.mark.usefixtures("own_cache")

DECODE = DecodeFlags(dtype="float32", device="cpu")
GUESSES = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def folder(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model"), HYBRIDS["lfm2"])[0])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (replace(DECODE, kv_cache_dtype="int8"), "--kv-cache-dtype int8"),
        (replace(DECODE, enable_lora=True), "--enable-lora"),
        (replace(DECODE, tensor_parallel_size=2), "--tensor-parallel-size 2"),
        (replace(DECODE, speculative_config=GUESSES), "--speculative-config"),
    ],
)
def test_refusals(folder: str, flags: WorkerFlags, words: str) -> None:
    with pytest.raises(ConfigError, match=f"lfm2: {words}.* not there yet"):
        load_model(replace(flags, model=folder), 1)


def test_torch_runs_such_models_by_itself(folder: str) -> None:
    flags = replace(DECODE, model=folder)
    assert choose_kernels(flags, prepare(flags))[0] is None
    loaded = load_model(flags, 1)
    # Two states of two convolutions of 64 channels and three taps.
    assert loaded.operators == "torch"
    assert loaded.backend.layout.state_bytes == 2 * 2 * 64 * 4
    assert loaded.backend.layout.working_pages == 3
