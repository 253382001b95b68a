"""Small random hybrid models on the GPU backend, against transformers: in chunks, token by token, and among others."""

from __future__ import annotations

from tests.support.gpu_model import MAX_TOKENS, FakeDevicePool, FakeDividedPool, gpu_backend  # isort: skip  (before the kernels)

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion.engine.backends.gpu.gpu_loading import check_limits, check_operations, gpu_layout
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError, Internal
from pillion.kernels.step import SamplingRows
from pillion.types import SamplingParams
from tests.support.families import make_model, tokens_of
from tests.support.gpu import DEVICE, NATIVE
from tests.support.hybrids import ATTENTION, HYBRIDS, LINEAR, StateDriver
from tests.support.mixed_adapters import mixed_steps, with_adapters

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    # Unused exponentials and logarithms may overflow, as on a GPU.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
# Transformers' chunks of the delta rule round differently from its tokens.
TOLERANCE = 1e-3
# In the interpreter a step takes a second, so `make test` runs two models: they have every feature of the others except
# state spaces, latents, and a last layer without attention.
SHORT = ("lfm2-biases", "qwen3-5-moe")
# Left out without a GPU, since the other models cover them: they have more layers, plain layers instead of experts, or
# no biases. The CPU runs all of them, and so does a GPU.
LEFT_TO_GPUS = ("lfm2", "lfm2-moe", "qwen3-next", "qwen3-5", "granite-hybrid-dense", "nemotron-h")
LENGTH, PART = 21, 4
# Ten seconds in the interpreter.
LONG_INTERPRETED = pytest.mark.usefixtures() if NATIVE else pytest.mark.long


class GpuStateDriver(StateDriver):
    """A driver of the GPU backend, whose pool is the device's, in one piece or in ``shards``."""

    def __init__(self, *args: Any, shards: int = 0, **options: Any) -> None:
        self._shards = shards
        super().__init__(*args, **options)

    def bind(self, num_slots: int) -> None:
        layout = self.backend.layout
        if self._shards:
            self.memory = FakeDividedPool(layout, num_slots, self._shards)
        else:
            self.memory = FakeDevicePool(num_slots * layout.block_bytes)
        self.backend.bind_pool(self.memory, num_slots)
        self.backend.warm_up(MAX_TOKENS)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if NATIVE or name in SHORT else pytest.mark.long)
        for name in HYBRIDS
        if NATIVE or name not in LEFT_TO_GPUS
    ],
)
def test_logits_match_transformers(tmp_path, name):
    folder, flags = make_model(tmp_path / "model", HYBRIDS[name])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text, other = tokens_of(LENGTH, 2), tokens_of(LENGTH, 3)
    with torch.inference_mode():
        wanted, beside = (model(torch.tensor([tokens])).logits[0].float() for tokens in (text, other))
    assert wanted.std() > 0.5  # Flat logits would prove nothing.
    prepared = prepare(flags)
    driver = GpuStateDriver(prepared, num_slots=300, backend=gpu_backend(prepared))
    number, one, two = driver.sequences.add(3)
    # A chunk, draft tokens, and a token.
    close(driver.run_all(number, text, [LENGTH - 4, 3]), wanted)
    # A step that samples nothing ends after its last write.
    assert driver.step((one, other[:PART]), sample=()).shape == (0, driver.backend.vocab_size)
    got = driver.step((one, other[PART : PART + 1]), (two, text[: PART + 3]), sample=[0, 1, PART + 3])
    close(got, torch.stack((beside[PART], wanted[0], wanted[PART + 2])))
    got = driver.step((two, text[PART + 3 : PART + 4]), (one, other[PART + 1 : PART + 2]))
    close(got, torch.stack((wanted[PART + 3], beside[PART + 1])))
    if name == SHORT[0]:
        with pytest.raises(Internal, match="no slots for"):
            driver.backend.forward(driver.sequences.step([(one, [1])]))


@pytest.fixture(scope="module")
def attends_last(own_cache, tmp_path_factory):
    """A prepared model of a delta rule before attention, without experts."""
    shape = HYBRIDS["olmo-hybrid"] | {"num_hidden_layers": 2, "layer_types": [LINEAR, ATTENTION]}
    return prepare(make_model(tmp_path_factory.mktemp("model"), shape)[1])


@LONG_INTERPRETED
def test_a_step_continues_from_the_state_of_the_running_step(attends_last):
    """Steps launched ahead, whose tokens only the device knows, sample the same as steps in sequence; a chunk of the
    rule ends among them."""
    backend = gpu_backend(attends_last)
    assert backend.max_steps_in_flight == 2

    def answer(ahead: bool) -> list[int]:
        driver = GpuStateDriver(attends_last, num_slots=60, backend=backend)
        (one,) = driver.sequences.add(1)
        found: list[int] = []
        step = backend.launch(driver.batch((one, tokens_of(LENGTH, 2))), (), greedy(LENGTH))
        for position in range(LENGTH + 1, LENGTH + 5):
            if not ahead:
                found += step.wait().token_ids
            batch = driver.batch((one, [-1 if ahead else found[-1]]))
            following = backend.launch(batch, (), greedy(position))
            if ahead:
                found += step.wait().token_ids
            step = following
        return [*found, *step.wait().token_ids]

    found = answer(ahead=True)
    assert found == answer(ahead=False)
    assert len(set(found)) > 1


def greedy(position: int) -> SamplingRows:
    return SamplingRows.of([SamplingParams(temperature=0.0)], [0], [position])


@LONG_INTERPRETED
def test_states_fit_into_blocks_of_8_bit_keys(attends_last):
    """Pieces fit into blocks of more tokens, because 8-bit keys and values are small; states stay float32."""
    text, found = tokens_of(20, 5), []
    for fp8 in (False, True):
        driver = GpuStateDriver(attends_last, 64, num_slots=60, backend=gpu_backend(attends_last, 64, fp8=fp8))
        found.append(driver.run_all(driver.sequences.add(1)[0], text, [18, 1]))
    error = (found[0] - found[1]).abs().mean() / found[0].abs().mean()
    assert 0 < error < 0.1


# A rate per head and gates beside queries; four matrices in one; both mixers in the last layer; a last layer with a
# state; matrices of few values.
ADAPTED = {
    "qwen3-5": {"num_hidden_layers": 2, "layer_types": [LINEAR, ATTENTION]},
    "olmo-hybrid": {"num_hidden_layers": 2, "layer_types": [LINEAR, ATTENTION]},
    "falcon-h1": {},
    "granite-hybrid-dense": {"layer_types": [ATTENTION, LINEAR]},
    "lfm2-biases": {},
    "kimi-linear": {},
}


@LONG_INTERPRETED
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters(tmp_path, name):
    """Steps mix adapters of all matrices with the base model, against torch."""
    _, flags = make_model(tmp_path / "model", HYBRIDS[name] | ADAPTED[name])
    prepared, text = prepare(flags), tokens_of(18, 2)
    wanted = mixed_steps(with_adapters(StateDriver(prepared, num_slots=300)), text)
    driver = GpuStateDriver(prepared, num_slots=300, backend=gpu_backend(prepared, join=False))
    close(mixed_steps(with_adapters(driver), text), wanted)


def test_layers_without_a_kernel_are_refused(tmp_path):
    """A head of values is cut into pieces of 16, which must fit into a block."""
    sizes = {"linear_value_head_dim": 40}
    _, flags = make_model(tmp_path / "model", HYBRIDS["qwen3-5"] | sizes)
    prepared = prepare(flags)
    check_operations(load_config(prepared.folder))
    with pytest.raises(ConfigError, match="pieces of states do not fit"):
        check_limits(DEVICE, gpu_layout(prepared, 16))
