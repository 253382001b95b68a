"""Quantized checkpoints of models with states: every format holds its values, and is served by them."""

from __future__ import annotations

import pytest
import torch

from pillion.config import ModelFlags
from pillion.engine.backends.cpu.cpu_weights import load_cpu_weights
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models.config_parser import load_config
from pillion.kernels.cpu.products.packed_weight import PLAIN_TYPES
from tests.support.cpu_model import cpu_backend, needs_kernels
from tests.support.families import make_model, tokens_of
from tests.support.hybrids import HYBRIDS, StateDriver
from tests.support.quantized import Producer, awq, compressed, fp8, gptq, quantize_folder

pytestmark = pytest.mark.usefixtures("own_cache")

TOKENS = 50


def formats() -> dict[str, Producer]:
    return {
        "fp8": fp8((32, 16)),
        "awq": awq(16),
        "gptq-act-order": gptq(4, 16, act_order=True),
        "int8": compressed("int-quantized", num_bits=8, strategy="channel"),
    }


# Files group Qwen3-Next's rows by keys, and store OLMo-Hybrid's parts separately. 4-bit codes fill whole words with
# outputs; some models' rates have too few.
SHORT = (("qwen3-next", "fp8"), ("lfm2", "awq"), ("granite-hybrid", "gptq-act-order"), ("olmo-hybrid", "int8"))
IN_WORDS = ("lfm2", "lfm2-moe", "qwen3-next", "granite-hybrid", "falcon-h1", "nemotron-h")
ALL = [*((name, kind) for name in HYBRIDS for kind in ("fp8", "int8"))]
ALL += [(name, kind) for name in IN_WORDS for kind in ("awq", "gptq-act-order")]


@needs_kernels
@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*row, marks=[] if row in SHORT else pytest.mark.long) for row in ALL]
)
def test_logits_match_the_dequantized_model(tmp_path, name, kind):
    plain = make_model(tmp_path / "plain", HYBRIDS[name])[0]
    few, wide = quantize_folder(plain, tmp_path, formats()[kind])
    prepared, exact = (prepare(ModelFlags(model=str(folder), dtype="float32")) for folder in (few, wide))
    text, oracle = tokens_of(TOKENS, 7), StateDriver(exact)
    wanted = oracle.run_all(oracle.sequences.add()[0], text, [])
    assert wanted.std() > 0.5
    widened = StateDriver(prepared)
    close(widened.run_all(widened.sequences.add()[0], text, [17]), wanted)
    close(on_kernels(prepared, text), wanted)
    # Multipliers of the parts of Falcon-H1's matrices widen these.
    assert (linear_kinds(prepared) <= PLAIN_TYPES.keys()) == name.startswith("falcon")


@needs_kernels
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3-5", "int8"),
        pytest.param("lfm2-moe", "int4", marks=pytest.mark.long),
        pytest.param("nemotron-h", "int8-dynamic", marks=pytest.mark.long),
    ],
)
def test_plain_checkpoints_are_quantized(tmp_path, name, kind):
    plain = make_model(tmp_path / "plain", HYBRIDS[name])[0]
    prepared = prepare(ModelFlags(model=str(plain), dtype="float32", quantization=kind))
    text, widened = tokens_of(TOKENS, 7), StateDriver(prepared)
    wanted = widened.run_all(widened.sequences.add()[0], text, [17])
    found = on_kernels(prepared, text)
    if kind == "int8-dynamic":  # A row's values on a boundary may round to either code.
        assert (found - wanted).abs().mean() < 0.01 * wanted.std()
    else:
        close(found, wanted)
    assert not linear_kinds(prepared) <= PLAIN_TYPES.keys()


def on_kernels(prepared: PreparedModel, text: list[int]) -> torch.Tensor:
    """Return a text's logits, asserting the same bits for all chunkings, also of its states."""
    driver = StateDriver(prepared, num_slots=400, backend=cpu_backend(prepared, threads=2))
    whole, cut = driver.sequences.add(2)
    found = driver.run_all(whole, text, [])
    assert torch.equal(driver.run_all(cut, text, [1] * 20 + [7]), found)
    assert driver.state(cut) == driver.state(whole)
    driver.backend.close()
    return found


def linear_kinds(prepared: PreparedModel) -> set[str]:
    """Return the packed types of matrices in layers with states."""
    weights = load_cpu_weights(prepared, load_config(prepared.folder), print, ModelCache())
    names = [key.removesuffix(".kind") for key in weights.numbers if key.endswith(".kind")]
    return {weights.linear(one).kind for one in names if ".linear." in one or ".conv." in one}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
