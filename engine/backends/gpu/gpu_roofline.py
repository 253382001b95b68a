"""Estimated cost of a step on a GPU by the roofline model, from the device's peak memory and arithmetic rates and the
model's bytes and operations.

    step              all weights are read once, except lookup tables such as the embedding
    token             two operations per weight that it uses; with logits, also per weight of the output projection
    KV read           its bytes
    query-key pair    its operations in all layers

The costs are added up, although a device reads while it computes, so a step near the ridge point takes as little as
half the estimate. The estimate determines a worker's token budget unless a flag sets it, and limits its first steps;
later ones are limited by a fit of measured steps (:mod:`pillion.engine.scheduling.step_cost`). Imports no torch.
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

# Fractions of the data sheet's rates that copies and matrix products achieve.
MEMORY_SHARE, ARITHMETIC_SHARE = 0.8, 0.5
# Dense bfloat16 operations per multiprocessor and cycle, by compute capability (NVIDIA's data sheets). Other devices
# use the last entry below theirs.
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
    not_newer = [entry for entry in OPERATIONS_PER_CYCLE if entry <= capability]
    per_cycle = OPERATIONS_PER_CYCLE[max(not_newer, default=min(OPERATIONS_PER_CYCLE))]
    device = driver.device(0)
    try:
        memory_bytes = device.memory_info()[1]
    finally:
        device.close()
    return DeviceRates(
        # DDR: two transfers per cycle of the memory clock.
        bytes_per_s=2 * value(DeviceAttribute.MEMORY_CLOCK_KHZ) * 1e3 * value(DeviceAttribute.BUS_BITS) / 8,
        operations_per_s=value(DeviceAttribute.MULTIPROCESSORS) * value(DeviceAttribute.CLOCK_KHZ) * 1e3 * per_cycle,
        memory_bytes=memory_bytes,
    )


def weight_bytes(prepared: PreparedModel, config: ModelConfig) -> int:
    """Return the bytes of a model's weights; the size of its files if it is quantized."""
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
    """Return the estimated cost of a step that ``devices`` devices of these rates share. ``kv_token_bytes``: KV of a
    token; ``state_bytes``: recurrent state of a sequence, which a step reads and writes."""
    config = load_config(prepared.folder)
    read_s = 1 / (rates.bytes_per_s * MEMORY_SHARE * devices)
    read_bytes = weight_bytes(prepared, config) - _value_bytes(prepared) * looked_up_weights(config)
    compute_s = 1 / (rates.operations_per_s * ARITHMETIC_SHARE * devices)
    return StepModel(
        # Launches and sampling take 0.3 ms.
        step_s=3e-4 + read_bytes * read_s,
        token_s=2 * model_weights(config)[1] * compute_s,
        sequence_s=2 * config.vocab_size * config.hidden_size * compute_s + 2 * state_bytes * read_s,
        read_s=kv_token_bytes * read_s,
        pair_s=pair_operations(config, config.kv_layers) * compute_s,
    )


def expected_on_gpu(flags: WorkerFlags, prepared: PreparedModel, devices: int) -> tuple[StepModel, DeviceRates]:
    """Return the estimated cost of a worker's steps on ``devices`` GPUs of this machine, and the rates of one GPU."""
    rates = device_rates(CudaDriver())
    layout = kv_layout(prepared, flags.block_size, kv_cache_dtype=flags.kv_cache_dtype, state_chunk=CHUNK)
    config = load_config(prepared.folder)
    # Layers that share another layer's KV read it again, so it counts once per reader.
    read = [layout.place(config.kv_source(layer)) for layer in config.kv_layers]
    token_bytes = layout.planes * sum(place.kv_heads * place.piece_bytes for place in read) / layout.block_size
    return expected_cost(rates, prepared, token_bytes, devices, layout.state_bytes), rates


def suitable_budget(
    cost: StepModel, rates: DeviceRates, flags: WorkerFlags, prepared: PreparedModel, devices: int = 1
) -> int:
    """Return the token budget for a worker with this step cost, limited by the memory that weights leave."""
    config = load_config(prepared.folder)
    tokens = suitable_tokens(cost, flags.target_itl_ms if isinstance(flags, DecodeFlags) else AUTO)
    # At most an eighth of the memory besides weights; the pool takes most of the rest.
    max_bytes = (rates.memory_bytes - weight_bytes(prepared, config) / devices) / 8
    # Ranks divide the values of a row; each stage has whole rows.
    share = flags.pipeline_parallel_size / devices
    while tokens > MIN_SUITABLE_TOKENS:
        if step_bytes(config, prepared.dtype, tokens, 0, mixed_rows=MAX_MIXED_ROWS) * share <= max_bytes:
            break
        tokens //= 2
    return tokens


def step_tokens(flags: WorkerFlags, devices: int) -> int:
    """Return the default token budget of a worker on ``devices`` GPUs of this machine."""
    prepared = prepare(flags)
    return suitable_budget(*expected_on_gpu(flags, prepared, devices), flags, prepared, devices)
