"""Small checkpoints quantized in their producers' formats, beside plain ones of the same values.

Packing and dequantization follow the formats' public descriptions; compressed-tensors packs and unpacks its own.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pillion.engine.quantized.formats.pillion_format import stored_tensors
from pillion.kernels.torch.quantized_matrix import CODINGS, QuantizedMatrix

Tensors = dict[str, torch.Tensor]
# A plain matrix [N, K], or [experts, N, K], by its name -> the tensors of the file, and the values that they represent.
Quantize = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Producer:
    """A format: the config that it writes, and its conversion of a matrix. ``stacks``: write experts' matrices stacked
    like the plain folder; otherwise leave these unquantized."""

    config: Mapping[str, Any]
    quantize: Quantize
    stacks: bool = False


def quantize_folder(
    plain: pathlib.Path, into: pathlib.Path, producer: Producer, also: tuple[str, ...] = ()
) -> tuple[pathlib.Path, pathlib.Path]:
    """Quantize the projections of a folder, and the matrices whose names contain a word of ``also``.

    Return the quantized folder, and a plain one of the same values.
    """
    source, few, wide = load_file(plain / "model.safetensors"), into / "few-bits", into / "wide"
    tensors: Tensors = {}
    values: Tensors = {}
    for name, tensor in source.items():
        chosen = is_projection(name, tensor) or any(word in name for word in also)
        if chosen and (tensor.dim() == 2 or producer.stacks):
            found, values[name] = producer.quantize(name, tensor)
            tensors |= {key: value.contiguous() for key, value in found.items()}
        else:
            tensors[name] = values[name] = tensor
    for folder, content in ((few, tensors), (wide, values)):
        shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file({name: value.contiguous() for name, value in content.items()}, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (few / "config.json").write_text(json.dumps({**config, "quantization_config": dict(producer.config)}))
    return few, wide


def experts_in_mxfp4(wide: pathlib.Path, few: pathlib.Path, tiny: str = "") -> None:
    """Write random blocks and powers of two as experts of the gpt-oss model ``wide`` to ``few``, and transformers'
    dequantized values to ``wide``. In the tensor ``tiny`` some groups are nearly 0."""
    tensors, random, packed = load_file(wide / "model.safetensors"), torch.Generator().manual_seed(3), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(120, 124, blocks.shape[:-1], generator=random, dtype=torch.uint8)
        if name == tiny:
            scales[:, ::7] = 0
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    shutil.copytree(wide, few)
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    plain = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in packed}
    save_file({**plain, **packed}, few / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((few / "config.json").read_text())
    # As in openai/gpt-oss-20b.
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    how = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (few / "config.json").write_text(json.dumps({**config, "quantization_config": how}))


def is_projection(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and any(word in name for word in ("_proj", ".w1.", ".w2.", ".w3."))


def module_of(name: str) -> str:
    return name.removesuffix(".weight")


def packed(codes: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack uint8 [R, C] -> int32 [R, C * bits / 32]; ``order``: a word's codes from the lowest bits up."""
    if bits == 3:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        return pack_to_int32((codes.int() - 4).to(torch.int8), 3)
    per_word = 32 // bits
    wide = torch.zeros(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int64)
    for place, code in enumerate(order or range(per_word)):
        wide |= codes[:, code::per_word].long() << (bits * place)
    return wide.to(torch.int32)


@dataclass(frozen=True)
class Affine:
    """Codes uint8 [N, K] of numbers scale * (code - zero), scales float16 and zeros uint8 [N, G], and the numbers."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    values: torch.Tensor


def affine(weight: torch.Tensor, bits: int, group: int, symmetric: bool, groups: torch.Tensor | None = None) -> Affine:
    """Round in groups of ``group`` inputs, 0 for all; ``groups`` int64 [K] is the group of each input."""
    rows, columns = weight.shape
    order = torch.arange(columns) if groups is None else torch.argsort(groups, stable=True)
    size, top = group or columns, 2**bits - 1
    grouped = weight[:, order].view(rows, -1, size)
    if symmetric:
        scales = (grouped.abs().amax(-1) / (top // 2)).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    values = (codes - zeros[..., None]) * scales.float()[..., None]
    back = torch.argsort(order)
    codes, values = (each.reshape(rows, columns)[:, back] for each in (codes, values))
    return Affine(codes.to(torch.uint8), scales, zeros.to(torch.uint8), values)


def own(chosen: Mapping[str, tuple[str, int]]) -> Producer:
    """Return Pillion's own layout: coding ("int4", "int8", "uint4" with offsets) and group by the end of a matrix's
    name."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        coding, group = next(chosen[end] for end in chosen if name.endswith(end))
        found = affine(weight, 8 if coding == "int8" else 4, group, coding != "uint4")
        codes, scales = found.codes, found.scales.float()
        offsets = -scales * found.zeros if coding == "uint4" else None
        codes = codes ^ 0x80 if coding == "int8" else codes
        return stored_tensors(name, QuantizedMatrix(coding, codes, scales, group, offsets)), found.values

    return Producer({"quant_method": "pillion"}, quantize)


def awq(group: int = 16) -> Producer:
    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found, module, order = affine(weight, 4, group, False), module_of(name), (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            f"{module}.qweight": packed(found.codes.t(), 4, order),
            f"{module}.qzeros": packed(found.zeros.t(), 4, order),
            f"{module}.scales": found.scales.t(),
        }
        return tensors, found.values

    sizes = {"bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}
    return Producer({"quant_method": "awq", **sizes, "modules_to_not_convert": None}, quantize)


def gptq(
    bits: int = 4, group: int = 16, symmetric: bool = True, act_order: bool = False, version: str = "gptq"
) -> Producer:
    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns, module = weight.shape[1], module_of(name)
        groups = torch.arange(columns) // (group or columns)
        if act_order:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        found = affine(weight, bits, group, symmetric, groups)
        # Version 1 stores zero points less one, with 0 wrapping to the greatest code.
        zeros = found.zeros if version == "gptq_v2" else (found.zeros.int() - 1) % 2**bits
        tensors = {
            f"{module}.qweight": packed(found.codes, bits).t(),
            f"{module}.qzeros": packed(zeros.t(), bits),
            f"{module}.scales": found.scales.t(),
            f"{module}.g_idx": groups.int(),
        }
        return tensors, found.values

    sizes = {"bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": act_order}
    return Producer({"quant_method": "gptq", **sizes, "checkpoint_format": version, "damp_percent": 0.01}, quantize)


def auto_round(
    bits: int = 4,
    group: int = 16,
    symmetric: bool = True,
    packing: str = "auto_round:auto_gptq",
    numbers: str = "int",
) -> Producer:
    """Return AutoRound, whose formats are those of GPTQ without the groups of inputs, of AWQ, NVFP4 and MXFP4."""
    floats = {"mx_fp": mxfp4, "nv_fp": nvfp4}.get(numbers)
    base = awq(group) if "awq" in packing else floats(group) if floats else None
    version = "gptq" if packing.endswith("gptq") else "gptq_v2"
    made = base or gptq(bits, group, symmetric, version=version)

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, values = made.quantize(name, weight)
        return {part: tensor for part, tensor in tensors.items() if not part.endswith("g_idx")}, values

    said = {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": group or -1}
    kind = {"data_type": numbers, **({"act_bits": 4, "act_data_type": numbers} if floats else {})}
    searched = {"iters": 200, "autoround_version": "0.9.2", "block_name_to_quantize": "model.layers"}
    return Producer({**said, **kind, **searched, "sym": symmetric}, quantize)


INT8_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_ROWS = {**INT8_ROWS, "type": "float"}
FP4_ROWS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


def compressed(file_format: str, rows: Mapping[str, Any] | None = None, **weights: Any) -> Producer:
    """Return compressed-tensors with the library's own compression; ``weights`` are its arguments."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    arguments = {"type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": rows and dict(rows)}
    config = {"config_groups": {"group_0": group}, "format": file_format, "quantization_status": "compressed"}
    scheme = QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.get_value_from_registry(file_format)

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales, zeros = _library_scales(weight, scheme.weights)
        parts = {"weight": weight, "weight_scale": scales} | ({} if zeros is None else {"weight_zero_point": zeros})
        tensors = compressor.compress(parts, scheme)
        # The library computes in the dtype of the scales.
        values = compressor.decompress({**tensors, "weight_scale": scales.float()}, scheme)["weight"]
        return {f"{module_of(name)}.{part}": tensor for part, tensor in tensors.items()}, values

    return Producer({"quant_method": "compressed-tensors", "ignore": ["lm_head"], **config}, quantize)


def static_int8(symmetric: bool = True) -> Producer:
    """Return compressed-tensors W8A8 with one activation scale per module input."""
    rows = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": symmetric}
    base = compressed("int-quantized", rows, num_bits=8, strategy="channel")

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, values = base.quantize(name, weight)
        tensors[f"{module_of(name)}.input_scale"] = torch.tensor([0.025])
        if not symmetric:
            tensors[f"{module_of(name)}.input_zero_point"] = torch.tensor([5], dtype=torch.int8)
        return tensors, values

    return Producer(base.config, quantize)


def round_rows(model: Any, few: pathlib.Path) -> Any:
    """Return a transformers model of plain values, whose linear layers round their inputs as compressed-tensors does
    for the checkpoint ``few``; unchanged if this checkpoint has no int8 config."""
    config = json.loads((few / "config.json").read_text())["quantization_config"]
    groups = config.get("config_groups", {})
    rows = groups.get("group_0", {}).get("input_activations") or {}
    if rows.get("type") != "int":
        return model
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    group = {"targets": ["Linear"], "input_activations": rows}
    made = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"], quantization_status="frozen")
    apply_quantization_config(model, made)
    noted = load_file(few / "model.safetensors")
    for name, module in model.named_modules():
        for part in ("input_scale", "input_zero_point"):
            if f"{name}.{part}" in noted:
                getattr(module, part).data = noted[f"{name}.{part}"]
    return model


def _library_scales(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales in bfloat16 and zero points, in compressed-tensors' shapes."""
    rows, columns = weight.shape
    top = 448.0 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
    if args.strategy == "block":
        high, wide = args.block_structure
        blocks = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = blocks.view(-(-rows // high), high, -(-columns // wide), wide)
        return (blocks.abs().amax((1, 3)) / top).bfloat16(), None
    shape = {"tensor": (1, -1), "channel": (rows, 1, -1), "group": (rows, -1, args.group_size or 1)}[args.strategy]
    grouped = weight.reshape(shape)
    if args.symmetric:
        return (grouped.abs().amax(-1) / top).bfloat16(), None
    low, high_end = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high_end - low) / (2 * top + 1)).bfloat16()
    return scales, (-top - 1 - low / scales.float()).round().clamp(-top - 1, top).to(torch.int8)


def compressed_act_order(group: int = 16) -> Producer:
    """Return compressed-tensors in its form until 2026, with the group of each input."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    base = compressed("pack-quantized", num_bits=4, strategy="group", group_size=group)

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        groups = torch.arange(columns)[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        groups //= group
        found = affine(weight, 4, group, True, groups)
        tensors = {
            f"{name}_packed": pack_to_int32((found.codes.int() - 8).to(torch.int8), 4),
            f"{name}_scale": found.scales,
            f"{name}_shape": torch.tensor(weight.shape),
            f"{name}_g_idx": groups.int(),
        }
        return tensors, found.values

    config = json.loads(json.dumps(base.config))
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return Producer(config, quantize)


def fp8(block: tuple[int, int] | None = (32, 16), scale_fmt: str = "float") -> Producer:
    """Return DeepSeek's blocks, or one scale per matrix and per layer's inputs."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        *experts, rows, columns = weight.shape
        high, wide = block or (rows, columns)
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        tiles = padded.view(*experts, -(-rows // high), high, -(-columns // wide), wide)
        scales = tiles.abs().amax((-3, -1)).clamp(min=1e-8) / 448
        if scale_fmt == "ue8m0":
            scales = torch.exp2(scales.log2().ceil())
        spread = scales.repeat_interleave(high, -2).repeat_interleave(wide, -1)[..., :rows, :columns]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        stored = scales.to(torch.float8_e8m0fnu) if scale_fmt == "ue8m0" else scales
        tensors = {name: codes, f"{name}_scale_inv": stored if block or experts else stored.reshape(())}
        if block is None and not experts:
            tensors[f"{module_of(name)}.activation_scale"] = torch.tensor(0.01)
        return tensors, codes.float() * spread

    config = {"quant_method": "fp8", "weight_block_size": block and list(block), "scale_fmt": scale_fmt}
    return Producer({**config, "activation_scheme": "dynamic" if block else "static"}, quantize, stacks=True)


def fbgemm_fp8() -> Producer:
    """Return a format with a scale per output, and an upper bound of the scales of inputs."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scales).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale": scales}, codes.float() * scales

    return Producer({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, quantize)


def nvfp4(group: int = 16, rows: Mapping[str, Any] | None = None) -> Producer:
    """Return compressed-tensors' NVFP4, which the library computes in bfloat16, and here in float32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    arguments = {**FP4_ROWS, "dynamic": False, "group_size": group, "scale_dtype": "torch.float8_e4m3fn"}
    made = {"targets": ["Linear"], "weights": arguments, "input_activations": rows and dict(rows)}
    config = {"config_groups": {"group_0": made}, "format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
    scheme = QuantizationScheme.model_validate(made)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        factor, scales = _fp4_scales(weight, group)
        tensors = compressor.compress(
            {"weight": weight, "weight_scale": scales, "weight_global_scale": factor.reshape(1)}, scheme
        )
        codes = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
        values = dequantize(codes, scales, args=scheme.weights, dtype=torch.float32, global_scale=factor)
        assert torch.equal(values.bfloat16(), compressor.decompress(tensors, scheme)["weight"])
        module = module_of(name)
        if rows is not None:
            tensors["input_global_scale"] = torch.tensor([300.0])
        return {f"{module}.{part}": tensor for part, tensor in tensors.items()}, values

    return Producer({"quant_method": "compressed-tensors", "ignore": ["lm_head"], **config}, quantize)


def mxfp4(group: int = 32) -> Producer:
    """Return compressed-tensors' MXFP4, in float32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    arguments = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": group, "scale_dtype": "torch.uint8"}
    made = {"targets": ["Linear"], "weights": arguments}
    scheme = QuantizationScheme.model_validate(made)
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = torch.exp2((weight.view(len(weight), -1, group).abs().amax(-1) / 6).log2().ceil())
        tensors = compressor.compress({"weight": weight, "weight_scale": scales}, scheme)
        codes = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
        values = dequantize(codes, scales, args=scheme.weights, dtype=torch.float32)
        assert torch.equal(values.bfloat16(), compressor.decompress(tensors, scheme)["weight"])
        return {f"{module_of(name)}.{part}": tensor for part, tensor in tensors.items()}, values

    config = {"config_groups": {"group_0": made}, "format": "mxfp4-pack-quantized", "quantization_status": "compressed"}
    return Producer({"quant_method": "compressed-tensors", "ignore": ["lm_head"], **config}, quantize)


def _fp4_scales(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divisor that makes a matrix's scales fill the range of E4M3, and these scales."""
    factor = 448 * 6 / weight.abs().amax()
    most = weight.view(len(weight), -1, group).abs().amax(-1)
    return factor, (most / 6 * factor).to(torch.float8_e4m3fn).float()


def modelopt_nvfp4(group: int = 16, nested: bool = False) -> Producer:
    """Return NVIDIA's Model Optimizer; ``nested``: as in its older file."""
    table = CODINGS["fp4_e2m1"]

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        factor, scales = _fp4_scales(weight, group)
        spread = (scales * (1 / factor)).repeat_interleave(group, 1)
        codes = ((weight / spread)[..., None] - table).abs().argmin(-1)
        tensors = {
            name: (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
            f"{name}_scale": scales.to(torch.float8_e4m3fn),
            f"{name}_scale_2": 1 / factor,
            f"{module_of(name)}.input_scale": torch.tensor(0.01),
        }
        return tensors, table[codes] * spread

    said = {"quant_algo": "NVFP4", "group_size": group}
    if nested:
        said = {"quantization": {**said, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    producer = {"name": "modelopt", "version": "0.29.0"}
    return Producer({"quant_method": "modelopt", "producer": producer, **said}, quantize)


def modelopt_fp8(algorithm: str) -> Producer:
    """Return Model Optimizer's FP8: one scale per matrix, per output, or per block of 128 x 128."""
    base = fbgemm_fp8() if "CHANNEL" in algorithm else fp8((128, 128) if "PB" in algorithm else None)

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, values = base.quantize(name, weight)
        codes, scales = list(tensors.values())[:2]
        if "CHANNEL" in algorithm:
            scales = scales[:, 0]
        elif "PB" in algorithm:
            scales = scales[:, None, :, None]
        return {name: codes, f"{name}_scale": scales, f"{module_of(name)}.input_scale": torch.tensor(0.01)}, values

    said = {"quant_algo": algorithm, "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    return Producer({"quant_method": "modelopt", "producer": {"name": "modelopt"}, **said}, quantize)


def nf4(nested: bool = True, block: int = 64) -> Producer:
    table = CODINGS["nf4"]

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        flat = weight.flatten()
        count = flat.numel()
        blocks = torch.nn.functional.pad(flat, (0, -count % block)).view(-1, block)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16"}
        tensors = {f"{name}.quant_map": table.clone()}
        if nested:
            found, said, absmax = _nested(name, absmax)
            tensors, state = tensors | found, state | said
        else:
            tensors[f"{name}.absmax"] = absmax
        codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
        values = (table[codes] * absmax[:, None]).flatten()[:count].view(weight.shape)
        pairs = codes.flatten()[:count].view(-1, 2)
        tensors[name] = (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None]
        text = json.dumps({**state, "shape": list(weight.shape)}).encode()
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, values

    flags = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested}
    return Producer({"quant_method": "bitsandbytes", **flags, "bnb_4bit_compute_dtype": "bfloat16"}, quantize)


def _nested(name: str, absmax: torch.Tensor) -> tuple[Tensors, dict[str, Any], torch.Tensor]:
    """Return the absmax statistics in 8-bit codes: tensors, their quantization state, and their values."""
    table, size = torch.linspace(-1, 1, 256) ** 3, 256
    offset = float(absmax.mean())
    blocks = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % size)).view(-1, size)
    outer = blocks.abs().amax(1)
    codes = ((blocks / outer[:, None])[..., None] - table).abs().argmin(-1)
    values = (table[codes] * outer[:, None]).flatten()[: len(absmax)] + offset
    tensors = {
        f"{name}.absmax": codes.flatten()[: len(absmax)].to(torch.uint8),
        f"{name}.nested_absmax": outer,
        f"{name}.nested_quant_map": table,
    }
    return tensors, {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}, values


def bnb_int8() -> Producer:
    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        most, module = weight.abs().amax(1), module_of(name)
        codes = (weight * (127 / most[:, None])).round().to(torch.int8)
        tensors = {name: codes, f"{module}.SCB": most, f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * (most[:, None] / 127)

    return Producer({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, quantize)


# Formats with partial words if numbers of inputs or outputs are no multiples of 32.
FULL_WORDS: dict[str, Callable[[], Producer]] = {
    "gptq-2-bits": lambda: gptq(bits=2, symmetric=False, act_order=True),
    "gptq-3-bits": lambda: gptq(bits=3),
    "gptq-v2-3-bits": lambda: gptq(bits=3, symmetric=False, version="gptq_v2"),
    "auto-round-2-bits": lambda: auto_round(2),
    "auto-round-3-bits": lambda: auto_round(3, packing="auto_round", symmetric=False),
    "auto-round-3-bits-symmetric": lambda: auto_round(3, group=0),
    "auto-round-nvfp4": lambda: auto_round(packing="auto_round:llm_compressor", numbers="nv_fp"),
    "auto-round-mxfp4": lambda: auto_round(group=32, packing="auto_round:llm_compressor", numbers="mx_fp"),
}
# Every format, by a name for tests. The number is the group size, which must divide the inputs of all matrices.
PRODUCERS: dict[str, Callable[[int], Producer]] = {
    "awq": awq,
    "awq-rows": lambda group: awq(0),
    "gptq": lambda group: gptq(group=group),
    "gptq-asymmetric": lambda group: gptq(group=group, symmetric=False),
    "gptq-act-order": lambda group: gptq(group=group, act_order=True),
    "gptq-v2-asymmetric": lambda group: gptq(group=group, symmetric=False, act_order=True, version="gptq_v2"),
    "gptq-8-bits": lambda group: gptq(bits=8, group=0),
    "gptq-8-bits-asymmetric": lambda group: gptq(bits=8, group=group, symmetric=False),
    "w4a16": lambda group: compressed("pack-quantized", num_bits=4, strategy="group", group_size=group),
    "w4a16-asymmetric": lambda group: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=group, symmetric=False
    ),
    "w4a16-channel": lambda group: compressed("pack-quantized", num_bits=4, strategy="channel"),
    "w4a16-act-order": compressed_act_order,
    "w8a16-packed": lambda group: compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
    "w8a16": lambda group: compressed("naive-quantized", num_bits=8, strategy="group", group_size=group),
    "w8a8": lambda group: compressed("int-quantized", INT8_ROWS, num_bits=8, strategy="channel"),
    "w8a8-asymmetric": lambda group: compressed(
        "int-quantized", {**INT8_ROWS, "symmetric": False}, num_bits=8, strategy="channel", symmetric=False
    ),
    "w8a8-static": lambda group: static_int8(),
    "w8a8-static-asymmetric": lambda group: static_int8(False),
    "w4a8": lambda group: compressed("pack-quantized", INT8_ROWS, num_bits=4, strategy="group", group_size=group),
    "fp8-tensor": lambda group: compressed("float-quantized", FP8_ROWS, num_bits=8, type="float", strategy="tensor"),
    "fp8-channel": lambda group: compressed("float-quantized", FP8_ROWS, num_bits=8, type="float", strategy="channel"),
    "fp8-block": lambda group: compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, group]
    ),
    "deepseek-fp8": lambda group: fp8((32, 16)),
    "deepseek-fp8-ue8m0": lambda group: fp8((32, 16), "ue8m0"),
    "fp8-static": lambda group: fp8(None),
    "fbgemm-fp8": lambda group: fbgemm_fp8(),
    "nf4": lambda group: nf4(nested=False),
    "nf4-nested": lambda group: nf4(),
    "bnb-int8": lambda group: bnb_int8(),
    "nvfp4": lambda group: nvfp4(group, FP4_ROWS),
    "nvfp4-weights": nvfp4,
    "mxfp4-packed": mxfp4,
    "modelopt-nvfp4": modelopt_nvfp4,
    "modelopt-fp8": lambda group: modelopt_fp8("FP8"),
    "modelopt-fp8-channel": lambda group: modelopt_fp8("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt-fp8-block": lambda group: modelopt_fp8("FP8_PB_WO"),
    "auto-round": lambda group: auto_round(group=group),
    "auto-round-asymmetric": lambda group: auto_round(8, group, False, "auto_round:gptqmodel"),
    "auto-round-awq": lambda group: auto_round(group=group, symmetric=False, packing="auto_round:auto_awq"),
    "modelopt-nvfp4-nested": lambda group: modelopt_nvfp4(group, nested=True),
}
