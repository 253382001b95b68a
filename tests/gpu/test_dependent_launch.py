"""Kernels that start before the previous one has ended: their early part, and unchanged bits."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE  # isort: skip  (before the kernels)
from tests.support.gpu_model import GpuDriver  # isort: skip

import ast
import inspect
import textwrap

import pytest
import torch

from lab.benchmarks.gpu.search import trying
from lab.gpu_builds.specs import build_specs
from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.kernels.gpu.attention import attention_kernel, kv_write, overlapped_attention
from pillion.kernels.gpu.dependent import DEPENDENT_ARCH, dependent
from pillion.kernels.gpu.experts import expert_adapters, expert_routing, grouped_product
from pillion.kernels.gpu.launch import arch_of
from pillion.kernels.gpu.products import dense_gemm, quantized_product
from pillion.kernels.gpu.rows import embedding, gated, norms
from tests.support.families import tokens_of

# Arguments that each kernel may read early: weights, tables, and the step's record.
EARLY = (
    (embedding._embed, {"ids"}),
    (norms._rms_norm, {"weight", "bias"}),
    (norms._add_rms_norm, {"weight"}),
    (gated._gated, set()),
    (kv_write._kv_write, {"positions", "cos", "sin"}),
    (attention_kernel._early, {"record"}),
    (overlapped_attention._attend_overlapped, {"record"}),
    (dense_gemm._product, set()),
    (quantized_product._product, set()),
    (quantized_product._sum, set()),
    (expert_routing._route, set()),
    (expert_adapters._shrink_pairs, set()),
    (grouped_product._grouped, set()),
)
STEPS = 40


def body_of(kernel) -> list[ast.stmt]:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    assert isinstance(function, ast.FunctionDef)
    return function.body


def names_of(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def calls_of(statements: list[ast.stmt], name: str) -> list[ast.Call]:
    calls = [each for each in ast.walk(ast.Module(statements, [])) if isinstance(each, ast.Call)]
    return [each for each in calls if ast.unparse(each.func) == name]


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [pytest.param(*each, id=f"{each[0].fn.__module__.rpartition('.')[2]}.{each[0].fn.__name__}") for each in EARLY],
)
def test_a_kernel_reads_only_constants_early(kernel, constants):
    """Every program waits, once and before it writes; before that, a kernel loads only its constants."""
    body, arguments = body_of(kernel), set(inspect.signature(kernel.fn).parameters)
    (at,) = (place for place, each in enumerate(body) if ast.unparse(each) == "wait_for_earlier(DEPENDENT)")
    early = body[:at]
    for writing in ("tl.store", "tl.atomic_add"):
        assert not calls_of(early, writing)
    # Names computed from arguments stand for these.
    made = {each.targets[0].id: names_of(each.value) for each in ast.walk(ast.Module(early, [])) if is_simple(each)}
    read = set()
    for call in calls_of(early, "tl.load"):
        wanted = names_of(call.args[0])
        for _ in made:
            wanted = set().union(*(made.get(name, {name}) | {name} for name in wanted))
        read |= wanted & arguments & POINTERS
    assert read == constants


POINTERS = {
    *("ids", "sampled", "table", "out", "values", "weight", "bias", "residual", "found", "post_weight", "gate_up"),
    *("qkv", "cos", "sin", "positions", "rows", "pool", "scales", "queries", "record", "partials", "partial_logs"),
    *("sinks", "weights", "tickets"),
}


def is_simple(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)


def test_a_dependent_launch_waits():
    """The interpreter ignores constants that a kernel does not have; a launch on a device fails."""
    strange = [spec.name for spec in build_specs() if "launch_pdl" in spec.constants and not waits(spec.kernel)]
    assert strange == []


def waits(kernel) -> bool:
    return "DEPENDENT" in inspect.signature(kernel.fn).parameters


def test_the_tuning_file_enables_dependent_launches():
    """Neither the interpreter nor older devices have such launches."""
    for on in (0, 1):
        with trying("dependent_launch", 90, {"on": on}):
            assert dependent(90) == {"DEPENDENT": NATIVE and bool(on), "launch_pdl": NATIVE and bool(on)}
    assert dependent(80) == {"DEPENDENT": False, "launch_pdl": False}


@pytest.mark.skipif(not NATIVE or arch_of(DEVICE) < DEPENDENT_ARCH, reason="needs a device of sm_90")
def test_steps_are_the_same_with_dependent_launches_and_without(own_cache, tmp_path):
    """Decode in bfloat16, with graphs and without, with our own products."""
    folder = save_model(tmp_path / "model")
    prepared, text = prepare(ModelFlags(model=str(folder), dtype="bfloat16")), tokens_of(STEPS + 5, 1)

    def logits(on: int) -> torch.Tensor:
        with trying("dependent_launch", arch_of(DEVICE), {"on": on}):
            driver = GpuDriver(prepared)
            (number,) = driver.sequences.add()
            return driver.run_all(number, text, [5, *[1] * (STEPS - 1)])

    wanted = logits(0)
    for _ in range(5):
        assert torch.equal(logits(1), wanted)
