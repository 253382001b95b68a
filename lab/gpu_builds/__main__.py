"""Ahead-of-time builds of all kernels without a GPU, with reports of registers, spills and shared memory.

    python -m lab.gpu_builds [--all | --few] [--only NAME] [--arch 80 --arch 90] [--loops] [--json FILE]

Triton compiles for a named target and its own ptxas assembles; cuobjdump reads registers, stack and local memory
(spills) from the machine code. A kernel beyond the limits of its BuildSpec fails the build, since no test of results
shows a spill. ``--loops`` also counts the instructions of each product's loop.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from lab.gpu_builds.machine_code import main_loop, weights_of
from lab.gpu_builds.specs import ARCHITECTURES, BuildSpec, build_specs
from pillion.kernels.gpu.dependent import DEPENDENT_ARCH

# Bytes of shared memory per block, by architecture (CUDA C programming guide, "Compute Capabilities").
MAX_SHARED_BYTES = {80: 163 * 2**10, 90: 227 * 2**10}
# Kernels (shell patterns) whose resources are nearly those of others, built only with ``--all``.
RARE = (
    "add_rms_norm-16384-bf16-norm",
    "add_rms_norm-4096-bf16-wide-post",
    "add_rms_norm-4096-fp32-norm",
    "*_norm-576-*",
    "attention_*_256_*",
    "attention_*_64*",
    "attention_*_96",
    "attention_*_512_*",
    "attention_decode_256",
    "attention_decode_512",
    "attention_decode_llama4",
    "attention_parts_*_*",
    "attention_*_fp16",
    "attention_*_fp32",
    "attention_*_llama4_fp8",
    "attention_*_qwen_28_heads",
    "attention_*_rank_fp8",
    "attention_*_sinks_all",
    "attention_*_sinks_fp8",
    "attention_chunk_rank",
    "attention_chunk_wide_group",
    "attention_decode_rank",
    "attention_decode_wide_group",
    "attention_decode_window_softcap",
    "blocks-[!l]*",
    "blocks-llama3-[!c]*",
    "convolve-*-fp32",
    "delta_*-fp32",
    "gated-*-fp16",
    "grouped_deepseek_*",
    "grouped_fp8_down-*",
    "grouped_nf4_*",
    "grouped_plain_*",
    "grouped_*_float16_up-*",
    "grouped_*_rank64-*",
    "grouped_[fip]*_rank*",
    "grouped_signed*",
    "grouped_*-32",
    "grouped_*-64",
    "gated-*-fp32",
    "kv_write-head*",
    "kv_write-llama3-fp16",
    "kv_write-nope-bf16",
    "kv_write-qwen3-fp8",
    "kv_write-rank-*",
    "latent_write-fp32",
    "latents_*_*",
    "low_rank_expand-64-*",
    "low_rank_*fp16",
    "low_rank_*fp32",
    "norm_gated-128-bf16-sigmoid",
    "norm_gated-16384-*",
    "overlapped_chunk_[2fls]*",
    "plain_[dqs]*",
    "plain_gate_up-[236]*",
    "plain_*_fp*",
    "quantized_*-[36]*",
    "quantized_uint4_32_*-128",
    "quantized_uint4_32_halves-*",
    "quantized_[in]*",
    "quantized_fp8_128-128",
    "quantized_signed8_16-*",
    "quantized_signed4_64-*",
    "quantized_uint4_128-16",
    "quantized_uint4_128_*",
    "route-*_adapted-*",
    "route-*_fp32-*",
    "route-[!q]*",
    "sample_*_bf16*",
    "sample_survey_fp32_wide",
    "shrink_pairs-*-32",
    "shrink_pairs-*-64",
    "shrink_pairs-*-fp32-*",
    "shrink_pairs-down-*",
    "state_space-*-fp32",
    "state_space-nemotron-*",
)


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The resources of a built kernel: registers and spilled bytes per thread, bytes of shared memory per block.

    ``excess``: exceeded limits, "" for none. ``loop``: instructions per turn of a product's loop, ``per_weight``: of a
    thread per weight; 0 if not counted.
    """

    name: str
    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    code_bytes: int
    excess: str
    loop: int = 0
    per_weight: float = 0.0


def build(spec: BuildSpec, arch: int, *, loops: bool = False) -> BuildResult:
    """Compile one kernel for one architecture, counting its loop's instructions if ``loops``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = list(spec.kernel.arg_names)
    constants = dict(spec.constants)
    if arch < DEPENDENT_ARCH and "DEPENDENT" in constants:
        constants["DEPENDENT"] = False
    typed = [name for name in names if name not in constants]
    kinds = dict(zip(typed, spec.signature.split(", "), strict=True))
    kind = GluonASTSource if spec.kernel.is_gluon() else ASTSource
    source = kind(
        fn=spec.kernel,
        signature={name: kinds.get(name, "constexpr").removesuffix(":16") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in typed if kinds[name].endswith(":16")},
    )
    options = {name: constants.get(name, usual) for name, usual in (("num_warps", 4), ("num_stages", 2))}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = _usage(compiled.asm["cubin"])
    shared = int(compiled.metadata.shared)
    weights = weights_of(spec.constants) if loops else 0
    loop = len(main_loop(compiled.asm["cubin"])) if weights else 0
    return BuildResult(
        name=spec.name,
        arch=arch,
        registers=usage["REG"],
        spill_bytes=usage["LOCAL"] + usage["STACK"],
        shared_bytes=shared,
        num_warps=options["num_warps"],
        code_bytes=len(compiled.asm["cubin"]),
        excess=_excess(spec, arch, usage, shared),
        loop=loop,
        per_weight=loop * 32 * options["num_warps"] / weights if weights else 0.0,
    )


def all_specs(only: str = "", *, rare: bool = True) -> list[BuildSpec]:
    """List the specs whose names contain ``only``; without ``rare``, only common kernels."""
    specs = [spec for spec in build_specs() if only in spec.name]
    return [spec for spec in specs if rare or not any(fnmatch(spec.name, pattern) for pattern in RARE)]


def few_specs(specs: Sequence[BuildSpec]) -> list[BuildSpec]:
    """Choose a smallest set of specs that has each kernel with each type of its arguments and each value of its
    constants, for the newest architecture; for the oldest one spec per kernel, and one of chunk attention, which has
    the most registers."""
    oldest, newest = ARCHITECTURES
    shown = {
        number: {(spec.kernel, at, kind) for at, kind in enumerate(spec.signature.replace(":16", "").split(", "))}
        | {(spec.kernel, *constant) for constant in spec.constants.items()}
        for number, spec in enumerate(specs)
        if newest in spec.architectures
    }
    found, missing = [], set().union(*shown.values())
    while missing:
        best = max(shown, key=lambda number: len(shown[number] & missing))
        missing -= shown[best]
        found.append(replace(specs[best], architectures=(newest,)))
    first: dict[str, BuildSpec] = {}
    for spec in specs:
        if oldest in spec.architectures:
            first.setdefault(spec.name if spec.name == "attention_chunk" else spec.kernel.__name__, spec)
    return [*found, *(replace(spec, architectures=(oldest,)) for spec in first.values())]


def _usage(cubin: bytes) -> dict[str, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = str(knobs.nvidia.cuobjdump.path)
        output = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", output)}


def _excess(spec: BuildSpec, arch: int, usage: Mapping[str, int], shared: int) -> str:
    limited = (
        (usage["REG"], "registers", spec.max_registers),
        (usage["LOCAL"] + usage["STACK"], "bytes of spills", spec.max_spill_bytes),
        (shared, "bytes of shared memory", MAX_SHARED_BYTES[arch]),
    )
    return "; ".join(f"{used} {what}, at most {most}" for used, what, most in limited if used > most)


def main() -> int:
    """Compile the chosen kernels and print a line for each; return 1 if one exceeds its limits."""
    parser = argparse.ArgumentParser(description="Build all GPU kernels ahead of time.")
    parser.add_argument("--only", default="", help="build kernels whose name contains this")
    uses = parser.add_mutually_exclusive_group()
    uses.add_argument("--all", action="store_true", help="build rare kernels, too")
    uses.add_argument("--few", action="store_true", help="build each type and each constant's value of a kernel once")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES)
    parser.add_argument("--loops", action="store_true", help="count the instructions of products' loops")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    architectures = args.arch or list(ARCHITECTURES)
    specs = all_specs(args.only, rare=args.all)
    built = [
        build(spec, arch, loops=args.loops)
        for spec in (few_specs(specs) if args.few else specs)
        for arch in architectures
        if arch in spec.architectures
    ]
    for each in built:
        line = f"{each.name:44} sm_{each.arch} {each.registers:4} registers {each.spill_bytes:4} B spills "
        print(f"{line}{each.shared_bytes:7} B shared {each.num_warps:3} warps {each.excess}")
        if each.loop:
            print(f"{'':44} loop of {each.loop} instructions, {each.per_weight:.2f} a weight")
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in built], indent=1) + "\n", "utf-8")
    return 1 if any(each.excess for each in built) else 0


if __name__ == "__main__":
    sys.exit(main())
