"""Adapters of ``pillion.LLM``: several in one call, more than are ready at once, on torch and on the CPU kernels."""

from __future__ import annotations

import pytest

from pillion import LLM, SamplingParams
from pillion.errors import InvalidRequest, NotFound, PermissionDenied
from tests.support.adapters import adapted_model, make_adapter
from tests.support.cpu_model import needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.oracle import Oracle, first_difference

pytestmark = pytest.mark.usefixtures("own_cache")


ADAPTERS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    folder = make_model(root / "model", FAMILIES["llama-gqa-tied"])[0]
    return folder, [make_adapter(folder, root / str(n), seed=n, r=4 + n) for n in range(ADAPTERS)]


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
        with models[0].disable_adapter():
            plain = Oracle(models[0]).greedy(prompt, 12)
        wanted = [*(Oracle(model).greedy(prompt, 12) for model in models), plain] * 2
        for expected, tokens in zip(wanted, answers, strict=True):
            assert not first_difference(expected, tokens, 1e-3)
        assert len({tuple(tokens) for tokens in answers}) > 1
        # A name may get another adapter, whose answers meet none of the old one's blocks.
        llm.load_adapter("v0", adapters[1], in_place=True)
        (swapped,) = llm.generate({"prompt_token_ids": prompt}, greedy, lora="v0", use_tqdm=False)
        assert swapped.outputs[0].token_ids == answers[1]
        llm.unload_adapter("v0")
        with pytest.raises(NotFound, match="'v0' is not served here"):
            llm.generate("x", greedy, lora="v0", use_tqdm=False)


def test_what_cannot_work_is_refused(made):
    folder, adapters = made
    with offline(folder, cpu_kernels="torch") as llm, pytest.raises(PermissionDenied, match="enable-lora"):
        llm.load_adapter("a", adapters[0])
    with offline(folder, enable_lora=True, max_lora_rank=4, cpu_kernels="torch") as llm:
        with pytest.raises(InvalidRequest, match="has rank 5, and --max-lora-rank is 4"):
            llm.load_adapter("a", adapters[1])
        with pytest.raises(NotFound, match="there is no folder"):
            llm.load_adapter("a", folder / "nowhere")
        with pytest.raises(ValueError, match="2 prompts and 1 adapters"):
            llm.generate(["x", "y"], lora=["a"], use_tqdm=False)
