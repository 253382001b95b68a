"""A draft model in its model's slots: blocks of any size stay inside them, and passes are transformers' greedy ones."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace
from math import gcd

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from lab.testbed.draft_models import first_layers
from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags, ModelFlags
from pillion.engine.backends.backend import KVLayout, kv_layout
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.drafts.draft_chains import DraftChain, DraftChunk, DraftPlan, DraftShape
from pillion.engine.drafts.draft_loading import load_draft
from pillion.engine.drafts.draft_model import DraftModel, draft_blocks
from pillion.engine.load_model import load_model
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.errors import ConfigError
from pillion.settings.speculative_config import SpeculativeConfig
from tests.support.drafts import text_to_guess_for
from tests.support.families import make_model
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle, first_difference

BLOCK = 16


def layout(layers: int, heads: int = 2, head_dim: int = 16, dtype: str = "float32") -> KVLayout:
    return KVLayout("test", layers, heads, head_dim, BLOCK, dtype)


@pytest.mark.parametrize(
    ("layers", "blocks"),
    # 30 layers in groups of 30, 6 and 4, and one that leaves a remainder of 2.
    [(30, 1), (6, 5), (4, 5), (14, 1), (1, 30)],
)
def test_a_slot_is_filled_with_draft_blocks(layers: int, blocks: int) -> None:
    assert draft_blocks(layout(30), layout(layers)) == blocks


def test_draft_models_too_large_for_a_slot_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer layers or KV heads"):
        draft_blocks(layout(30), layout(31))
    with pytest.raises(ConfigError, match="4096 bytes per token, the model's 3968"):
        draft_blocks(layout(31, 1), layout(32, 1))


def test_a_gpus_blocks_are_powers_of_two() -> None:
    assert draft_blocks(layout(30), layout(5), max_block_tokens=128) == 4
    assert draft_blocks(layout(96), layout(2), max_block_tokens=128) == 8


@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 8), st.integers(1, 8))
def test_no_block_leaves_its_slot(main: int, draft: int, main_heads: int, draft_heads: int) -> None:
    outer, inner = layout(main, main_heads), layout(draft, draft_heads)
    try:
        blocks = draft_blocks(outer, inner)
    except ConfigError:
        assert 2 * inner.block_bytes - gcd(inner.block_bytes, outer.block_bytes) > outer.block_bytes
        return
    slot, size = outer.block_bytes, inner.block_bytes * blocks
    firsts = [-(-number * slot // size) * size for number in range(200)]
    assert all(slot * at <= first <= slot * (at + 1) - size for at, first in enumerate(firsts))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    folder = tmp_path_factory.mktemp("drafts")
    main = save_model(folder / "main", num_hidden_layers=7)
    return main, first_layers(main, folder / "draft", 2)


def flags(folder: pathlib.Path) -> DecodeFlags:
    return DecodeFlags(model=str(folder), dtype="float32", max_model_len=256, block_size=BLOCK, cpu_threads=1)


@pytest.fixture(scope="module")
def loaded(folders: tuple[pathlib.Path, pathlib.Path]) -> tuple[LoadedModel, DraftShape, DraftModel]:
    def on_torch(flags: DecodeFlags, threads: int) -> LoadedModel:
        prepared = prepare(flags)
        return LoadedModel(prepared, TorchBackend(prepared, flags.block_size, threads))

    main = on_torch(flags(folders[0]), 1)
    config = SpeculativeConfig(method="draft_model", model=str(folders[1]), num_speculative_tokens=4)
    shape, draft = load_draft(flags(folders[0]), config, main, 1, 256, on_torch)  # type: ignore[arg-type]
    return main, shape, draft


def chain_of(tokens: list[int], slots: list[int], shape: DraftShape) -> DraftChain:
    chain = DraftChain(-1, text_to_guess_for(tokens, BLOCK, 256), shape)
    chain.open(AdoptedTicket(2, (), tuple(slots)))
    return chain


def test_the_passes_are_greedy(
    loaded: tuple[LoadedModel, DraftShape, DraftModel], folders: tuple[pathlib.Path, pathlib.Path]
) -> None:
    main, shape, draft = loaded
    assert shape.block_size == 2 * BLOCK
    slot_bytes, num_slots = main.backend.layout.block_bytes, 12
    memory = bytearray(num_slots * slot_bytes)
    torch.frombuffer(memory, dtype=torch.float32).fill_(float("nan"))
    draft.bind_pool(memoryview(memory), num_slots)
    draw = np.random.default_rng(1)
    texts = [draw.integers(2, 250, length).tolist() for length in (70, 9, 30)]
    chains = [chain_of(text, slots, shape) for text, slots in zip(texts, ([11, 3, 5], [7], [2]), strict=True)]
    # The first text has read all 50 tokens; the second has fewer draft tokens, the third none.
    assert draft.run(DraftPlan((DraftChunk(chains[0], 0, 50, 0),))) is not None
    scheduled = (DraftChunk(chains[0], 50, 20, 4), DraftChunk(chains[1], 0, 9, 2), DraftChunk(chains[2], 0, 30, 0))
    draft_tokens = draft.run(DraftPlan(scheduled))
    assert draft_tokens is not None
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folders[1]))
    for text, found, count in zip(texts, draft_tokens, (4, 2, 0), strict=True):
        assert len(found) == count
        if count:
            assert not first_difference(oracle.greedy(text, count), found.tolist(), 1e-3)
    rows = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, -1)
    touched = [at for at in range(num_slots) if not rows[at].view(torch.float32).isnan().all()]
    assert touched == [2, 3, 5, 7, 11]
    assert draft.seconds_per_token(2) > 0


def test_a_failed_pass_drafts_nothing(loaded: tuple[LoadedModel, DraftShape, DraftModel]) -> None:
    _, shape, draft = loaded
    assert draft.run(DraftPlan((DraftChunk(chain_of([500, 1], [3], shape), 0, 2, 1),))) is None


def test_another_tokenizer_is_refused_by_its_ids(
    folders: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    other = save_model(tmp_path / "other", marks=("<tool>",))
    main = load_model(replace(flags(folders[0]), cpu_kernels="torch"), 1)
    config = SpeculativeConfig(method="draft_model", model=str(other), num_speculative_tokens=4)
    with pytest.raises(ConfigError, match=r"draft model .*other: its tokenizer differs .* in 1 ids, e.g. 258"):
        load_draft(flags(folders[0]), config, main, 1, 256, load_model)
    # Another form of the same file is no difference.
    text = json.loads((folders[0] / "tokenizer.json").read_text())
    (folders[1] / "tokenizer.json").write_text(json.dumps(text, indent=3))
    config = replace(config, model=str(folders[1]))
    shape, _ = load_draft(flags(folders[0]), config, main, 1, 256, load_model)
    assert shape.max_model_len == 256


def test_a_missing_draft_model_is_named_and_a_hybrid_one_refused(
    folders: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    prepared = prepare(ModelFlags(model=str(folders[0]), dtype="float32"))
    assert kv_layout(prepared, BLOCK).num_layers == 7
    config = SpeculativeConfig(method="draft_model", model="/nowhere", num_speculative_tokens=4)
    main = LoadedModel(prepared, TorchBackend(prepared, BLOCK, 1))
    with pytest.raises(ConfigError, match="--speculative-config: draft model /nowhere: "):
        load_draft(flags(folders[0]), config, main, 1, 256, load_model)
    config = replace(config, model=str(make_model(tmp_path / "hybrid", HYBRIDS["lfm2"])[0]))
    with pytest.raises(ConfigError, match=r"draft model .*hybrid: its layers have recurrent states"):
        load_draft(flags(folders[0]), config, main, 1, 256, load_model)
