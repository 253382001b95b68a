"""Adapters of experts, routers and gates against transformers with PEFT in float32."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.adapters.adapter_config import parse_adapter_config
from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from tests.engine.adapters.test_peft import TOLERANCE, check_adapter, driver_with, expected, logits_of
from tests.support.adapters import adapted_model, edit_config, edit_tensors, make_adapter
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.hybrids import HYBRIDS, StateDriver, token_by_token
from tests.support.mixed_adapters import mixed_steps, with_adapters
from tests.support.oracle import Oracle, first_difference
from tests.support.quantized import PRODUCERS, quantize_folder
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")

BACKENDS = [pytest.param(BackendDriver, id="torch"), pytest.param(CpuDriver, id="cpu", marks=needs_kernels)]
PARAMETERS = ["gate_up_proj", "experts.down_proj", "experts.up_proj", "gate.weight", "router.weight"]
CONFIG = {
    "r": 3,
    "lora_alpha": 9,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": PARAMETERS,
    "rank_pattern": {r".*\.gate_up_proj": 5},
    "alpha_pattern": {r".*\.layers\.1\..*\.gate_up_proj": 2},
}
# A model of each family whose transformers class stacks experts in one tensor.
MIXTURES = (
    "mixtral",
    "qwen3-moe-some-dense",
    "gpt-oss",
    "gpt-oss-plain",
    "deepseek-v3",
    "deepseek-v2",
    "olmoe",
    "granitemoe",
    # Experts' inputs are scaled, and PEFT takes the inputs of their matrices for outputs.
    "llama4",
    "llama4-two-each",
    # Its router has its own norm.
    "gemma4-moe",
    "qwen2-moe",
    "flex-olmo",
    "granitemoeshared",
    "granitemoe-swa",
    "glm4-moe",
    "dots1",
    "solar-open",
    "minimax-m2",
    "ernie4-5-moe",
    "exaone-moe",
    "afmoe",
    "cohere2-moe",
    "hy-v3",
    "flint",
    "hunyuan-moe",
    "mellum",
    "mistral4",
    "axk1",
    "glm4-moe-lite",
)
SHORT = (
    ("mixtral", "cpu"),
    ("gpt-oss", "cpu"),
    ("gpt-oss", "torch"),
    ("deepseek-v3", "cpu"),
    ("llama4", "cpu"),
    ("gemma4-moe", "cpu"),
)
DRIVERS = {"torch": BackendDriver, "cpu": CpuDriver}


def cases(names, short=SHORT):
    """Each model on each backend; only those in ``short`` run every time."""
    found = []
    for name in names:
        for backend in DRIVERS:
            marks = [needs_kernels] if backend == "cpu" else []
            marks += [] if (name, backend) in short else [pytest.mark.long]
            found.append(pytest.param(name, backend, marks=marks))
    return found


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("mixtral"), FAMILIES["mixtral"])


@pytest.fixture(scope="module")
def adapted(own_cache, tmp_path_factory):
    """Make a family's model and adapter, once for both backends, with the expected logits."""

    @functools.lru_cache(maxsize=1)
    def make(family):
        place = tmp_path_factory.mktemp("adapted")
        folder, flags = make_model(place / "model", FAMILIES[family])
        adapter = make_adapter(folder, place / "adapter", **CONFIG)
        return folder, flags, adapter, expected(folder, adapter)

    return make


@pytest.fixture(scope="module")
def adapted_hybrid(own_cache, tmp_path_factory):
    """Make a model with states and its adapter, once for both backends, with both models' logits token by token."""

    @functools.lru_cache(maxsize=1)
    def make(family):
        place, text = tmp_path_factory.mktemp("hybrid"), tokens_of(40, 2)
        folder, flags = make_model(place / "model", HYBRIDS[family])
        adapter = make_adapter(folder, place / "adapter", **CONFIG)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return flags, adapter, token_by_token(adapted_model(folder, adapter), text), token_by_token(plain, text)

    return make


@pytest.mark.parametrize(("family", "backend"), cases(MIXTURES))
def test_expert_adapters_of_each_family_match_peft(family, backend, adapted):
    folder, flags, adapter, known = adapted(family)
    oracle, driver = check_adapter(folder, flags, adapter, DRIVERS[backend], known)
    prompt = tokens_of(20, 5)
    (number,) = driver.sequences.add(adapter=0)
    tokens = [int(driver.step((number, prompt)).argmax())]
    while len(tokens) < 8:
        tokens.append(int(driver.step((number, tokens[-1:])).argmax()))
    assert not first_difference(Oracle(oracle).greedy(prompt, 8), tokens, 1e-3)


@pytest.mark.parametrize(
    ("family", "backend"),
    cases(("lfm2-moe", "qwen3-next", "qwen3-5-moe", "granite-hybrid", "nemotron-h", "kimi-linear"), ()),
)
def test_expert_adapters_of_hybrid_models_match_peft(family, backend, adapted_hybrid):
    flags, adapter, wanted, plain = adapted_hybrid(family)

    def make(prepared, block_size, num_slots):
        kernels = cpu_backend(prepared, block_size, threads=2) if backend == "cpu" else None
        return StateDriver(prepared, block_size, num_slots, backend=kernels)

    driver, text = driver_with(flags, adapter, num_slots=400, make=make), tokens_of(40, 2)
    assert (plain - wanted).std() > 0.1 * plain.std()
    (number,) = driver.sequences.add(adapter=0)
    torch.testing.assert_close(driver.run_all(number, text, [17, 1]), wanted, atol=1e-3, rtol=1e-3)


# What PEFT makes of "all-linear": parameters, or the linear routers and gates of a class.
ALL_LINEAR = (
    "mixtral",
    "qwen3-moe-some-dense",
    "qwen2-moe",
    "olmoe",
    "glm4-moe",
    "afmoe",
    "hunyuan-moe",
    "ernie4-5-moe",
    "minimax-m2",
)


@pytest.mark.parametrize(
    ("family", "backend"),
    cases(ALL_LINEAR, (("qwen3-moe-some-dense", "cpu"), ("afmoe", "torch"), ("hunyuan-moe", "torch"))),
)
def test_all_linear_adapters_match_peft(family, backend, tmp_path):
    folder, flags = make_model(tmp_path / "model", FAMILIES[family])
    check_adapter(folder, flags, make_adapter(folder, tmp_path / "adapter", r=4, lora_alpha=6), DRIVERS[backend])


@pytest.mark.parametrize("parameters", [["gate_up_proj"], ["down_proj"], ["layers.1.mlp.experts.down_proj"]])
@pytest.mark.parametrize("stabilized", [True, False])
def test_one_parameter_is_wrapped_once(parameters, stabilized, mixtral, tmp_path):
    """PEFT's tensor names do not tell the parameter; the config does."""
    folder, flags = mixtral
    config = {"r": 4, "lora_alpha": 3, "target_modules": [], "target_parameters": parameters}
    check_adapter(folder, flags, make_adapter(folder, tmp_path / "adapter", use_rslora=stabilized, **config))


@pytest.mark.parametrize("make", BACKENDS)
def test_adapters_of_individually_trained_experts(make, mixtral, tmp_path):
    """Older classes have a module per expert; PEFT stacks their pairs when loading, and so does Pillion."""
    folder, flags = mixtral
    config, generator = load_config(folder), torch.Generator().manual_seed(3)
    shapes = {"w1": (128, 64), "w2": (64, 128), "w3": (128, 64)}
    adapter = make_adapter(folder, tmp_path / "adapter", r=4, lora_alpha=10, target_modules=["q_proj"])
    edit_config(adapter, target_modules=["q_proj", *shapes])

    def with_experts(tensors):
        for layer in range(config.num_layers):
            for number in range(config.moe.num_experts):
                for name, (outputs, inputs) in shapes.items():
                    module = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{number}.{name}"
                    tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) / inputs**0.5
                    tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) / 4
        return tensors

    edit_tensors(adapter, with_experts)
    check_adapter(folder, flags, adapter, make)
    first = "base_model.model.model.layers.0.block_sparse_moe.experts.3.w2."
    edit_tensors(adapter, lambda tensors: {n: one for n, one in tensors.items() if not n.startswith(first)})
    with pytest.raises(ConfigError, match=r"experts\.3\.\w+ as a target, for which adapter_model.safetensors has no"):
        driver_with(flags, adapter)


@pytest.mark.parametrize("inner", [128, 64])
def test_transposed_pairs_of_older_peft_versions_are_read(inner, tmp_path):
    """PEFT before 0.19.1 swaps inputs and outputs of parameters [experts, outputs, inputs]; for square matrices only
    the version tells."""
    folder, flags = make_model(tmp_path / "model", {**FAMILIES["mixtral"], "intermediate_size": inner})
    config = {"r": 4, "target_modules": [], "target_parameters": ["down_proj"]}
    first, other = (make_adapter(folder, tmp_path / name, **config) for name in ("first", "other"))
    experts = load_config(folder).moe.num_experts

    def turned(tensors):
        found = {}
        for name, a in tensors.items():
            if "lora_A" in name:
                b = tensors[name.replace("lora_A", "lora_B")]
                ranks = b.view(len(b), -1, experts)
                found[name] = ranks.permute(2, 1, 0).reshape(-1, len(b))
                found[name.replace("lora_A", "lora_B")] = a.view(experts, -1, a.shape[1]).permute(2, 1, 0).flatten(1)
        return found

    edit_tensors(edit_config(other, peft_version="0.18.1"), turned)
    driver = driver_with(flags, first, other)
    one, two = (driver.run_all(driver.sequences.add(adapter=slot)[0], tokens_of(20, 1), []) for slot in (0, 1))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert AdapterFiles(other).digest() != AdapterFiles(edit_config(other, peft_version="0.21.2")).digest()


@pytest.mark.parametrize("family", ["gpt-oss", "llama4"])
def test_square_matrices_are_oriented_by_their_class(family, tmp_path):
    """Only the class tells outputs from inputs: Llama 4's does not mark its matrices as transposed."""
    folder, flags = make_model(tmp_path / "model", {**FAMILIES[family], "intermediate_size": 64})
    check_adapter(folder, flags, make_adapter(folder, tmp_path / "adapter", **CONFIG))


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("family", ["qwen3-moe-some-dense", "gpt-oss", "deepseek-v3"])
def test_one_step_mixes_adapters_and_the_base(family, make, tmp_path):
    """Prompts of 1, 2 and many tokens in one step, with adapters of several ranks, one for attention only, and none."""
    folder, flags = make_model(tmp_path / "model", FAMILIES[family])
    configs = [CONFIG, {**CONFIG, "r": 9, "rank_pattern": {}}, {"r": 4, "target_modules": ["o_proj"]}]
    adapters = [make_adapter(folder, tmp_path / str(at), seed=at, **config) for at, config in enumerate(configs)]
    driver, text = driver_with(flags, *adapters, num_slots=400, make=make), tokens_of(40, 3)
    wanted = {slot: logits_of(adapted_model(folder, adapter), text) for slot, adapter in enumerate(adapters)}
    wanted[-1] = logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), text)
    slots = [2, -1, 0, 1, 0, -1]
    lengths = [1, 2, 40, 1, 2, 30]
    pieces = [(driver.sequences.add(adapter=slot)[0], text[:count]) for slot, count in zip(slots, lengths, strict=True)]
    found = driver.step(*pieces)
    for slot, count, logits in zip(slots, lengths, found, strict=True):
        torch.testing.assert_close(logits, wanted[slot][count - 1], atol=TOLERANCE, rtol=TOLERANCE)
    going = [(number, count) for (number, _), count in zip(pieces, lengths, strict=True) if count < 40]
    found = driver.step(*((number, text[count : count + 1]) for number, count in going))
    own = [(slot, count) for slot, count in zip(slots, lengths, strict=True) if count < 40]
    for (slot, count), logits in zip(own, found, strict=True):
        torch.testing.assert_close(logits, wanted[slot][count], atol=TOLERANCE, rtol=TOLERANCE)


def test_many_rows_are_mixed_in_parts(tmp_path, monkeypatch):
    """Each part uses its own rows' adapters."""
    prepared, text = prepare(make_model(tmp_path / "model", FAMILIES["qwen2-moe"])[1]), tokens_of(20, 3)
    wanted = mixed_steps(with_adapters(BackendDriver(prepared), experts=True), text)
    monkeypatch.setattr("pillion.engine.models.layers.MAX_MIXED_ROWS", 4)
    found = mixed_steps(with_adapters(BackendDriver(prepared), experts=True), text)
    torch.testing.assert_close(found, wanted, atol=2e-5 * float(wanted.std()), rtol=2e-5)


@needs_kernels
def test_a_row_has_the_same_bits_in_every_batch_chunk_and_thread_pool(tmp_path):
    folder, _ = make_model(tmp_path / "model", FAMILIES["qwen2-moe"])
    prepared, text = prepare(ModelFlags(model=str(folder), dtype="bfloat16")), tokens_of(60, 1)
    plain = CpuDriver(prepared, num_slots=200)
    base = plain.run_all(plain.sequences.add()[0], text, [])
    alone = with_adapters(CpuDriver(prepared, num_slots=200), experts=True)
    assert torch.equal(alone.run_all(alone.sequences.add()[0], text, []), base)
    wanted = {-1: base, 1: alone.run_all(alone.sequences.add(adapter=1)[0], text, [])}
    assert not torch.equal(wanted[-1], wanted[1])
    for threads, checked, chunks in ((2, False, [1] * 10 + [30]), (3, True, [40, 2])):
        backend = cpu_backend(prepared, threads=threads, checked=checked)
        driver = with_adapters(CpuDriver(prepared, num_slots=200, backend=backend), experts=True)
        others = [driver.sequences.add(adapter=slot)[0] for slot in (0, 1, 2, -1)]
        for slot, logits in wanted.items():
            (mine,) = driver.sequences.add(adapter=slot)
            driver.check_among_others(mine, text, chunks, logits, others)
        driver.backend.check_integrity()
        driver.backend.close()


@pytest.mark.parametrize("producer", ["gptq-act-order", "nf4"])
@pytest.mark.parametrize("make", BACKENDS)
def test_quantized_experts(producer, make, tmp_path):
    """Quantized experts may have reordered inputs."""
    folder, _ = make_model(tmp_path / "model", FAMILIES["qwen3-moe"])
    few, wide = quantize_folder(folder, tmp_path / "quantized", PRODUCERS[producer](16))
    adapter = make_adapter(wide, tmp_path / "adapter", **CONFIG)
    check_adapter(wide, ModelFlags(model=str(few), dtype="float32"), adapter, make)


EXPERTS_OF_LAYER_0 = "base_model.model.model.layers.0.mlp.experts."
DOWN_A, DOWN_B = f"{EXPERTS_OF_LAYER_0}lora_A.weight", f"{EXPERTS_OF_LAYER_0}lora_B.weight"
UP_A = f"{EXPERTS_OF_LAYER_0}base_layer.lora_A.weight"
GATE_A, GATE_B = (f"base_model.model.model.layers.0.mlp.gate.lora_{half}.weight" for half in "AB")


@pytest.fixture(scope="module")
def good(mixtral, tmp_path_factory):
    return make_adapter(mixtral[0], tmp_path_factory.mktemp("good") / "adapter", r=2)


def copied(good, folder):
    folder.mkdir(exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes((good / name).read_bytes())
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t | {DOWN_A: t[DOWN_A][2:]},
            "experts.lora_A.weight is [8, 128]; rank and model require [10, 128] for 5",
        ),
        (
            lambda t: t | {DOWN_B: t[DOWN_B][:, 2:]},
            "lora_B.weight is [64, 8]; rank and model require [64, 10] for 5 experts",
        ),
        (
            lambda t: t | {DOWN_A: t[DOWN_A][:, 1:]},
            "lora_A.weight is [10, 127]; rank and model require [10, 128] for 5",
        ),
        (
            lambda t: t | {UP_A: t[UP_A][:10]},
            "base_layer.lora_A.weight is [10, 64]; rank and model require [20, 64] for 5",
        ),
        (lambda t: t | {GATE_A: t[GATE_A][:, 1:]}, "gate.lora_A.weight is [2, 63]; rank and model require [2, 64]"),
        (lambda t: t | {GATE_B: t[GATE_B][1:]}, "gate.lora_B.weight is [4, 2]; rank and model require [5, 2]"),
        (lambda t: {n: x for n, x in t.items() if n != DOWN_A}, "and no lora_A of model.layers.0.mlp.experts"),
        (
            lambda t: {n: x for n, x in t.items() if "layers.0.mlp.gate." not in n},
            "names model.layers.0.mlp.gate.weight",
        ),
        (
            lambda t: {n: x for n, x in t.items() if not n.startswith(EXPERTS_OF_LAYER_0 + "lora")},
            "names model.layers.0.mlp.experts.down_proj as a target, for which adapter_model.safetensors has no",
        ),
        (
            lambda t: t | {UP_A.replace("base_layer", "base_layer.base_layer"): t[UP_A]},
            "and no lora_B of model.layers.0.mlp.experts.base_layer.base_layer",
        ),
        (
            lambda t: (
                t | {n.replace("base_layer.", "base_layer.base_layer."): x for n, x in t.items() if "base_l" in n}
            ),
            "experts.base_layer.base_layer, whose parameter its config does not name as a target",
        ),
        (
            lambda t: t | {n.replace("base_layer", "9.w1"): x for n, x in t.items() if "base_layer" in n},
            "experts.9.w1, which a mixtral model does not have",
        ),
        (lambda t: t | {DOWN_A: t[DOWN_A] * float("nan")}, "lora_A.weight contains NaN or infinities"),
    ],
)
def test_malformed_tensors(change, words, good, mixtral, tmp_path):
    adapter = edit_tensors(copied(good, tmp_path / "adapter"), change)
    refused(adapter, mixtral[0], words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_parameters": ["down_proj", "gate.weight"]}, "whose parameter its config does not name as a target"),
        ({"target_parameters": ["down_proj", "gate_up_proj"]}, "gate.lora_A.weight, whose module its config does not"),
        ({"target_parameters": [3]}, "target_parameters must be a list of str"),
        ({"r": 3}, "rank and model require [15, 128] for 5 experts"),
        ({"rank_pattern": {}}, "base_layer.lora_A.weight is [20, 64]; rank and model require [10, 64] for 5 experts"),
    ],
)
def test_configs_that_do_not_fit(changes, words, good, mixtral, tmp_path):
    refused(edit_config(copied(good, tmp_path / "adapter"), **changes), mixtral[0], words)


def refused(adapter, model_folder, words):
    with pytest.raises(ConfigError) as error:
        check_files(adapter, model_folder)
    assert str(adapter) in error.value.message
    assert words in error.value.message
    assert "\n" not in error.value.message


def check_files(adapter, model_folder):
    files = AdapterFiles(adapter)
    pairs = files.pairs(load_config(model_folder))
    files.checked_data(files.digest(), pairs)


def test_ranks_are_those_of_an_expert(good, mixtral):
    """The rank limit applies to one expert's pair."""
    files, config = AdapterFiles(good), load_config(mixtral[0])
    assert {pair.rank for pair in files.pairs(config, 4)} == {2, 4}
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj has rank 4, and --max-lora-rank is 3"):
        files.pairs(config, 3)


def test_the_digest_covers_parameters(good, tmp_path):
    raw = json.loads((good / "adapter_config.json").read_text())
    changed = parse_adapter_config({**raw, "target_parameters": sorted(raw["target_parameters"])})
    assert changed.canonical() == parse_adapter_config(raw).canonical()
    fewer = parse_adapter_config({**raw, "target_parameters": raw["target_parameters"][1:]})
    assert fewer.canonical() != changed.canonical()


@given(data=st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_of_any_shape_are_read_or_refused(data, good, mixtral, tmp_path):
    """Any missing, renamed or misshapen tensor gives a fitting adapter or a one-line error."""
    tensors = load_file(good / "adapter_model.safetensors")
    adapter = copied(good, tmp_path / "adapter")
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensor = tensors.pop(name)
    kind = data.draw(st.sampled_from(["leave", "rename", "cut", "turn", "fold", "empty"]))
    if kind == "rename":
        words = ("experts.", "experts.base_layer.", "experts.base_layer.base_layer.", "experts.0.", "gate.", "w1.")
        old, new = (data.draw(st.sampled_from(words)) for _ in range(2))
        name = name.replace(old, new, 1)
    elif kind == "cut":
        size = data.draw(st.integers(0, tensor.numel() - 1))
        tensor = tensor.flatten()[:size].view(-1, *([1] * data.draw(st.integers(0, 2))))
    elif kind == "turn":
        tensor = tensor.T
    elif kind == "fold":
        tensor = tensor.reshape(2, -1)
    elif kind == "empty":
        tensor = tensor[:, :0]
    if kind != "leave":
        tensors[name] = tensor.contiguous()
    save_file({each: one.clone() for each, one in tensors.items()}, adapter / "adapter_model.safetensors")
    edit_config(
        adapter,
        target_parameters=data.draw(
            st.lists(st.sampled_from(["gate.weight", "down_proj", "gate_up_proj", "experts", ""]), max_size=4)
        ),
    )
    message = ""
    try:
        check_files(adapter, mixtral[0])
    except ConfigError as error:
        message = error.message
    assert "\n" not in message
