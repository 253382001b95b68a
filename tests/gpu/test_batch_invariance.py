"""With --batch-invariant a token's bits depend only on its sequence: not on other sequences in the step, on how its
text was cut into steps, on cached blocks, or on recomputation."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver, gpu_backend  # isort: skip  (before the kernels)

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.kernels.gpu.attention.gpu_attention_plan import BEGIN, END, ITEM_WORDS, PARTIAL
from pillion.kernels.gpu.attention.latent_attention import LatentAttention
from pillion.kernels.gpu.attention.paged_attention import PagedAttention
from pillion.kernels.gpu.products.head_product import head_product
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.gpu import DEVICE, NATIVE, add_up_in_one_order, rounded

pytestmark = pytest.mark.usefixtures("own_cache")

BLOCK_SIZE, KV_HEADS, GROUP, WIDTH = 16, 1, 2, 16
# In float32, kernels have parts of 64 tokens, and the window begins inside of one.
LENGTHS, WINDOW = (140, 30, 5), 100
RANK, ROTARY, HEADS = 32, 16, 2
MAX_TOKENS = 512


@dataclass(frozen=True)
class AttendedTexts:
    """Texts whose keys and values are in a pool, and whose tokens have the same queries in every step."""

    attention: Any
    tables: np.ndarray
    queries: list[torch.Tensor]
    more: dict[str, Any]

    @classmethod
    def paged(cls, window: int = 0, sinks: bool = False, width: int = WIDTH, dtype: Any = torch.float32, **more: Any):
        generator = torch.Generator().manual_seed(0)
        tables, slots = _tables()
        pool = torch.randn((slots, 1, 2, KV_HEADS, BLOCK_SIZE, width), generator=generator).to(dtype)
        heads = KV_HEADS * GROUP
        attention = PagedAttention(
            pool.to(DEVICE), dtype=dtype, num_heads=heads, num_kv_heads=KV_HEADS, head_dim=width,
            block_size=BLOCK_SIZE, num_layers=1, scale=width**-0.5, max_tokens=MAX_TOKENS, max_seqs=64,
            max_context_blocks=tables.shape[1], windows=(window,), sinks=sinks, **{"invariant": True, **more},
        )  # fmt: skip
        queries = [torch.randn((count, heads, width), generator=generator).to(dtype).to(DEVICE) for count in LENGTHS]
        scores = {"sinks": torch.linspace(-1.0, 2.0, heads, device=DEVICE)} if sinks else {}
        return cls(attention, tables, queries, {"window": window, **scores})

    @classmethod
    def latents(cls):
        generator = torch.Generator().manual_seed(0)
        tables, slots = _tables()
        pool = torch.randn((slots, 1, 1, 1, BLOCK_SIZE, RANK + ROTARY), generator=generator)
        attention = LatentAttention(
            pool.to(DEVICE), dtype=torch.float32, num_heads=HEADS, rank=RANK, rotary=ROTARY, block_size=BLOCK_SIZE,
            num_layers=1, scale=0.2, max_tokens=MAX_TOKENS, max_seqs=64, max_context_blocks=tables.shape[1],
            invariant=True,
        )  # fmt: skip
        queries = [torch.randn((count, HEADS, RANK + ROTARY), generator=generator).to(DEVICE) for count in LENGTHS]
        return cls(attention, tables, queries, {})

    def step(self, *parts: tuple[int, int, int]) -> list[torch.Tensor]:
        """Attend tokens ``begin`` to ``end`` - 1 of texts, each (text, begin, end); return the rows of each."""
        counts = [end - begin for _, begin, end in parts]
        batch = SimpleNamespace(
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.array([end for _, _, end in parts], np.int32),
            block_tables=self.tables[[text for text, _, _ in parts]],
        )
        plan = self.attention.planner.plan(batch)
        queries = torch.cat([self.queries[text][begin:end] for text, begin, end in parts])
        width = queries.shape[1] * (RANK if isinstance(self.attention, LatentAttention) else queries.shape[2])
        out = torch.empty((len(queries), width), dtype=queries.dtype, device=DEVICE)
        record = torch.from_numpy(plan.record).to(DEVICE)
        self.attention.attend(0, queries, out, record, with_chunks=plan.with_chunks, **self.more)
        return list(out.split(counts))

    def items(self, *parts: tuple[int, int, int]) -> np.ndarray:
        """Return the items of decodes of such a step."""
        planner, (window,) = self.attention.planner, self.attention.planner.windows
        batch = SimpleNamespace(
            query_starts=np.arange(len(parts) + 1, dtype=np.int32),
            context_lens=np.array([end for _, _, end in parts], np.int32),
            block_tables=self.tables[[text for text, _, _ in parts]],
        )
        record = planner.plan(batch).record
        starts = record[planner.starts_at(window, False) :]
        return record[starts[0] : starts[planner.decode.programs]].reshape(-1, ITEM_WORDS)


def _tables() -> tuple[np.ndarray, int]:
    """Return block tables of all texts, in a scrambled order, and the number of slots of their pool."""
    width = -(-max(LENGTHS) // BLOCK_SIZE)
    slots = 1 + width * len(LENGTHS)
    scrambled = np.random.default_rng(0).permutation(np.arange(1, slots)).astype(np.int32)
    return scrambled.reshape(len(LENGTHS), width), slots


def random_steps(seed: int):
    """Yield steps in which all texts are computed side by side, each cut anywhere, in a changing order."""
    numbers = np.random.default_rng(seed)
    begins = [0] * len(LENGTHS)
    while any(begin < length for begin, length in zip(begins, LENGTHS, strict=True)):
        parts = []
        for text in numbers.permutation(len(LENGTHS)).tolist():
            left = LENGTHS[text] - begins[text]
            if left and numbers.random() < 0.7:
                count = min(left, int(numbers.choice([1, 9, 60])))
                parts.append((text, begins[text], begins[text] + count))
                begins[text] += count
        if parts:
            yield parts


CASES = {
    "heads": AttendedTexts.paged,
    "window": lambda: AttendedTexts.paged(WINDOW),
    "chunks of positions": lambda: AttendedTexts.paged(-WINDOW),
    "sinks": lambda: AttendedTexts.paged(sinks=True),
    "sinks in a window": lambda: AttendedTexts.paged(WINDOW, sinks=True),
    "latents": AttendedTexts.latents,
}
if NATIVE:
    # Decodes and chunks have tiles with other rows and warps, whose bits only a device can compare.
    for width in (64, 128, 256, 512):
        CASES[f"heads of {width} in bfloat16"] = lambda width=width: AttendedTexts.paged(
            0, False, width, torch.bfloat16
        )


SHORT = ("sinks in a window", "latents")


@pytest.mark.parametrize(
    "case", [case if NATIVE or case in SHORT else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_a_row_has_the_same_attention_in_every_step(case, monkeypatch):
    add_up_in_one_order(monkeypatch)
    texts = CASES[case]()
    wanted = [texts.step((text, 0, length))[0] for text, length in enumerate(LENGTHS)]
    for seed in range(10 if NATIVE else 1):
        for parts in random_steps(seed):
            for (text, begin, end), found in zip(parts, texts.step(*parts), strict=True):
                assert torch.equal(found, wanted[text][begin:end]), (seed, parts, text)


def test_fixed_parts_change_only_rounding(monkeypatch):
    """Rows are those of kernels that cut a text anywhere."""
    add_up_in_one_order(monkeypatch)
    parts = [(0, 139, 140), (1, 0, 30), (2, 4, 5)]
    for options in ({}, {"window": WINDOW, "sinks": True}, {"window": -WINDOW}, {"width": 320}):
        found, wanted = (AttendedTexts.paged(**options, invariant=flag).step(*parts) for flag in (True, False))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, **rounded(torch.float32, 8))


def test_a_lone_text_is_split_and_batched_ones_are_not():
    """A long text alone is cut at every part; one of many is not, and its program joins its parts."""
    texts = AttendedTexts.paged()
    alone = texts.items((0, 139, 140))
    assert (alone[:, PARTIAL] >= 0).all()
    assert sorted({(begin, end) for begin, end in alone[:, [BEGIN, END]].tolist()}) == [(0, 64), (64, 128), (128, 140)]
    beside = texts.items(*[(0, 139, 140)] * 40)
    assert (beside[:, PARTIAL] < 0).all()
    assert {(begin, end) for begin, end in beside[:, [BEGIN, END]].tolist()} == {(0, 140)}


def test_merging_parts_matches_a_single_program(monkeypatch):
    """Three parts of a text alone, joined by a merge, and of the text among many, joined by their programs."""
    add_up_in_one_order(monkeypatch)
    for texts in (AttendedTexts.paged(sinks=True), AttendedTexts.latents()):
        (alone,) = texts.step((0, 139, 140))
        for found in texts.step(*[(0, 139, 140)] * 40):
            assert torch.equal(found, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_heads_are_batch_invariant(dtype, monkeypatch):
    """Products are torch's, and a row's bits are the same alone and among others."""
    add_up_in_one_order(monkeypatch)
    rows, matrices = torch.randn(70, 3, 50).to(dtype).to(DEVICE), torch.randn(3, 50, 40).to(dtype).to(DEVICE)
    for right in (matrices.mT, matrices.mT.contiguous()):
        room = torch.zeros(70, 3, 60, dtype=dtype, device=DEVICE)
        every = head_product(rows, right, room[..., :40])
        wanted = torch.einsum("thk,hnk->thn", rows.double(), right.double())
        size = torch.einsum("thk,hnk->thn", rows.double().abs(), right.double().abs()).amax()
        torch.testing.assert_close(every.double() / size, wanted / size, rtol=0, atol=rounded(dtype, 8)["atol"])
        assert not room[..., 40:].any()
        for part in (slice(5, 6), slice(60, 70), slice(3, 40)):
            assert torch.equal(head_product(rows[part], right, torch.empty_like(every[part])), every[part])


def check_model(prepared, text: list[int], wanted_cuts: list[int], monkeypatch, **options) -> None:
    """Compare a text's logits, computed alone, with those of the text beside others, cut otherwise, continued from
    another sequence's blocks, and recomputed."""
    add_up_in_one_order(monkeypatch)
    driver = GpuDriver(prepared, num_slots=64, backend=gpu_backend(prepared, invariant=True, **options))
    (alone,) = driver.sequences.add()
    wanted = driver.run_all(alone, text, wanted_cuts)
    others, (beside,) = driver.sequences.add(2), driver.sequences.add()
    driver.check_among_others(beside, text, [1, 19, 2, 11, 27], wanted, others)
    # A prefix hit, two blocks long, and a decode, beside a chunk.
    (first,) = driver.sequences.add()
    driver.step((first, text[:32]), sample=())
    hit, sources, _ = driver.sequences.parallel_sample(first)
    assert not sources
    (other,) = driver.sequences.add()
    found = driver.step((other, tokens_of(9, 4)), (hit, text[32:33]), sample=[9])
    assert torch.equal(found, wanted[32:33])
    # Recomputed tokens are a chunk, though the last ones were decodes before.
    found = driver.step((other, tokens_of(3, 5)), (hit, text[33:60]), sample=range(3, 30))
    assert torch.equal(found, wanted[33:60])
    driver.backend.close()


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [16, 32])
def test_logits_of_a_text(head_dim, tmp_path, monkeypatch):
    folder = save_model(tmp_path / "model", num_hidden_layers=1, head_dim=head_dim)
    prepared = prepare(ModelFlags(model=str(folder), dtype="float32", max_model_len=128))
    check_model(prepared, tokens_of(73, 2), [40], monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("family", "layers"), [("gpt-oss", 2), ("youtu", 1), ("mixtral", 1), ("llama4", 2)])
def test_logits_of_families(family, layers, tmp_path, monkeypatch):
    """Sinks and windows in every other layer, latents, experts, and attention in chunks of positions."""
    _, flags = make_model(tmp_path / "model", {**FAMILIES[family], "num_hidden_layers": layers})
    check_model(prepare(replace(flags, max_model_len=128)), tokens_of(73, 2), [40], monkeypatch)


@pytest.mark.long
def test_logits_over_kv_in_8_bits(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "model", num_hidden_layers=1)
    prepared = prepare(ModelFlags(model=str(folder), dtype="float32", max_model_len=128))
    check_model(prepared, tokens_of(73, 2), [40], monkeypatch, fp8=True)
