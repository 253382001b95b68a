"""Estimated cost of a step on a GPU before any was measured, by the roofline model: the peak memory and arithmetic
rates of the device, and the bytes and operations of the model.

    step        all weights are read once, except tables of which a token reads a row
    token       two operations per weight that it passes; with logits, also per weight of the output projection
    KV read     its bytes;  query-key pair: its operations in all layers

The parts are added up, although a device reads while it computes, so a step near the ridge takes down to half as long.
The estimate sets a worker's token budget unless a flag does, and bounds its first steps beside streams; afterwards the
fit of measured steps does (:mod:`pillion.engine.scheduling.step_cost`). Imports no torch.
"""

from __future__ import annotations

from ctypes import c_int
from dataclasses import dataclass

from pillion.config import AUTO, DecodeFlags, WorkerFlags
from pillion.engine.backends.backend import kv_layout
from pillion.engine.backends.step_memory import step_bytes
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.layer_operations import MAX_MIXED_ROWS
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_work import looked_up_weights, model_weights, pair_operations
from pillion.engine.scheduling.step_cost import MIN_SUITABLE_TOKENS, suitable_tokens
from pillion.engine.scheduling.step_model import StepModel
from pillion.kernels.state_pieces import CHUNK
from pillion.kvstore.gpu.cuda_driver import CudaDriver, DeviceAttribute

# Achieved shares of the data sheet's rates, by copies and by matrix products.
MEMORY_SHARE, ARITHMETIC_SHARE = 0.8, 0.5
# Time of a step's launches and its sampling, beside the model's work.
LAUNCH_S = 3e-4
# Max share of the memory left by weights for a step's buffers.
STEP_SHARE = 1 / 8
# Dense bfloat16 operations per multiprocessor and cycle, by compute capability (NVIDIA's data sheets); newer devices
# use the last entry.
OPERATIONS_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Peak rates of a device's memory and arithmetic, and the bytes of its memory."""

    bytes_per_s: float
    operations_per_s: float
    memory_bytes: int


def device_rates(driver: CudaDriver) -> DeviceRates:
    """Return the rates of the device that torch calls cuda:0. Raises ConfigError."""
    number = driver.read(c_int, "cuDeviceGet", 0)

    def value(attribute: DeviceAttribute) -> int:
        return driver.read(c_int, "cuDeviceGetAttribute", attribute, number)

    capability = value(DeviceAttribute.MAJOR), value(DeviceAttribute.MINOR)
    known = [one for one in OPERATIONS_PER_CYCLE if one <= capability]
    each = OPERATIONS_PER_CYCLE[max(known, default=min(OPERATIONS_PER_CYCLE))]
    device = driver.device(0)
    try:
        memory_bytes = device.memory_info()[1]
    finally:
        device.close()
    return DeviceRates(
        # Double data rate: two words per cycle of the memory clock.
        bytes_per_s=2 * value(DeviceAttribute.MEMORY_CLOCK_KHZ) * 1e3 * value(DeviceAttribute.BUS_BITS) / 8,
        operations_per_s=value(DeviceAttribute.MULTIPROCESSORS) * value(DeviceAttribute.CLOCK_KHZ) * 1e3 * each,
        memory_bytes=memory_bytes,
    )


def weight_bytes(prepared: PreparedModel, config: ModelConfig) -> int:
    """Return the bytes of a model's weights: of its files, if they contain quantized matrices."""
    if config.quantization is not None:
        return sum(file.stat().st_size for file in prepared.folder.glob("*.safetensors"))
    return _value_bytes(prepared) * (
        model_weights(config)[0] + looked_up_weights(config) + config.vocab_size * config.hidden_size
    )


def _value_bytes(prepared: PreparedModel) -> int:
    return 2 if prepared.dtype != "float32" else 4


def expected_cost(
    rates: DeviceRates, prepared: PreparedModel, kv_token_bytes: float, devices: int = 1, state_bytes: int = 0
) -> StepModel:
    """Return the expected cost of a step on ``devices`` devices of these rates, which share its work. A sequence's
    state is read and written."""
    config = load_config(prepared.folder)
    read_s = 1 / (rates.bytes_per_s * MEMORY_SHARE * devices)
    read_bytes = weight_bytes(prepared, config) - _value_bytes(prepared) * looked_up_weights(config)
    compute_s = 1 / (rates.operations_per_s * ARITHMETIC_SHARE * devices)
    return StepModel(
        step_s=LAUNCH_S + read_bytes * read_s,
        token_s=2 * model_weights(config)[1] * compute_s,
        sequence_s=2 * config.vocab_size * config.hidden_size * compute_s + 2 * state_bytes * read_s,
        read_s=kv_token_bytes * read_s,
        pair_s=pair_operations(config, config.kv_layers) * compute_s,
    )


def expected_on_gpu(flags: WorkerFlags, prepared: PreparedModel, devices: int) -> tuple[StepModel, DeviceRates]:
    """Return the expected cost of a worker's steps on ``devices`` GPUs of this machine, and the rates of one."""
    rates = device_rates(CudaDriver())
    layout = kv_layout(prepared, flags.block_size, kv_cache_dtype=flags.kv_cache_dtype, state_chunk=CHUNK)
    config = load_config(prepared.folder)
    # Several layers may read the keys and values of one.
    read = [layout.place(config.kv_source(layer)) for layer in config.kv_layers]
    token_bytes = layout.planes * sum(place.kv_heads * place.piece_bytes for place in read) / layout.block_size
    return expected_cost(rates, prepared, token_bytes, devices, layout.state_bytes), rates


def suitable_budget(
    cost: StepModel, rates: DeviceRates, flags: WorkerFlags, prepared: PreparedModel, devices: int = 1
) -> int:
    """Return a worker's token budget for this step cost and the memory left by weights."""
    config = load_config(prepared.folder)
    tokens = suitable_tokens(cost, flags.target_itl_ms if isinstance(flags, DecodeFlags) else AUTO)
    most_bytes = STEP_SHARE * (rates.memory_bytes - weight_bytes(prepared, config) / devices)
    # Ranks share the values of a row; each stage has whole rows.
    each = flags.pipeline_parallel_size / devices
    while tokens > MIN_SUITABLE_TOKENS:
        if step_bytes(config, prepared.dtype, tokens, 0, mixed_rows=MAX_MIXED_ROWS) * each <= most_bytes:
            break
        tokens //= 2
    return tokens


def step_tokens(flags: WorkerFlags, devices: int) -> int:
    """Return the token budget for a worker's model on ``devices`` GPUs of this machine."""
    prepared = prepare(flags)
    return suitable_budget(*expected_on_gpu(flags, prepared, devices), flags, prepared, devices)
