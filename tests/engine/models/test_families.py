"""Random small models of each family against transformers' logits: all chunk boundaries, paged, mixed; on torch and the
CPU kernels."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pillion.engine.backends.backend import kv_layout
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.scheduling.sequence import rope_shift
from pillion.errors import ConfigError
from pillion.kernels.cpu.rows.rotate import RotateWrite
from pillion.kernels.torch.torch_attention import StepAttention
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.families import BY_ROWS, FAMILIES, OF_LATENTS, PROMPT_TOKENS, make_model, tokens_of
from tests.support.oracle import Oracle, first_difference
from tests.support.scored_prompts import check_scores, run_scored
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")


# Logits are about 10, so this is a few ulps of fp32 after some layers of sums.
TOLERANCE = 1e-4

# Families served with 8-bit KV: mean difference of logits over their standard deviation.
KV_IN_8_BITS = [
    ("gemma2", "fp8", 0.08),  # windows and soft caps
    ("gemma3", "int8", 0.03),  # norms of heads
    ("olmo2", "fp8", 0.08),  # norms of whole projections
    ("phi3-partial-rope", "int8", 0.03),
    ("qwen3-moe", "fp8", 0.08),
    ("gemma4", "int8", 0.06),  # places of several sizes, and layers without one
]
IN_BFLOAT16 = [
    *("qwen3-qk-norm", "gemma2", "gemma3", "olmo2", "granite", "phi3-partial-rope", "qwen3-moe"),
    pytest.param("mixtral", marks=pytest.mark.long),
    pytest.param("youtu", marks=pytest.mark.long),
    pytest.param("deepseek-v3", marks=pytest.mark.long),
    pytest.param("mistral4", marks=pytest.mark.long),
    pytest.param("qwen2-moe-window", marks=pytest.mark.long),
    pytest.param("gpt-oss", marks=pytest.mark.long),
    pytest.param("llama4", marks=pytest.mark.long),
    pytest.param("gemma4", marks=pytest.mark.long),
]
# Families that round norms, positions, orders or routers in other places.
IN_BFLOAT16 += [
    pytest.param(name, marks=pytest.mark.long)
    for name in (*("gpt2", "cohere", "glm", "minimax-m2", "deepseek-v2", "axk1", "afmoe", "apertus", "cohere2-moe"),)
]
# All families run in chunks and mixed steps, and, except variants, greedily. Other cases run with families that have
# windows, several RoPE tables, layers without RoPE, soft caps or experts, and with latents; ``make test-long`` runs
# them with all families.
DIFFERENT = ("llama-gqa-tied", "smollm3-nope", "mistral-window", "phi3-longrope-long", "gemma2", "granite", "qwen3-moe")
on_different_families = pytest.mark.parametrize(
    "on_torch",
    [
        pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.long)
        for name in FAMILIES
        if name in DIFFERENT or name not in BY_ROWS or name in OF_LATENTS
    ],
    indirect=True,
)


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    prepared: PreparedModel
    model: Any
    kernels: str = "torch"
    name: str = ""

    @property
    def block_sizes(self) -> tuple[int, int]:
        """Return block sizes to test: the CPU kernels have 16 lanes and need blocks of whole vectors."""
        return (4, 16) if self.kernels == "torch" else (16, 32)

    def driver(self, block_size: int = 16, num_slots: int = 64, kv: str = "auto") -> BackendDriver:
        if self.kernels == "torch":
            return BackendDriver(self.prepared, block_size, num_slots)
        checked = block_size == 32
        backend = cpu_backend(self.prepared, block_size, threads=2, checked=checked, kv_cache_dtype=kv)
        return CpuDriver(self.prepared, block_size, num_slots, backend=backend)

    @torch.inference_mode()
    def logits(self, text: list[int]) -> torch.Tensor:
        """Return the logits of each token of a text, padded because some RoPE variants depend on its length."""
        filled = text + [3] * (PROMPT_TOKENS - len(text))
        return self.model(torch.tensor([filled])).logits[0, : len(text)].float()


@pytest.fixture(scope="module")
def flags_of(own_cache, tmp_path_factory):
    """Make a family's model, once; return its flags."""
    return functools.cache(lambda name: make_model(tmp_path_factory.mktemp("model"), FAMILIES[name])[1])


@pytest.fixture(params=[name for name in FAMILIES if name not in BY_ROWS], scope="module")
def on_torch(request, flags_of):
    flags = flags_of(request.param)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
    return FamilyCase(prepare(flags), model, name=request.param)


@pytest.fixture(params=["torch", pytest.param("cpu", marks=needs_kernels)])
def case(request, on_torch):
    return dataclasses.replace(on_torch, kernels=request.param)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@on_different_families
def test_log_probabilities_of_prompts(case):
    """Two prompts side by side in chunks, the second one shorter."""
    texts = [tokens_of(PROMPT_TOKENS, 2), tokens_of(PROMPT_TOKENS, 3)[:29]]
    driver = case.driver(num_slots=64)
    for text, found in zip(texts, run_scored(driver.backend, texts, [7, 1, 20]), strict=True):
        check_scores(found, text, case.logits(text))


# Splits at the edges of blocks of 16 and of texts. All of them are slow for similar families.
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 68, 69]
SPLITS = [
    *(pytest.param(name, EDGES, id=f"{name}-edges") for name in DIFFERENT),
    *(pytest.param(name, range(1, PROMPT_TOKENS), marks=pytest.mark.long, id=f"{name}-all") for name in DIFFERENT),
    *(
        pytest.param(name, EDGES, marks=pytest.mark.long, id=f"{name}-edges")
        for name in FAMILIES
        if name not in BY_ROWS and name not in DIFFERENT
    ),
]


@pytest.mark.parametrize(("on_torch", "splits"), SPLITS, indirect=["on_torch"])
def test_logits_match_at_every_split_point(case, splits):
    text = tokens_of(PROMPT_TOKENS, 2)
    wanted = case.logits(text)
    assert wanted.std() > 0.5
    drivers = [case.driver(block_size, num_slots=1500) for block_size in case.block_sizes]
    for split in splits:
        driver = drivers[split % 2]
        (number,) = driver.sequences.add()
        close(driver.run_all(number, text, [split]), wanted)


def test_logits_match_over_many_chunks_and_single_tokens(case):
    text = tokens_of(PROMPT_TOKENS, 2)
    wanted = case.logits(text)
    small, large = case.block_sizes
    for block_size, splits in ((small, ([33, 1, 2], [46, *[1] * 23])), (large, ([17, 16], []))):
        driver = case.driver(block_size, num_slots=80)
        for chunks in splits:
            (number,) = driver.sequences.add()
            close(driver.run_all(number, text, chunks), wanted)


@pytest.mark.parametrize("on_torch", BY_ROWS, indirect=True)
def test_logits_of_each_family_match_transformers(case):
    text = tokens_of(PROMPT_TOKENS, 2)
    wanted = case.logits(text)
    assert wanted.std() > 0.5
    driver = case.driver(32, num_slots=20)
    one, other = driver.sequences.add(2)
    close(driver.run_all(one, text, [33, 1, 2]), wanted)
    driver.step((other, text[:40]), sample=[])
    beside = driver.sequences.add()[0]
    close(driver.step((beside, text[:20]), (other, text[40:41])), wanted[[19, 40]])
    close(driver.step((other, text[41:]), (beside, text[20:21])), wanted[[69, 20]])


@needs_kernels
@pytest.mark.parametrize(("on_torch", "kv", "most"), KV_IN_8_BITS, indirect=["on_torch"])
def test_kv_in_8_bits(on_torch, kv, most):
    """In chunks and token by token: the same bits, near transformers' logits."""
    text, driver = tokens_of(PROMPT_TOKENS, 2), dataclasses.replace(on_torch, kernels="cpu").driver(kv=kv)
    wanted = on_torch.logits(text)
    one, other = driver.sequences.add(2)
    found = driver.run_all(one, text, [33, 1, 2, 20])
    assert 0 < (found - wanted).abs().mean() < most * wanted.std()
    assert torch.equal(driver.run_all(other, text, [1] * 69), found)


def test_mixed_batches_match_transformers(case):
    texts = [tokens_of(count, seed) for seed, count in enumerate((70, 20, 33, 50))]
    wanted = [case.logits(text) for text in texts]
    driver = case.driver(case.block_sizes[0], num_slots=100)
    a, b, c, d = driver.sequences.add(4)
    one, two, three, four = texts
    driver.step((a, one[:40]), (b, two[:18]), sample=[])
    got = driver.step((b, two[18:19]), (a, one[40:69]), (c, three[:32]), (d, four[:1]))
    close(got, torch.stack([wanted[1][18], wanted[0][68], wanted[2][31], wanted[3][0]]))
    got = driver.step((a, one[69:]), (d, four[1:50]), (c, three[32:]), (b, two[19:]))
    close(got, torch.stack([wanted[0][69], wanted[3][49], wanted[2][32], wanted[1][19]]))


def test_greedy_continuations_match_transformers(case):
    """Compare with transformers' cached generation, except if its RoPE changes there."""
    rope = case.prepared.max_model_len
    if "rope-" in kv_layout(case.prepared, 16).version:
        pytest.skip(f"transformers changes frequencies below {rope} tokens")
    prompt = tokens_of(40, 5)
    got = case.driver(16, num_slots=40).greedy(prompt, 12)
    assert not first_difference(Oracle(case.model).greedy(prompt, 12), got, 1e-3)


@pytest.mark.parametrize("on_torch", ["llama-dynamic-rope-beyond", "phi3-longrope-long"], indirect=True)
def test_texts_within_the_original_length_have_their_own_frequencies_beside_longer_ones(case):
    """The original length is 32 tokens, the served one 70."""
    short, long = tokens_of(31, 4), tokens_of(PROMPT_TOKENS, 2)
    # The longer text first: transformers then returns to the frequencies of training.
    wanted_long = case.logits(long)
    with torch.inference_mode():
        wanted = case.model(torch.tensor([short])).logits[0].float()
    lengths = case.prepared.original_tokens, case.prepared.max_model_len
    assert rope_shift(32, *lengths) == PROMPT_TOKENS
    assert rope_shift(33, *lengths) == rope_shift(0, *lengths) == 0
    driver = case.driver(case.block_sizes[1], num_slots=40)
    (one,), (other,) = driver.sequences.add(rope_shift=rope_shift(32, *lengths)), driver.sequences.add()
    driver.step((one, short[:20]), (other, long[:40]), sample=[])
    got = driver.step((other, long[40:41]), (one, short[20:]), sample=[0, 1, 11])
    close(got, torch.stack([wanted_long[40], wanted[20], wanted[30]]))
    assert not torch.allclose(wanted[30], case.logits(short)[30], atol=0.1)


def test_the_text_part_of_a_model_of_text_and_images(tmp_path):
    """Gemma 3 above 1B nests the text model's config and tensors, under two generations of names."""
    folder, flags = make_model(tmp_path / "text", FAMILIES["gemma3"])
    text = tokens_of(PROMPT_TOKENS, 2)
    driver = BackendDriver(prepare(flags))
    wanted = driver.run_all(driver.sequences.add()[0], text, [])
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": config, "eos_token_id": [1, 5], "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    for prefix, vision in (
        ("language_model.model.", "vision_tower.x"),
        ("model.language_model.", "model.vision_tower.x"),
    ):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        save_file({**renamed, vision: torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
        prepared = prepare(flags)
        assert prepared.eos_token_ids == (1, 5)
        driver = BackendDriver(prepared)
        assert torch.equal(driver.run_all(driver.sequences.add()[0], text, []), wanted)


def test_the_text_part_of_gemma_4(tmp_path):
    """Checkpoints have unused tensors for keys and values of layers that share others', and image and audio parts."""
    folder, flags = make_model(tmp_path / "model", FAMILIES["gemma4"])
    text, found = tokens_of(PROMPT_TOKENS, 2), []
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma4", "text_config": config, "vision_config": {}, "audio_config": {}, "boa_token_id": 9}
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.4.self_attn.{part}.weight": torch.ones(3) for part in ("k_proj", "v_proj", "k_norm")}
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    parts = ("vision_tower.x", "embed_vision.x", "audio_tower.x", "embed_audio.x", "vision_embedder.x")
    tensors |= {f"model.{part}": torch.ones(3) for part in parts}
    for _ in range(2):
        driver = BackendDriver(prepare(flags))
        found.append(driver.run_all(driver.sequences.add()[0], text, []))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(outer))
    assert torch.equal(*found)
    other = {"model.language_model.layers.4.self_attn.k_sum.weight": torch.ones(3)}
    save_file({**tensors, **other}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="k_sum"):
        BackendDriver(prepare(flags))


@needs_kernels
@pytest.mark.parametrize("on_torch", ["gemma4"], indirect=True)
def test_layers_with_shared_keys_run_only_for_sampled_rows(on_torch, monkeypatch):
    """In a step without sampled rows, the last two of five layers have nothing to store."""
    attended, attend = [], StepAttention.attend
    monkeypatch.setattr(
        StepAttention, "attend", lambda self, layer, *rest: attended.append(layer) or attend(self, layer, *rest)
    )
    text, driver = tokens_of(PROMPT_TOKENS, 2), on_torch.driver()
    (number,) = driver.sequences.add()
    driver.step((number, text[:40]), sample=())
    assert attended == [0, 1]
    driver.step((number, text[40:]))
    assert attended[2:] == [0, 1, 2, 2, 1]
    operations = dataclasses.replace(on_torch, kernels="cpu").driver().backend.model.plan.operations
    always = [operation for operation in operations if not operation.when]
    assert isinstance(always[-1].spec, RotateWrite)
    assert sum(isinstance(operation.spec, RotateWrite) for operation in always) == 3
    assert sum(isinstance(operation.spec, RotateWrite) for operation in operations) == 5


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_the_names_of_gpt2s_and_opts_own_checkpoints(tmp_path, name, prefix):
    """They lack the model prefix, and GPT-2's include each layer's mask."""
    folder, flags = make_model(tmp_path / "model", FAMILIES[name])
    text, found = tokens_of(PROMPT_TOKENS, 2), []
    for _ in range(2):
        driver = BackendDriver(prepare(flags))
        found.append(driver.run_all(driver.sequences.add()[0], text, []))
        tensors = {name.replace(prefix, "", 1): each for name, each in load_file(folder / "model.safetensors").items()}
        masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 9, 9).tril() for layer in range(2)}
        save_file({**tensors, **masks}, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(*found)


def test_mtp_layers_are_not_read(tmp_path):
    """GLM-4-MoE's checkpoints have one extra layer (multi-token prediction)."""
    text, found = tokens_of(PROMPT_TOKENS, 2), []
    for case, words in (("glm4-moe", ""), ("qwen3-moe", "model.layers.2.eh_proj.weight")):
        folder, flags = make_model(tmp_path / case, FAMILIES[case])
        found.append((driver := BackendDriver(prepare(flags))).run_all(driver.sequences.add()[0], text, []))
        tensors = load_file(folder / "model.safetensors")
        behind = {"model.layers.2.eh_proj.weight": torch.ones(3)}
        save_file({**tensors, **behind}, folder / "model.safetensors", metadata={"format": "pt"})
        if words:
            with pytest.raises(ConfigError, match=words):
                BackendDriver(prepare(flags))
            continue
        driver = BackendDriver(prepare(flags))
        assert torch.equal(driver.run_all(driver.sequences.add()[0], text, []), found[0])


def test_the_tensors_of_ax_k1s_published_checkpoints(tmp_path):
    """They lack the expert bias, and have the norm of the sum also for dense layers."""
    folder, flags = make_model(tmp_path / "model", FAMILIES["axk1"])
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "e_score_correction_bias" not in name}
    assert len(kept) < len(tensors)
    idle = {"model.layers.0.post_mlp_layernorm.weight": torch.full((len(tensors["model.norm.weight"]),), 3.0)}
    save_file({**kept, **idle}, folder / "model.safetensors", metadata={"format": "pt"})
    model, text = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens_of(PROMPT_TOKENS, 2)
    wanted = FamilyCase(None, model.eval()).logits(text)
    driver = BackendDriver(prepare(flags))
    close(driver.run_all(driver.sequences.add()[0], text, []), wanted)


@pytest.fixture(scope="module")
def rounded_models(own_cache, tmp_path_factory):
    """Make a family's models, once each; several if a rounding may change the chosen expert. Return each one prepared
    in bfloat16, and transformers' logits in float32 and bfloat16."""

    def make(name: str) -> list[tuple[PreparedModel, torch.Tensor, torch.Tensor]]:
        found = []
        for seed in range(4 if any("expert" in key for key in FAMILIES[name]) else 1):
            folder, flags = make_model(tmp_path_factory.mktemp("model"), {**FAMILIES[name], "seed": seed})
            exact, rounded = (
                FamilyCase(None, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()).logits(text)
                for dtype in (torch.float32, torch.bfloat16)
            )
            found.append((prepare(dataclasses.replace(flags, dtype="bfloat16")), exact, rounded))
        return found

    text = tokens_of(PROMPT_TOKENS, 2)
    return functools.cache(make)


@pytest.mark.parametrize("runs_on", ["torch", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_bfloat16_is_as_close_to_fp32_as_transformers_bfloat16(rounded_models, name, runs_on):
    """Errors are summed over a family's models."""
    text, ours, theirs = tokens_of(PROMPT_TOKENS, 2), 0.0, 0.0
    for prepared, exact, rounded in rounded_models(name):
        driver = FamilyCase(prepared, None, runs_on).driver(16, num_slots=20)
        (number,) = driver.sequences.add()
        ours += float((driver.run_all(number, text, [32, 1]) - exact).abs().mean())
        theirs += float((rounded - exact).abs().mean())
    # Torch rounds like transformers; the kernels keep float32 where possible.
    assert ours < (1.25 if runs_on == "torch" else 1.0) * theirs
