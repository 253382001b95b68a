"""Adapters against transformers with PEFT in float32: a model of each family, all kinds of configs, mixed steps."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.adapters.adapter_reader import read_adapter
from pillion.engine.adapters.adapter_weights import weights_of
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from tests.support.adapters import ATTENTION, adapted_model, edit_tensors, make_adapter
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.families import BY_ROWS, FAMILIES, FIRST, OF_LATENTS, PROMPT_TOKENS, make_model, tokens_of
from tests.support.hybrids import HYBRIDS, StateDriver, token_by_token
from tests.support.oracle import Oracle, first_difference
from tests.support.quantized import PRODUCERS, quantize_folder
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")


TOLERANCE = 2e-4
# Module names of attention that differ from ATTENTION.
OTHER_NAMES = ("qkv_proj", "c_attn", "query_key_value", "c_proj", "dense", "out_proj")
BACKENDS = [pytest.param(BackendDriver, id="torch"), pytest.param(CpuDriver, id="cpu", marks=needs_kernels)]
MODELS = (
    "llama-odd-hidden",
    "llama-mqa-biases",
    "smollm3-nope",
    "mistral-window",
    "ministral",
    "mixtral",
    "qwen2-bias",
    "qwen3-qk-norm",
    "qwen3-moe-some-dense",
    "phi3",
    "phi3-partial-rope",
    "gemma2",
    "gemma3",
    "olmo2",
    "granite",
    # Rotated neighbours, one of two fused layers, MLPs without a gate or beside experts, other names.
    "ernie4-5",
    "glm",
    "cohere",
    "starcoder2",
    "arcee",
    "hunyuan-dense",
    "glm4-moe",
    "granitemoeshared",
    "ernie4-5-moe",
    "qwen2-moe",
    # Other module names, fused QKV, transposed matrices.
    "gpt2",
    "opt",
)
CONFIGS = {
    "attention": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "qkv_proj"]},
    "stabilized": {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": list(ATTENTION)},
    "expression": {"r": 3, "target_modules": r".*\.layers\.1\.(self_attn|mlp)\.(k_proj|down_proj)"},
    "some-layers": {"r": 8, "target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1]},
    "one-layer": {"r": 8, "target_modules": ["o_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "excluded": {"r": 8, "exclude_modules": ["gate_proj"]},
    "dense-layers": {"r": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "patterns": {
        "r": 2,
        "lora_alpha": 3,
        "rank_pattern": {"q_proj": 5, "layers.0.mlp.down_proj": 9},
        "alpha_pattern": {"v_proj": 7, r".*\.1\.self_attn\.q_proj": 1},
    },
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama"), FAMILIES["llama-gqa-tied"])


def take(backend, folder, prepared):
    """Read and pack an adapter for the backend like a worker's process."""
    digest = AdapterFiles(folder).digest()
    about, data = LoadedModel(prepared, backend).adapter_reader(16).packed(folder, digest)
    return backend.adapters.build(digest, about, data)


@torch.inference_mode()
def logits_of(model, text):
    return model(torch.tensor([text])).logits[0].float()


def driver_with(flags, *adapters, num_slots=64, make=BackendDriver):
    prepared = prepare(flags)
    driver = make(prepared, 16, num_slots)
    driver.backend.bind_adapters(len(adapters), 16)
    for slot, folder in enumerate(adapters):
        driver.backend.adapters.place(slot, take(driver.backend, folder, prepared))
    return driver


def expected(folder, adapter):
    """Return PEFT's model, and a text's logits with and without the adapter."""
    oracle, text = adapted_model(folder, adapter), tokens_of(PROMPT_TOKENS, 2)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return oracle, logits_of(oracle, text), logits_of(plain, text)


def check_adapter(folder, flags, adapter, make=BackendDriver, known=None):
    """Compare a text's logits in chunks, and greedy tokens; the adapter must change them. ``known``: expected logits
    from another case."""
    (oracle, wanted, plain), text = known or expected(folder, adapter), tokens_of(PROMPT_TOKENS, 2)
    driver = driver_with(flags, adapter, make=make)
    (number,) = driver.sequences.add(adapter=0)
    found = driver.run_all(number, text, [17, 1])
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert (plain - wanted).std() > 0.01 * wanted.std()
    (number,) = driver.sequences.add()
    torch.testing.assert_close(driver.run_all(number, text, []), plain, atol=TOLERANCE, rtol=TOLERANCE)
    return oracle, driver


# Families whose linear layers have unique names or shapes.
DIFFERENT = (
    "llama-odd-hidden",
    "qwen2-bias",
    "qwen3-moe-some-dense",
    "phi3",
    "gemma2",
    "granite",
    "gpt2",
)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in DIFFERENT else pytest.mark.long) for family in MODELS]
)
def test_adapters_of_each_family_match_peft(family, tmp_path):
    folder, flags = make_model(tmp_path / "model", FAMILIES[family])
    # PEFT counts experts among the linear layers.
    targets = (
        list(ATTENTION)
        if FAMILIES[family].get("stacked_experts") or "mix" in family or "-moe" in family
        else "all-linear"
    )
    adapter = make_adapter(folder, tmp_path / "adapter", r=6, lora_alpha=12, target_modules=targets)
    oracle, driver = check_adapter(folder, flags, adapter)
    prompt = tokens_of(20, 5)
    (number,) = driver.sequences.add(adapter=0)
    tokens = [int(driver.step((number, prompt)).argmax())]
    while len(tokens) < 12:
        tokens.append(int(driver.step((number, tokens[-1:])).argmax()))
    assert not first_difference(Oracle(oracle).greedy(prompt, 12), tokens, 1e-3)


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize("family", [name for name in FIRST.values() if name not in (*OF_LATENTS, *BY_ROWS)])
def test_attention_of_every_family_on_the_kernels(family, tmp_path):
    folder, flags = make_model(tmp_path / "model", FAMILIES[family])
    config = {"r": 6, "lora_alpha": 12, "target_modules": [*ATTENTION, *OTHER_NAMES]}
    check_adapter(folder, flags, make_adapter(folder, tmp_path / "adapter", **config), CpuDriver)


# Linear layers of MLA with adapters. With MLPs as targets, PEFT also adapts experts.
LATENT_TARGETS = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.mark.parametrize(
    ("family", "config", "make"),
    [
        pytest.param("deepseek-v3", {"r": 6, "lora_alpha": 12}, CpuDriver, marks=needs_kernels),
        *(
            pytest.param(*case, marks=(pytest.mark.long, needs_kernels))
            for case in (
                ("deepseek-v3", {"r": 6, "lora_alpha": 12}, BackendDriver),
                ("deepseek-v32", {"r": 4}, BackendDriver),
                ("deepseek-v32", {"r": 4}, CpuDriver),
                ("deepseek-v2", {"r": 4}, CpuDriver),
                ("youtu", {"r": 4}, BackendDriver),
                ("youtu", {"r": 4}, CpuDriver),
                ("minicpm3", {"r": 4}, CpuDriver),
                ("glm4-moe-lite", {"r": 4}, CpuDriver),
            )
        ),
    ],
)
def test_latents(family, config, make, tmp_path):
    """Rotated pairs have another order than in checkpoints, in queries and the row with the key."""
    folder, flags = make_model(tmp_path / "model", FAMILIES[family])
    targets = [*LATENT_TARGETS, *(["wq_b", "wk", "weights_proj"] if family == "deepseek-v32" else [])]
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=targets, **config)
    check_adapter(folder, flags, adapter, make)


# Linear layers of layers with states. PEFT has no adapters of ``out_proj`` for models that it counts as Mamba. With
# MLPs as targets, PEFT also adapts experts.
MIXERS = ["in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"]
EACH = ["a_proj", "b_proj", "g_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
MLPS = ["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "input_linear", "output_linear"]
HYBRID_CASES = {
    # Reordered groups of rows; two pairs within a tile of outputs; names that checkpoints do not have.
    "qwen3-next": [*MIXERS, "out_proj", *ATTENTION],
    "olmo-hybrid": [*EACH, *MLPS, *ATTENTION],
    "kimi-linear": [*EACH, *MLPS, "kv_a_proj_with_mqa", *ATTENTION],
    "falcon-h1": [*MIXERS, *MLPS, *ATTENTION],
    "lfm2-biases": [*MIXERS, *MLPS, "out_proj", *ATTENTION],
    "lfm3": [*MIXERS, *MLPS, "out_proj", "g_proj", *ATTENTION],
    "jamba": [*MIXERS, *MLPS, "x_proj", *ATTENTION],
    # PEFT counts Bamba as Mamba.
    "bamba": [*MIXERS, *MLPS, *ATTENTION],
    "nemotron-h": [*MIXERS, *MLPS, *ATTENTION],
    # The second to last layer is an MLP only, one is beside experts.
    "nemotron-h-ends-linear": [*MIXERS, *MLPS, *ATTENTION],
    "qwen3-5": [*MIXERS, *MLPS, "out_proj", *ATTENTION],
    "granite-hybrid": [*MIXERS, *MLPS, "out_proj", *ATTENTION],
    "granite-hybrid-dense": [*MIXERS, *MLPS, "out_proj", *ATTENTION],
}
SHORT_HYBRIDS = [("qwen3-next", "torch"), ("olmo-hybrid", "cpu")]


@pytest.fixture(scope="module")
def adapted_hybrid(own_cache, tmp_path_factory):
    """Make a model with states and its adapter, once for all backends, with the logits of each slot. The oracle runs
    token by token, because its chunks round differently."""

    @functools.lru_cache(maxsize=1)
    def make(family):
        place, text = tmp_path_factory.mktemp("hybrid"), tokens_of(PROMPT_TOKENS, 2)
        folder, flags = make_model(place / "model", HYBRIDS[family])
        targets = HYBRID_CASES[family]
        adapter = make_adapter(folder, place / "adapter", r=6, lora_alpha=12, target_modules=targets)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        wanted = {0: adapted_model(folder, adapter), -1: plain}
        return flags, adapter, {slot: token_by_token(model, text) for slot, model in wanted.items()}

    return make


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        pytest.param(
            family,
            kernels,
            marks=[
                *([needs_kernels] if kernels == "cpu" else []),
                *([] if (family, kernels) in SHORT_HYBRIDS else [pytest.mark.long]),
            ],
        )
        for family in HYBRID_CASES
        for kernels in ("torch", "cpu")
    ],
)
def test_layers_with_states(family, kernels, adapted_hybrid):
    flags, adapter, wanted = adapted_hybrid(family)

    def make(prepared, block_size, num_slots):
        backend = cpu_backend(prepared, block_size, threads=2) if kernels == "cpu" else None
        return StateDriver(prepared, block_size, num_slots, backend=backend)

    driver, text = driver_with(flags, adapter, num_slots=400, make=make), tokens_of(PROMPT_TOKENS, 2)
    assert (wanted[-1] - wanted[0]).std() > 0.3 * wanted[-1].std()
    numbers = {number: slot for slot in wanted for number in driver.sequences.add(2, adapter=slot)}
    for begin, end in ((0, 17), (17, 18), (18, PROMPT_TOKENS)):
        found = driver.step(*((number, text[begin:end]) for number in numbers))
        for slot, logits in zip(numbers.values(), found, strict=True):
            torch.testing.assert_close(logits, wanted[slot][end - 1], atol=1e-3, rtol=1e-3)


def test_convolutions_have_no_adapters(tmp_path):
    folder, flags = make_model(tmp_path / "model", HYBRIDS["lfm2"])
    adapter = make_adapter(folder, tmp_path / "adapter", r=4, target_modules=["in_proj"])
    edit_tensors(adapter, lambda tensors: {name.replace("in_proj", "conv"): one for name, one in tensors.items()})
    with pytest.raises(
        ConfigError, match=r"conv\.conv, which cannot be served: adapters of convolutions are not supported"
    ):
        driver_with(flags, adapter)


# All linear layers with two ranks, and only keys and values of latents.
LATENT_ADAPTERS = ({"r": 6, "lora_alpha": 12}, {"r": 16, "target_modules": ["kv_b_proj"]}, {"r": 3, "lora_alpha": 9})


@pytest.fixture(scope="module")
def adapted_latents(own_cache, tmp_path_factory):
    """Make a model and its adapters, once for all backends, with a text's logits of each slot."""

    @functools.lru_cache(maxsize=1)
    def make(family):
        place, text = tmp_path_factory.mktemp("latents"), tokens_of(PROMPT_TOKENS, 2)
        folder, flags = make_model(place / "model", FAMILIES[family])
        adapters = [
            make_adapter(folder, place / str(seed), seed=seed, **config) for seed, config in enumerate(LATENT_ADAPTERS)
        ]
        models = {slot: adapted_model(folder, adapter) for slot, adapter in enumerate(adapters)}
        models[-1] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return flags, adapters, {slot: logits_of(model, text) for slot, model in models.items()}

    return make


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(
    "family",
    [
        "deepseek-v3",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("deepseek-v2", "deepseek-v32", "mistral4", "glm-moe-dsa", "glm4-moe-lite", "minicpm3", "axk1")
        ),
    ],
)
def test_all_linear_layers_of_latents(family, make, adapted_latents):
    """Adapters of kv_b_proj, which runs as two products per head, mixed with other and no adapters."""
    flags, adapters, wanted = adapted_latents(family)
    driver, text = driver_with(flags, *adapters, num_slots=100, make=make), tokens_of(PROMPT_TOKENS, 2)
    numbers = {driver.sequences.add(adapter=slot)[0]: slot for slot in (1, -1, 0, 2, 1)}
    for begin, end in ((0, 17), (17, 18), (18, PROMPT_TOKENS)):
        found = driver.step(*((number, text[begin:end]) for number in numbers))
        for slot, logits in zip(numbers.values(), found, strict=True):
            torch.testing.assert_close(logits, wanted[slot][end - 1], atol=TOLERANCE, rtol=TOLERANCE)
    for slot in range(len(adapters)):
        assert (wanted[slot] - wanted[-1]).std() > 0.1 * wanted[-1].std()


@pytest.mark.parametrize(
    ("family", "module", "words"),
    [
        ("gpt2", "h.0.attn.q_proj", "h.0.attn.q_proj, which a gpt2 model does not have"),
        ("opt", "layers.0.self_attn.o_proj", "self_attn.o_proj, which a opt model does not have"),
        ("gpt2", "wte", "wte, which cannot be served: adapters of embeddings are not supported"),
        ("gpt2", "lm_head", "lm_head, which cannot be served: adapters of the head are not supported"),
    ],
)
def test_adapters_of_missing_modules_are_refused(family, module, words, tmp_path):
    folder, flags = make_model(tmp_path / "model", FAMILIES[family])
    adapter = make_adapter(folder, tmp_path / "adapter", r=4)

    def renamed(tensors):
        first = sorted(tensors)[0].removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        return {name.replace(first, module): tensor for name, tensor in tensors.items()}

    edit_tensors(adapter, renamed)
    with pytest.raises(ConfigError, match=words):
        driver_with(flags, adapter)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_kind_of_config_matches_peft(config, llama, tmp_path):
    folder, flags = llama
    check_adapter(folder, flags, make_adapter(folder, tmp_path / "adapter", **CONFIGS[config]))


def test_fused_projections_with_a_list_of_targets(tmp_path):
    folder, flags = make_model(tmp_path / "model", FAMILIES["phi3-partial-rope"])
    config = {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"]}
    check_adapter(folder, flags, make_adapter(folder, tmp_path / "adapter", **config))


@pytest.mark.parametrize("make", BACKENDS)
def test_an_mlp_beside_experts_whose_results_have_a_gate(make, tmp_path):
    """The gate also scales the adapter's result."""
    folder, flags = make_model(tmp_path / "model", FAMILIES["qwen2-moe"])
    config = {"r": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    check_adapter(folder, flags, make_adapter(folder, tmp_path / "adapter", **config), make)


@pytest.mark.parametrize("producer", ["gptq", "w4a16", "nf4"])
def test_quantized_base_weights(producer, llama, tmp_path):
    few, wide = quantize_folder(llama[0], tmp_path / "quantized", PRODUCERS[producer](16))
    adapter = make_adapter(wide, tmp_path / "adapter", r=4)
    check_adapter(wide, ModelFlags(model=str(few), dtype="float32"), adapter)


def test_one_step_mixes_adapters_and_the_base(llama, tmp_path):
    folder, flags = llama
    adapters = [make_adapter(folder, tmp_path / str(seed), seed=seed, r=2 + 3 * seed) for seed in range(3)]
    driver, text = driver_with(flags, *adapters), tokens_of(40, 3)
    wanted = [logits_of(adapted_model(folder, adapter), text) for adapter in adapters]
    slots = [2, -1, 0, 1, 0]
    numbers = [driver.sequences.add(adapter=slot)[0] for slot in slots]
    cuts = [(0, 13), (13, 14), (14, 40)]
    for begin, end in cuts:
        found = driver.step(*((number, text[begin:end]) for number in numbers))
        for slot, logits in zip(slots, found, strict=True):
            if slot >= 0:
                torch.testing.assert_close(logits, wanted[slot][end - 1], atol=TOLERANCE, rtol=TOLERANCE)
    assert (found[2] == found[4]).all()
    assert not torch.allclose(found[0], found[1])


def test_a_slot_is_reused_by_another_adapter(llama, tmp_path):
    folder, flags = llama
    first, second = (make_adapter(folder, tmp_path / str(seed), seed=seed, r=4) for seed in (1, 2))
    driver, text = driver_with(flags, first), tokens_of(20, 3)
    driver.backend.adapters.place(0, take(driver.backend, second, driver.prepared))
    (number,) = driver.sequences.add(adapter=0)
    wanted = logits_of(adapted_model(folder, second), text)
    torch.testing.assert_close(driver.run_all(number, text, []), wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_bfloat16_rounds_the_scaled_matrix_once(llama, tmp_path):
    folder, flags = llama
    files = AdapterFiles(make_adapter(folder, tmp_path / "adapter", r=4, lora_alpha=10))
    config, digest = load_config(prepare(flags).folder), files.digest()
    wide, short = (weights_of(digest, read_adapter(files, config, dtype, digest)) for dtype in ("float32", "bfloat16"))
    for name, pairs in wide.layers.items():
        for pair, rounded in zip(pairs, short.layers[name], strict=True):
            assert (pair.b.bfloat16() == rounded.b).all()
            assert (pair.a.bfloat16() == rounded.a).all()
