"""EAGLE-3 heads on a GPU: draft tokens are those of a reference, steps return the inputs of layers, and outputs are
those without a head. Without a GPU, Triton's interpreter computes."""

from __future__ import annotations

# isort: on
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.eagle_heads import save_head
from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags, ModelFlags
from pillion.engine.backends.gpu.gpu_graphs import StepGraphs
from pillion.engine.backends.gpu.gpu_loading import limits_of
from pillion.engine.backends.host_backend import rows_of_states, states_of_rows
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.backends.step_memory import head_bytes
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.drafts.draft_chains import DraftChunk, DraftPlan, DraftShape
from pillion.engine.drafts.eagle_chains import EagleChain
from pillion.engine.drafts.eagle_config import load_eagle_config
from pillion.engine.drafts.eagle_head import EagleModel, TorchEagle, eagle_layout
from pillion.engine.drafts.eagle_weights import load_eagle_weights
from pillion.engine.drafts.gpu_eagle import GpuEagle, load_gpu_eagle
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.kernels.step import SamplingRows, StepBatch
from pillion.settings.speculative_config import SpeculativeConfig
from pillion.types import SamplingParams
from tests.support.drafts import text_to_guess_for
from tests.support.eagle_reference import EagleReference
from tests.support.families import tokens_of

# isort: off  (before the kernels)
from tests.support.gpu_model import MAX_SEQS, MAX_TOKENS, FakeDevicePool, GpuDriver, gpu_backend, make_family
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")
BLOCK, SLOTS = 16, 16
COLD = {"temperature": 0.0}


@pytest.fixture(scope="module")
def main(own_cache, tmp_path_factory):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_model(tmp_path_factory.mktemp("eagle") / "main", num_hidden_layers=5, head_dim=16, **sizes)


def flags_of(folder, **flags):
    sizes = {"max_model_len": 128, "max_num_batched_tokens": MAX_TOKENS, "max_num_seqs": MAX_SEQS}
    return DecodeFlags(model=str(folder), device="cuda", block_size=BLOCK, **sizes, **{"dtype": "float32", **flags})


def load(folder, head_folder, **flags):
    """A model on the GPU, its head and the head's shape, as in draft_loading.py."""
    made = flags_of(folder, **flags)
    prepared = prepare(made)
    backend, head = gpu_backend(prepared, BLOCK), load_eagle_config(head_folder, load_config(folder))
    # A slot contains BLOCK tokens of the model's five layers. Blocks of the head, which has one layer, have twice as
    # many tokens; four times as many would not fit behind the head's offset in a slot.
    layout = eagle_layout(head, 2 * BLOCK, prepared.dtype)
    limits = replace(limits_of(made, prepared), num_speculative_tokens=3)
    own = load_gpu_eagle(made, head_folder, head, layout, backend, limits)
    shape = DraftShape(bytes(32), layout.block_size, 258, 128, 3, MAX_TOKENS, reads_states=True)
    return backend, shape, EagleModel(own, backend.layout.block_bytes, 258)


def greedy_rows(count):
    return SamplingRows.of([SamplingParams(**COLD)] * count, [0] * count, [0] * count)


def bind(backend, drafts):
    pool = FakeDevicePool(SLOTS * backend.layout.block_bytes)
    backend.bind_pool(pool, SLOTS)
    drafts.bind_pool(pool, SLOTS)
    for one in (backend, drafts.backend):
        one.warm_up(MAX_TOKENS)


def run_text(backend, chain, slots, start, end, *, keep=True):
    """Compute these tokens with the model, and pass the states to the head."""
    batch = StepBatch(
        token_ids=chain.sequence.tokens(start, end),
        positions=np.arange(start, end, dtype=np.int32),
        query_starts=np.array([0, end - start], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=np.array([slots], np.int32),
        sample_rows=np.array([end - start - 1], np.int32),
    )
    states = backend.launch(batch, (), greedy_rows(1)).wait().states
    if keep:
        chain.keep(start, states)


def chain_of(tokens, shape, slots, **sampling):
    chain = EagleChain(-1, text_to_guess_for(tokens, BLOCK, 128, SamplingParams(**{**COLD, **sampling})), shape)
    for slot in slots:
        chain.add_slot(slot)
    return chain


def draft(drafts, *scheduled):
    found = drafts.run(DraftPlan(scheduled))
    for chunk, tokens in zip(scheduled, found, strict=True):
        chunk.chain.advance(chunk.start + chunk.count, tokens)
    return [tokens.tolist() for tokens in found]


HEADS = {
    "speculators": {"aux_hidden_state_layers": (0, 2, 4)},
    "normed residual": {
        "norm_before_residual": True,
        "aux_hidden_state_layers": (1, 4),
        "embedding": True,
        "model_type": "qwen3",
    },
    "whole vocabulary": {"draft_vocab_size": 258, "original": True, "aux_hidden_state_layers": (3, 1, 0)},
}


def states_of(model, text, layers):
    """The inputs of these layers in transformers, side by side."""
    with torch.inference_mode():
        found = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([found[layer][0] for layer in layers], -1)


@pytest.mark.parametrize("kind", HEADS)
def test_draft_tokens_match_the_reference(kind, main, tmp_path):
    folder = save_head(tmp_path / "head", main, **HEADS[kind])
    backend, shape, drafts = load(main, folder)
    bind(backend, drafts)
    reference = EagleReference(folder, AutoModelForCausalLM.from_pretrained(main))
    draw = np.random.default_rng(1)
    texts = [draw.integers(2, 250, length).tolist() for length in (41, 12)]
    first, second = chain_of(texts[0], shape, [12, 15]), chain_of(texts[1], shape, [13])
    run_text(backend, first, [0, 1, 2], 0, 30)
    assert draft(drafts, DraftChunk(first, 0, 30, 0)) == [[]]
    run_text(backend, first, [0, 1, 2], 30, 40)
    # The beginning of this text was computed elsewhere.
    run_text(backend, second, [4], 0, 4, keep=False)
    run_text(backend, second, [4], 4, 11)
    found = draft(drafts, DraftChunk(second, 0, 7, 2), DraftChunk(first, 30, 10, 3))
    assert found == [reference.draft_tokens(texts[1], 2, begin=4), reference.draft_tokens(texts[0], 3)]
    # The next tokens differ from the draft: the states of draft tokens are overwritten.
    for token in (7, 9):
        first.sequence.append(token)
    run_text(backend, first, [0, 1, 2], 40, 42)
    first.settle()
    assert draft(drafts, DraftChunk(first, 40, 2, 3)) == [reference.draft_tokens([*texts[0], 7, 9], 3)]
    drafts.backend.close()
    backend.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_keep_the_inputs_of_layers(dtype, main):
    """A step returns the inputs of all its rows, of chunks and of decodes, also if it is launched ahead or samples
    nothing."""
    prepared = prepare(ModelFlags(model=str(main), dtype=dtype))
    backend = gpu_backend(prepared)
    backend.set_aux_hidden_state_layers((4, 0, 2))
    driver = GpuDriver(prepared, num_slots=12, backend=backend)
    texts = tokens_of(22, 2), tokens_of(6, 3)
    model = AutoModelForCausalLM.from_pretrained(main, dtype=getattr(torch, dtype)).eval()
    wanted = [states_of(model, text, (4, 0, 2)) for text in texts]
    one, two = driver.sequences.add(2)
    first = backend.launch(driver.sequences.step([(one, texts[0][:21])], sample=()), (), SamplingRows.of([], [], []))
    parts = [(one, texts[0][21:]), (two, texts[1])]
    second = backend.launch(driver.sequences.step(parts), (), greedy_rows(2))
    # The interpreter truncates bfloat16, and each layer adds to the error.
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.1, "atol": 0.3}
    for step, expected in ((first, wanted[0][:21]), (second, torch.cat((wanted[0][21:], wanted[1])))):
        states = rows_of_states(step.wait().states)
        assert states.dtype == getattr(torch, dtype)
        torch.testing.assert_close(states, expected, **near)


SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    {"temperature": 1.5, "seed": 4, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_draft_tokens_match_torch(dtype, main, tmp_path):
    """Also sampled ones, from the same states: three streams, which draft 3 tokens, 1 and 2."""
    folder = save_head(tmp_path / "head", main, aux_hidden_state_layers=(0, 2, 4))
    backend, shape, drafts = load(main, folder, dtype=dtype)
    head, width = load_eagle_config(folder, load_config(main)), 3 * 32
    weights = load_eagle_weights(folder, head, backend.model.weights["embedding"].cpu())
    host = EagleModel(TorchEagle(head, weights, drafts.backend.layout, 128), backend.layout.block_bytes, 258)
    bind(backend, drafts)
    memory = torch.full((SLOTS * backend.layout.block_bytes,), 0xFF, dtype=torch.uint8).numpy()
    host.bind_pool(memoryview(memory), SLOTS)
    draw, found = np.random.default_rng(3), []
    texts = [draw.integers(2, 250, length).tolist() for length in (20, 9, 3)]
    states = [torch.from_numpy(draw.standard_normal((len(text) - 1, width))) for text in texts]
    for one in (drafts, host):
        chains = [chain_of(texts[at], shape, [at], **SAMPLINGS[at]) for at in range(3)]
        for chain, rows in zip(chains, states, strict=True):
            chain.keep(0, states_of_rows(rows.to(getattr(torch, dtype))))
        counts = zip(chains, (3, 1, 2), strict=True)
        found.append(draft(one, *(DraftChunk(chain, 0, chain.end, count) for chain, count in counts)))
    assert [len(tokens) for tokens in found[0]] == [3, 1, 2]
    assert found[0] == found[1]


def test_a_pass_is_launched_before_the_tokens_of_the_one_before_are_known(main, tmp_path, monkeypatch):
    backend, shape, drafts = load(main, save_head(tmp_path / "head", main, aux_hidden_state_layers=(0, 2, 4)))
    bind(backend, drafts)
    chain, seen, launch = chain_of([*range(2, 9)], shape, [3]), [], drafts.backend.launch

    def launching(batch, copies, rows):
        step = launch(batch, copies, rows)
        seen.append(batch.token_ids.tolist())
        return SimpleNamespace(wait=lambda: seen.append("known") or step.wait())

    monkeypatch.setattr(drafts.backend, "launch", launching)
    chain.keep(0, np.ones((6, 3 * 32), np.float32))
    draft(drafts, DraftChunk(chain, 0, 6, 3))
    assert seen == [[*range(3, 9)], [-1], "known", [-1], "known", "known"]


@pytest.mark.parametrize("family", ["gemma4", pytest.param("mixtral", marks=pytest.mark.long)])
def test_layer_inputs_are_kept_even_if_nothing_is_sampled(family, tmp_path, monkeypatch):
    """The last layers of a model, which write no keys and values, run only for their inputs if nothing is sampled."""
    monkeypatch.setattr(StepGraphs, "_pads_without_graph", False)
    folder, flags = make_family(tmp_path / "model", family, hidden_size=32, intermediate_size=32)
    prepared = prepare(flags)
    layers = 0, load_config(folder).num_layers - 1
    on_torch, text = TorchBackend(prepared, BLOCK, 1), tokens_of(12, 2)
    made = gpu_backend(prepared)
    found = []
    for backend, driver in ((made, GpuDriver), (on_torch, BackendDriver)):
        backend.set_aux_hidden_state_layers(layers)
        driven = driver(prepared, num_slots=8, backend=backend)
        (one,) = driven.sequences.add()
        step = backend.launch(driven.sequences.step([(one, text)], sample=()), (), SamplingRows.of([], [], []))
        found.append(step.wait().states)
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)


def test_the_memory_of_a_head_is_estimated(main, tmp_path):
    backend, _, drafts = load(main, save_head(tmp_path / "head", main, aux_hidden_state_layers=(0, 2, 4)))
    model = drafts.backend.model
    owned = [one for one in (*vars(model).values(), backend.model.states) if isinstance(one, torch.Tensor)]
    kept = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in owned}
    told = head_bytes(model.config, 3 * 32, "float32", MAX_TOKENS, MAX_SEQS)
    assert told / 4 < sum(kept.values()) <= told


def test_a_worker_on_a_gpu_loads_a_head(main, tmp_path):
    """In one process, if the kernels support the head's heads."""
    pytest.importorskip("xxhash", reason="loading by a worker's flags imports the KV store")
    from pillion.engine.drafts.draft_loading import load_draft

    folder = save_head(tmp_path / "head", main, aux_hidden_state_layers=(0, 2, 4))
    loaded = LoadedModel(prepare(flags_of(main)), gpu_backend(prepare(flags_of(main)), BLOCK))

    def load_by_flags(**flags):
        about = SpeculativeConfig(method="eagle3", model=str(folder), num_speculative_tokens=3)
        return load_draft(flags_of(main, **flags), about, loaded, 1, MAX_TOKENS, None)

    shape, drafts = load_by_flags()
    assert isinstance(drafts.backend, GpuEagle)
    assert (shape.block_size, shape.reads_states) == (2 * BLOCK, True)
    assert loaded.backend.model.aux_hidden_state_layers == (0, 2, 4)
    with pytest.raises(ConfigError, match="head: on GPUs EAGLE-3 heads run in workers of one process, not of 2"):
        load_by_flags(tensor_parallel_size=2)
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["head_dim"] = 24
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"head: the GPU kernels attend heads of 16, 32, .* not 24"):
        load_by_flags()
