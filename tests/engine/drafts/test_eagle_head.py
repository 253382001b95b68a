"""EAGLE-3 heads over states of real backends: drafts match a reference, and unsuitable heads are rejected."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lab.testbed.eagle_heads import save_head, write_head
from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags
from pillion.engine.backends.host_backend import HostBackend
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.drafts import eagle_chains
from pillion.engine.drafts.cpu_eagle import CpuEagle
from pillion.engine.drafts.draft_chains import DraftChunk, DraftPlan, DraftShape
from pillion.engine.drafts.draft_loading import load_draft
from pillion.engine.drafts.draft_model import DraftModel
from pillion.engine.drafts.eagle_chains import EagleChain
from pillion.engine.drafts.eagle_head import TorchEagle
from pillion.engine.load_model import load_model
from pillion.errors import ConfigError
from pillion.kernels.step import SamplingRows, StepBatch
from pillion.settings.speculative_config import SpeculativeConfig
from pillion.types import SamplingParams
from tests.support.cpu_model import cpu_backend, needs_kernels
from tests.support.drafts import text_to_guess_for
from tests.support.eagle_reference import EagleReference

BLOCK, SLOTS = 16, 24


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("eagle") / "main", num_hidden_layers=7, tie_word_embeddings=False)


def flags(folder: pathlib.Path) -> DecodeFlags:
    return DecodeFlags(model=str(folder), dtype="float32", max_model_len=512, block_size=BLOCK, cpu_threads=1)


def on(kernels: str, folder: pathlib.Path) -> LoadedModel:
    prepared = prepare(flags(folder))
    backend = TorchBackend(prepared, BLOCK, 1) if kernels == "torch" else cpu_backend(prepared, BLOCK)
    return LoadedModel(prepared, backend)


def configured(head: pathlib.Path) -> SpeculativeConfig:
    return SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=4)


def load(loaded: LoadedModel, main: pathlib.Path, head: pathlib.Path) -> tuple[DraftShape, DraftModel]:
    return load_draft(flags(main), configured(head), loaded, 1, 256, load_model)


def greedy_rows(count: int) -> SamplingRows:
    return SamplingRows.of([SamplingParams(temperature=0.0)] * count, [0] * count, [0] * count)


@dataclass
class Text:
    """A text on the main model, and its head's chain."""

    backend: HostBackend
    chain: EagleChain
    slots: list[int]

    def run(self, start: int, end: int, *, keep: bool = True) -> None:
        """Compute these tokens by the main model, and pass the states to the head."""
        tokens = self.chain.sequence.tokens(0, end)
        batch = StepBatch(
            token_ids=tokens[start:],
            positions=np.arange(start, end, dtype=np.int32),
            query_starts=np.array([0, end - start], np.int32),
            context_lens=np.array([end], np.int32),
            block_tables=np.array([self.slots], np.int32),
            sample_rows=np.array([end - start - 1], np.int32),
        )
        states = self.backend.launch(batch, (), greedy_rows(1)).wait().states
        assert states is not None
        if keep:
            self.chain.keep(start, states)


def text_of(backend: HostBackend, shape: DraftShape, tokens: Sequence[int], slots: list[int], own: list[int]) -> Text:
    chain = EagleChain(-1, text_to_guess_for(tokens, BLOCK, 512), shape)
    for slot in own:
        chain.add_slot(slot)
    return Text(backend, chain, slots)


def draft_tokens_of(model: DraftModel, *scheduled: DraftChunk) -> list[list[int]]:
    """Run a plan like a scheduler."""
    found = model.run(DraftPlan(scheduled))
    assert found is not None
    for chunk, draft_tokens in zip(scheduled, found, strict=True):
        chunk.chain.advance(chunk.start + chunk.count, draft_tokens)
    return [draft_tokens.tolist() for draft_tokens in found]


def pool_for(backend: HostBackend, head: DraftModel) -> None:
    memory = torch.full((SLOTS * backend.layout.block_bytes // 4,), float("nan")).numpy()
    backend.bind_pool(memoryview(memory), SLOTS)
    head.bind_pool(memoryview(memory), SLOTS)


HEADS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "normed residual": {"norm_before_residual": True, "aux_hidden_state_layers": (0, 3, 6)},
    "qwen3": {"model_type": "qwen3", "draft_vocab_size": 258},
    "original": {"original": True},
    "own embedding, two states": {"embedding": True, "aux_hidden_state_layers": (5, 1), "original": True},
}


@needs_kernels
@pytest.mark.parametrize("kernels", ["torch", "cpu"])
@pytest.mark.parametrize("kind", HEADS)
def test_draft_tokens_match_the_reference(kind: str, kernels: str, main: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = save_head(tmp_path / "head", main, **HEADS[kind])
    loaded = on(kernels, main)
    shape, head = load(loaded, main, folder)
    backend = loaded.backend
    assert isinstance(backend, HostBackend)
    assert isinstance(head.backend, CpuEagle if kernels == "cpu" else TorchEagle)
    # The KV of seven layers holds seven blocks of a head's single layer, minus blocks across slot ends.
    assert shape.block_size == BLOCK * 7
    pool_for(backend, head)
    head.backend.warm_up(8)
    reference = EagleReference(folder, AutoModelForCausalLM.from_pretrained(main))
    draw = np.random.default_rng(1)
    texts = [draw.integers(2, 250, length).tolist() for length in (150, 40)]
    first = text_of(backend, shape, texts[0], [*range(12)], [20, 21])
    second = text_of(backend, shape, texts[1], [12, 13, 14], [22])
    # A prompt in two steps with passes between them, and one whose first tokens were computed elsewhere.
    first.run(0, 70)
    assert draft_tokens_of(head, DraftChunk(first.chain, 0, 70, 0)) == [[]]
    first.run(70, 149)
    second.run(0, 25, keep=False)
    second.run(25, 39)
    found = draft_tokens_of(head, DraftChunk(first.chain, 70, 79, 4), DraftChunk(second.chain, 0, 14, 2))
    assert found == [reference.draft_tokens(texts[0], 4), reference.draft_tokens(texts[1], 2, begin=25)]
    # Other tokens follow than were drafted: states of draft tokens are overwritten.
    for token in (7, 9):
        first.chain.sequence.append(token)
    first.run(149, 151)
    first.chain.settle()
    assert not len(first.chain.draft_tokens)
    assert draft_tokens_of(head, DraftChunk(first.chain, 149, 2, 3)) == [reference.draft_tokens([*texts[0], 7, 9], 3)]
    head.backend.close()
    backend.close()


@needs_kernels
def test_states_are_the_inputs_of_layers_and_change_no_bit(main: pathlib.Path) -> None:
    plain, keeping = on("cpu", main).backend, on("cpu", main).backend
    assert isinstance(plain, HostBackend)
    assert isinstance(keeping, HostBackend)
    keeping.set_aux_hidden_state_layers((2, 6, 0))
    keeping.bind_adapters(1, 4)
    tokens = np.random.default_rng(2).integers(2, 250, 21).astype(np.int32)
    batch = StepBatch(
        token_ids=tokens,
        positions=np.arange(21, dtype=np.int32),
        query_starts=np.array([0, 21], np.int32),
        context_lens=np.array([21], np.int32),
        block_tables=np.array([[3, 1]], np.int32),
        sample_rows=np.array([4, 20], np.int32),
    )
    logits = []
    for backend in (plain, keeping):
        backend.bind_pool(memoryview(bytearray(4 * backend.layout.block_bytes)), 4)
        logits.append(backend.forward(batch).clone())
    assert torch.equal(*logits)
    assert plain.launch(batch, (), greedy_rows(2)).wait().states is None
    model = AutoModelForCausalLM.from_pretrained(main)
    hidden = model(torch.from_numpy(tokens[None].astype(np.int64)), output_hidden_states=True).hidden_states
    wanted = torch.cat([hidden[layer][0] for layer in (2, 6, 0)], -1)
    for adapters in (None, np.array([-1], np.int32)):
        step = replace(batch, adapters=adapters)
        states = keeping.launch(step, (), greedy_rows(2)).wait().states
        assert states is not None
        assert torch.equal(keeping.forward(step), logits[0])
        torch.testing.assert_close(torch.from_numpy(states), wanted, rtol=1e-3, atol=1e-3)
    plain.close()
    keeping.close()


def test_a_chain_restarts_after_a_gap_and_after_too_many_states(
    main: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_chains, "MAX_STATES_TOKENS", 256)
    loaded = on("torch", main)
    shape, _ = load(loaded, main, save_head(tmp_path / "head", main))
    assert isinstance(loaded.backend, HostBackend)
    tokens = [*range(2, 250), *range(2, 250)]
    chain = text_of(loaded.backend, shape, tokens, [], []).chain
    rows = np.arange(len(tokens), dtype=np.float32)[:, None]
    chain.keep(10, rows[10:20])
    assert (chain.begin, chain.states(10).ravel().tolist()) == (10, [*range(10, 20)])
    chain.keep(20, rows[20:30])
    chain.advance(4, np.empty(0, np.int32))
    assert (chain.begin, chain.states(16).ravel().tolist()) == (10, [*range(14, 30)])
    assert chain.tokens(4, 6).tolist() == tokens[15:17]
    chain.keep(40, rows[40:60])
    assert (chain.begin, chain.num_computed, len(chain.states(99))) == (40, 0, 20)
    chain.keep(60, rows[60:400])
    assert (chain.begin, chain.num_computed) == (272, 0)
    assert chain.states(999).ravel().tolist() == [*range(272, 400)]
    assert not chain.is_whole
    chain.keep(400, rows[400 : len(tokens) - 1])
    assert chain.is_whole


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash', not 'eagle3'"),
    "an unknown key": ({"fc_norm": True}, "config.json has fc_norm = True, which is not supported"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "the inputs of layer 7; the model has 7 layers"),
    "no list": ({"eagle_aux_hidden_state_layer_ids": "all"}, "must be a list of layers, not 'all'"),
    "states": ({"target_hidden_size": 128}, "states of 128 values, but the model's have 64"),
    "draft vocabulary": ({"draft_vocab_size": 400}, "draft_vocab_size 400 is larger than the vocabulary, 258"),
    "no layer": ({"transformer_layer_config": None}, "transformer_layer_config must be an object"),
}
BAD_LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 300}, "a vocabulary of 300 tokens, the model has 258"),
    "hidden": ({"hidden_size": 32}, "states of 32 values, but the model's have 64"),
    "kind": ({"model_type": "gemma2"}, "its layer has model_type 'gemma2'"),
    "two layers": ({"num_hidden_layers": 2}, "it has 2 layers; only heads of one layer are supported"),
    "option": ({"alibi": True}, "config.json has alibi = True"),
    "inner": ({"intermediate_size": 96}, r"mlp.gate_proj.weight is \[128, 64\], but config.json requires \[96, 64\]"),
}


@pytest.mark.parametrize("name", [*BAD_CONFIGS, *BAD_LAYERS])
def test_a_config_that_does_not_fit_is_refused(name: str, main: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = save_head(tmp_path / "head", main)
    config = json.loads((folder / "config.json").read_text())
    change, words = (BAD_CONFIGS | BAD_LAYERS)[name]
    (config if name in BAD_CONFIGS else config["transformer_layer_config"]).update(change)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"--speculative-config: draft model .*head: .*" + words):
        load(on("torch", main), main, folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d2t": None}, "it lacks d2t"),
        ({"fc.weight": None, "norm.weight": None}, "it lacks fc.weight, norm.weight"),
        ({"fc.weight": torch.zeros(64, 128)}, r"its fc.weight is \[64, 128\], but config.json requires \[64, 192\]"),
        (
            {"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)},
            "it contains layers.1.mlp.up_proj.weight, which an EAGLE-3",
        ),
        ({"d2t": torch.full((200,), 100)}, "d2t maps to tokens outside of the vocabulary of 258"),
        ({"d2t": torch.zeros(200)}, "its d2t is F32; only I64, I32 are supported"),
        ({"norm.weight": torch.full((64,), float("nan"))}, "its norm.weight contains NaN"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], words: str, main: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = save_head(tmp_path / "head", main)
    tensors = load_file(folder / "model.safetensors") | {key: one for key, one in change.items() if one is not None}
    kept = {key: one for key, one in tensors.items() if key not in change or change[key] is not None}
    write_head(folder, json.loads((folder / "config.json").read_text()), kept)
    with pytest.raises(ConfigError, match=words):
        load(on("torch", main), main, folder)


def test_invalid_heads_are_refused(main: pathlib.Path, tmp_path: pathlib.Path) -> None:
    loaded = on("torch", main)
    with pytest.raises(ConfigError, match=r"it is not an EAGLE-3 head: config.json has neither"):
        load(loaded, main, main)
    with pytest.raises(ConfigError, match="nowhere is neither a local folder nor a hub id"):
        load(loaded, main, pathlib.Path("/nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither speculators_model_type nor draft_vocab_size"):
        load(loaded, main, tmp_path)
