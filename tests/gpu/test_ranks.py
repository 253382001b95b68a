"""A worker's GPU backend in two ranks, each a process, against transformers."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver, gpu_backend, make_family  # isort: skip  (before the kernels)

import os
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.backends.backend import BackendLost
from pillion.engine.checkpoints.prepare import prepare
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix
from tests.gpu.test_backend import close, rows_of
from tests.gpu.test_quantized_models import FORMATS
from tests.support.families import SAME_AT_ANY_LENGTH, tokens_of
from tests.support.gpu import NATIVE
from tests.support.gpu_ranks import RankTeam
from tests.support.mixed_adapters import mixed_steps, with_adapters
from tests.support.quantized import quantize_folder
from tests.support.torch_model import BackendDriver

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_cache")]

# One family per special case of ranks: norms of whole projections; experts; a KV head that both ranks have, and biases
# of sums; latents, which both ranks have; a norm of the sum of experts and an MLP; embeddings of positions.
INTERPRETED = ("olmo2", "mixtral", "llama-mqa-biases", "youtu", "afmoe", "opt")


@pytest.mark.parametrize(
    ("family", "whole_experts"),
    [*((name, False) for name in (SAME_AT_ANY_LENGTH if NATIVE else INTERPRETED)), ("gpt-oss", True)],
)
def test_families(team, family, whole_experts, tmp_path):
    """A chunk, and then a decode beside a chunk of another text, over one pool."""
    folder, flags = make_family(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text, other = tokens_of(35, 2), tokens_of(9, 3)
    with torch.inference_mode():
        wanted, beside = (model(torch.tensor([tokens])).logits[0].float() for tokens in (text, other))
    prepared = prepare(flags)
    driver = GpuDriver(prepared, num_slots=8, backend=team.backend(prepared, whole_experts=whole_experts))
    one, two = driver.sequences.add(2)
    driver.step((one, text[:34]), sample=())
    got = driver.step((one, text[34:]), (two, other), sample=range(10))
    close(got, torch.cat((wanted[34:], beside)))
    driver.backend.close()


@pytest.mark.parametrize("fp8", [False, True] if NATIVE else [True])
def test_workers_of_other_sizes_read_the_same_blocks(team, prepared, fp8):
    """A worker of one process reads what two ranks wrote, and vice versa; another one computes the same alone."""
    text = tokens_of(34, 5)
    both, alone = team.backend(prepared, fp8=fp8), gpu_backend(prepared, fp8=fp8)
    wanted = GpuDriver(prepared, num_slots=8, backend=gpu_backend(prepared, fp8=fp8))
    (number,) = wanted.sequences.add()
    wanted.step((number, text[:32]), sample=())
    expected = [wanted.step((number, [token])) for token in text[32:]]

    driver = GpuDriver(prepared, num_slots=8, backend=both)
    alone.bind_pool(driver.memory, 8)
    for writer, reader in ((both, alone), (alone, both)):
        (number,) = driver.sequences.add()
        writer.forward(driver.sequences.step([(number, text[:32])], ()))
        found = [
            (reader, writer)[place].forward(driver.sequences.step([(number, [text[32 + place]])])) for place in (0, 1)
        ]
        for one, other in zip(found, expected, strict=True):
            # 8-bit codes are rounded; ranks sum in another order, so that a few codes differ by one.
            close(one, other.cpu()) if not fp8 else torch.testing.assert_close(
                one.cpu(), other.cpu(), atol=0.5, rtol=0.05
            )
    both.close()


def parallel_answers(driver: GpuDriver) -> list[tuple[int, ...]]:
    """The tokens of a sequence, and of its parallel sample whose last block is copied, in steps that run ahead."""
    (a,) = driver.sequences.add()
    steps = [driver.backend.launch(driver.sequences.step([(a, tokens_of(9, 0))]), (), rows_of([9]))]
    b, sources, targets = driver.sequences.parallel_sample(a)
    copies = tuple(zip(sources, targets, strict=True))
    batch = driver.sequences.step([(b, [7]), (a, [-1])])
    steps.append(driver.backend.launch(batch, copies, rows_of([10, 10])))
    batch = driver.sequences.step([(a, [-2]), (b, [-1])])
    steps.append(driver.backend.launch(batch, (), None))
    found = [step.wait().token_ids for step in steps[:2]]
    steps[2].choose(rows_of([11, 11]))
    return [*found, steps[2].wait().token_ids]


def test_steps_run_ahead_on_tokens_known_only_to_rank_0(team, prepared):
    """A sequence, and its parallel sample whose blocks rank 0 copies, sample the same tokens as in one process."""
    both = team.backend(prepared)
    wanted = parallel_answers(GpuDriver(prepared, num_slots=16, backend=gpu_backend(prepared)))
    assert parallel_answers(GpuDriver(prepared, num_slots=16, backend=both)) == wanted
    both.close()


def test_adapters(team, tmp_path):
    """Each rank has its share of every adapter; steps mix them with the base model."""
    folder = save_model(tmp_path / "model", num_hidden_layers=2)
    prepared = prepare(ModelFlags(model=str(folder), dtype="float32"))
    text = tokens_of(18, 2)
    wanted = mixed_steps(with_adapters(BackendDriver(prepared)), text)
    driver = with_adapters(GpuDriver(prepared, num_slots=16, backend=team.backend(prepared)))
    close(mixed_steps(driver, text), wanted)
    driver.backend.close()


@pytest.mark.parametrize(("family", "whole_experts"), [("mixtral", False), ("llama4", True)])
def test_adapters_of_experts(team, family, whole_experts, tmp_path):
    """Each rank has its share of every expert's pair, or all pairs of its own experts."""
    prepared, text = prepare(make_family(tmp_path / "model", family)[1]), tokens_of(18, 2)
    wanted = mixed_steps(with_adapters(BackendDriver(prepared), experts=True), text)
    backend = team.backend(prepared, whole_experts=whole_experts, join=False)
    close(mixed_steps(with_adapters(GpuDriver(prepared, num_slots=16, backend=backend), experts=True), text), wanted)
    backend.close()


@pytest.mark.parametrize("name", ["gptq in an order", "fp8 in blocks", "nf4"])
def test_weights_that_are_quantized(team, name, tmp_path):
    producer, _ = FORMATS[name]
    plain = save_model(tmp_path / "plain", num_hidden_layers=1, intermediate_size=224)
    folder, wide = quantize_folder(plain, tmp_path, producer)
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    text = tokens_of(20, 2)
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0].float()
    prepared = prepare(ModelFlags(model=str(folder), dtype="float32"))
    driver = GpuDriver(prepared, num_slots=8, backend=team.backend(prepared))
    down = driver.backend.own._model.weights.matrix("layers.0.down")
    assert isinstance(down, PackedMatrix)
    assert down.kind.inputs == 128
    close(driver.step((driver.sequences.add()[0], text), sample=range(20)), wanted)
    driver.backend.close()


def test_a_rank_that_hangs_or_dies_ends_the_others_waits(prepared):
    """Rank 0's step raises BackendLost, after the limit or at once, as does the next one, and the backend closes."""
    team = RankTeam(2)
    try:
        for lose, why in ((signal.SIGSTOP, "no answer from the others"), (signal.SIGKILL, "")):
            driver = GpuDriver(prepared, num_slots=8, backend=team.backend(prepared))
            own = driver.backend.own
            own._ranks.limit_s = 0.3
            os.kill(team.processes[0].pid, lose)
            batch = driver.sequences.step([(driver.sequences.add()[0], [1, 2])])
            for reason in (why, ""):
                with pytest.raises(BackendLost, match=f"rank 0 of 2: {reason}"):
                    own.launch(batch, (), rows_of([2]))
            own.close()
            os.kill(team.processes[0].pid, signal.SIGCONT)
    finally:
        team.close()
