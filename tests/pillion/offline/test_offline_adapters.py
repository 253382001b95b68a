"""Adapters of ``pillion.LLM``: several in one call, more than are ready at once, on torch and on the CPU kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion import LoRARequest, SamplingParams
from pillion.errors import InvalidRequest, NotFound, PermissionDenied
from pillion.offline.llm import LLM
from tests.support.adapters import adapted_model, make_adapter
from tests.support.cpu_model import needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.oracle import Oracle, first_difference

pytestmark = pytest.mark.usefixtures("own_cache", "prepared_here", "forked_ranks")


ADAPTERS = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    folder = make_model(root / "model", FAMILIES["llama-mqa-biases"])[0]
    kinds: list[dict[str, Any]] = [{}, {"lora_alpha": 12}, {}, {"use_rslora": True}]
    return folder, [make_adapter(folder, root / str(n), seed=n, r=4 + n, **kind) for n, kind in enumerate(kinds)]


def offline(folder, **options):
    small = {"dtype": "float32", "max_model_len": 256, "kv_pool_bytes": "32MiB", "cpu_threads": 1}
    return LLM(str(folder), **small, **options)


@pytest.mark.parametrize(
    ("kernels", "ranks"),
    [
        ("torch", 1),
        pytest.param("auto", 1, marks=[needs_kernels, pytest.mark.long]),
        pytest.param("auto", 2, marks=needs_kernels),
    ],
)
def test_one_call_mixes_adapters_and_the_model(kernels, ranks, made):
    folder, adapters = made
    prompt, greedy = tokens_of(40, 5), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    # One adapter has to wait until another one has ended.
    with offline(
        folder, enable_lora=True, max_loras=ADAPTERS - 1, cpu_kernels=kernels, tensor_parallel_size=ranks
    ) as llm:
        for number, adapter in enumerate(adapters):
            assert llm.load_adapter(f"v{number}", adapter).parent == folder.name
        names = [*(f"v{number}" for number in range(ADAPTERS)), ""] * 2
        outputs = llm.generate([{"prompt_token_ids": prompt}] * len(names), greedy, lora=names, use_tqdm=False)
        answers = [output.outputs[0].token_ids for output in outputs]
        models = [adapted_model(folder, adapter) for adapter in adapters]
        plain = Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).greedy(prompt, 12)
        wanted = [*(Oracle(model).greedy(prompt, 12) for model in models), plain] * 2
        for expected, tokens in zip(wanted, answers, strict=True):
            assert not first_difference(expected, tokens, 1e-3)
        assert len({tuple(tokens) for tokens in answers}) > 1
        assert all(output.prompt_token_ids == prompt for output in outputs)
        # A name may get another adapter, whose answers meet none of the old one's blocks.
        llm.load_adapter("v0", adapters[1], in_place=True)
        (swapped,) = llm.generate({"prompt_token_ids": prompt}, greedy, lora="v0", use_tqdm=False)
        assert swapped.outputs[0].token_ids == answers[1]
        llm.unload_adapter("v0")
        with pytest.raises(NotFound, match="'v0' is not served here"):
            llm.generate("x", greedy, lora="v0", use_tqdm=False)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("auto", marks=needs_kernels)])
def test_adapters_of_experts(kernels, tmp_path):
    """PEFT's "all-linear" of a mixture: attention, experts and routers."""
    folder = make_model(tmp_path / "model", FAMILIES["mixtral"])[0]
    adapters = [make_adapter(folder, tmp_path / str(seed), seed=seed, r=4 + seed) for seed in range(2)]
    prompt, greedy = tokens_of(40, 5), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with offline(folder, enable_lora=True, max_loras=2, cpu_kernels=kernels) as llm:
        for number, adapter in enumerate(adapters):
            llm.load_adapter(f"v{number}", adapter)
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 3, greedy, lora=["v0", "", "v1"], use_tqdm=False)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    models = [adapted_model(folder, adapters[0]), plain, adapted_model(folder, adapters[1])]
    for model, output in zip(models, outputs, strict=True):
        assert not first_difference(Oracle(model).greedy(prompt, 12), output.outputs[0].token_ids, 1e-3)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


def test_unsupported_adapters_are_rejected(made):
    folder, adapters = made
    with offline(folder, cpu_kernels="torch") as llm, pytest.raises(PermissionDenied, match="enable_lora=True"):
        llm.load_adapter("a", adapters[0])
    with offline(folder, enable_lora=True, max_lora_rank=4, cpu_kernels="torch") as llm:
        with pytest.raises(InvalidRequest, match="has rank 5, and --max-lora-rank is 4"):
            llm.load_adapter("a", adapters[1])
        with pytest.raises(NotFound, match="there is no folder"):
            llm.load_adapter("a", folder / "nowhere")
        with pytest.raises(ValueError, match="2 prompts and 1 adapters"):
            llm.generate(["x", "y"], lora=["a"], use_tqdm=False)


def test_adapters_are_passed_per_request_as_in_vllm(made):
    folder, adapters = made
    prompt, greedy = (
        {"prompt_token_ids": tokens_of(40, 5)},
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    )

    def answers(llm, **options):
        return [output.outputs[0].token_ids for output in llm.generate([prompt] * 2, greedy, False, **options)]

    with offline(folder, enable_lora=True, cpu_kernels="torch") as llm:
        first, second = LoRARequest("a", 1, str(adapters[0])), LoRARequest("b", 2, lora_path=str(adapters[1]))
        brought = answers(llm, lora_request=[first, None])
        assert brought == answers(llm, lora=["a", ""])
        assert answers(llm, lora_request=second) == answers(llm, lora="b")
        # A name whose folder is another one now is that folder's adapter.
        assert answers(llm, lora_request=LoRARequest("a", 3, str(adapters[1]))) == answers(llm, lora="b")
        with pytest.raises(ValueError, match="give one of lora and lora_request"):
            answers(llm, lora="a", lora_request=first)
        with pytest.raises(ValueError, match="2 prompts and 1 adapters"):
            answers(llm, lora_request=[first])
