"""The Triton kernels of attention over latents, and of writing their rows, against plain torch."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, rounded  # isort: skip  (before the kernels)

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from lab.testbed.attention_reference import paged_attention
from lab.testbed.gpu_reference import fp8_rows
from pillion.engine.models.layers import rms_norm, rms_norm_wide
from pillion.engine.models.rope import rotate
from pillion.errors import Internal
from pillion.kernels.gpu.attention.gpu_attention_plan import ITEM_WORDS, PARTIAL
from pillion.kernels.gpu.attention.kv_write import Rotary
from pillion.kernels.gpu.attention.latent_attention import LatentAttention
from pillion.kernels.gpu.attention.latent_write import latent_write
from pillion.kernels.step import StepBatch
from tests.support.batches import Sequences
from tests.support.examples import examples

LAYERS, LAYER, SPARE_ROWS, UNTOUCHED = 2, 1, 3, 77.0
BATCHES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 2)) | st.tuples(st.integers(0, 100), st.integers(3, 12)),
    min_size=1,
    max_size=3,
)


@dataclass(frozen=True)
class LatentCase:
    """A batch of (earlier tokens, tokens of this step) over a pool; memory that no row of the step may read is NaN."""

    batch: StepBatch
    queries: torch.Tensor
    plain: torch.Tensor
    pool: torch.Tensor
    rank: int

    @classmethod
    def of(
        cls,
        parts: list[tuple[int, int]],
        heads: int,
        rank: int,
        rotary: int,
        block_size: int,
        dtype: torch.dtype,
        fp8: bool = False,
    ) -> LatentCase:
        generator = torch.Generator().manual_seed(len(parts))
        slots = sum(-(-(before + now) // block_size) for before, now in parts) + 2
        sequences = Sequences(slots, block_size, len(parts))
        numbers = sequences.add(len(parts))
        for number, (before, _) in zip(numbers, parts, strict=True):
            sequences.step([(number, [0] * before)])
        batch = sequences.step([(n, [0] * now) for n, (_, now) in zip(numbers, parts, strict=True)])
        pool = torch.full((slots, LAYERS, 1, 1, block_size, rank + rotary), torch.nan)
        for table, context in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
            for position in range(context):
                row = torch.randn(rank + rotary, generator=generator)
                pool[int(table[position // block_size]), LAYER, 0, 0, position % block_size] = row
        queries = torch.randn((batch.num_tokens + SPARE_ROWS, heads, rank + rotary), generator=generator)
        plain = pool = pool.to(dtype)
        if fp8:
            plain, pool = quantized(plain, rank)
        return cls(batch, queries.to(dtype).to(DEVICE), plain, pool.to(DEVICE), rank)

    @property
    def scale(self) -> float:
        return self.queries.shape[2] ** -0.5

    def attention(self, **more: object) -> LatentAttention:
        options = {
            "pool": self.pool,
            "dtype": self.queries.dtype,
            "num_heads": self.queries.shape[1],
            "rank": self.rank,
            "rotary": self.queries.shape[2] - self.rank,
            "block_size": self.plain.shape[4],
            "fp8": self.pool.dtype == torch.uint8,
            "num_layers": LAYERS,
            "scale": self.scale,
            "max_tokens": self.batch.num_tokens,
            "max_seqs": self.batch.num_seqs,
            "max_context_blocks": self.batch.block_tables.shape[1],
        }
        return LatentAttention(**{**options, **more})

    def check(self, **more: object) -> None:
        attention = self.attention(**more)
        plan, many = attention.planner.plan(self.batch), self.batch.num_tokens
        record = torch.full((attention.planner.max_record_words,), 2**30, dtype=torch.int32, device=DEVICE)
        record[: len(plan.record)] = torch.from_numpy(plan.record).to(DEVICE)
        out = torch.full((len(self.queries), self.queries.shape[1] * self.rank), UNTOUCHED, device=DEVICE)
        out = out.to(self.queries.dtype)
        attention.attend(LAYER, self.queries, out, record, with_chunks=plan.with_chunks)
        assert (out[many:] == UNTOUCHED).all()
        # The oracle reads whole rows as values; those behind the latents are dropped.
        rows = self.plain.expand(-1, -1, 2, -1, -1, -1)
        wanted = paged_attention(self.queries[:many].cpu().float(), rows, LAYER, self.batch, scale=self.scale)
        found = out[:many].cpu().float().view(many, -1, self.rank)
        torch.testing.assert_close(found, wanted[..., : self.rank], **rounded(self.queries.dtype, 8))


def quantized(plain: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of rows in float8 with two scales each, and a pool of their bytes. Unknown rows are NaN in both."""
    parts, codes, scales = [], [], []
    for values in plain.float().tensor_split([rank], -1):
        known = values.nan_to_num()
        scale = known.abs().amax(-1, keepdim=True) / 448
        code = (known / scale).nan_to_num().to(torch.float8_e4m3fn)
        parts.append(torch.where(values.isnan(), values, code.float() * scale))
        codes.append(torch.where(values.isnan(), 0x7F, code.view(torch.uint8)))
        scales.append(torch.where(values[..., 0].isnan(), torch.nan, scale[..., 0]))
    pool = [torch.cat(codes, -1).flatten(-2), *(scale.contiguous().view(torch.uint8) for scale in scales)]
    return torch.cat(parts, -1), torch.cat(pool, -1)


# An example takes seconds in the interpreter, so failing examples are not shrunk.
@given(
    parts=BATCHES,
    heads=st.sampled_from([1, 2, 5, 20]),
    rank=st.sampled_from([32, 48, 512]),
    rotary=st.sampled_from([16, 48, 64]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    fp8=st.booleans(),
)
@example(parts=[(70, 1), (3, 5)], heads=20, rank=512, rotary=64, block_size=16, dtype=torch.bfloat16, fp8=False)
@settings(
    max_examples=examples(50 if NATIVE else 4), phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None
)
def test_ragged_batches_are_attended_like_plain_torch(parts, heads, rank, rotary, block_size, dtype, fp8):
    LatentCase.of(parts, heads, rank, rotary, block_size, dtype, fp8).check()


@pytest.mark.parametrize("decode_rows", [1, 3])
def test_decodes_of_more_heads_than_a_tile_are_no_chunks(decode_rows):
    """Their rows are several tiles, shared among several programs."""
    case = LatentCase.of([(400, decode_rows), (3, 1)], 40, 32, 16, 16, torch.float32)
    attention = case.attention(decode_rows=decode_rows)
    plan, planner = attention.planner.plan(case.batch), attention.planner
    assert not plan.with_chunks
    starts = plan.record[planner.starts_at(0, False) :]
    items = plan.record[starts[0] : starts[planner.decode.programs]].reshape(-1, ITEM_WORDS)
    assert (items[:, PARTIAL] >= 0).sum() > 2
    case.check(decode_rows=decode_rows)


def test_misuse_is_refused():
    case = LatentCase.of([(20, 1), (5, 9)], 2, 32, 16, 16, torch.float32)
    attention = case.attention()
    record = torch.from_numpy(attention.planner.plan(case.batch).record).to(DEVICE)
    out = torch.zeros(len(case.queries), 2 * 32, device=DEVICE)
    for layer, queries, target in [
        (LAYER + 1, case.queries, out),
        (LAYER, case.queries[:, :1], out),
        (LAYER, case.queries.half(), out),
        (LAYER, case.queries, out[1:]),
    ]:
        with pytest.raises(Internal):
            attention.attend(layer, queries, target, record, with_chunks=True)
    for bad in ({"scale": -1.0}, {"num_layers": 3}, {"rank": 40, "rotary": 8}, {"dtype": torch.float16}):
        with pytest.raises(Internal):
            case.attention(**bad)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_normed_rotated_and_written(dtype, wide):
    tokens, heads, rank, rotary, still, eps = 5, 9, 48, 16, 24, 1e-6
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    latents, projected = random(tokens, rank + rotary), random(tokens, heads, still + rotary)
    weight = random(rank).float() if wide else random(rank)
    cos, sin = random(30, rotary // 2), random(30, rotary // 2)
    positions, rows = torch.tensor([7, 0, 29, 3, 3], dtype=torch.int32), torch.tensor([17, 0, 33, -1, 47])
    pool, queries = torch.full((3, LAYERS, 1, 1, 16, rank + rotary), 7.0, dtype=dtype), random(tokens, heads, 64)
    given_pool, given_queries = pool.to(DEVICE).clone(), queries.to(DEVICE).clone()
    latent_write(
        latents.to(DEVICE),
        weight.to(DEVICE),
        projected.to(DEVICE),
        given_queries,
        given_pool,
        rows.int().to(DEVICE),
        LAYER,
        Rotary(cos.to(DEVICE), sin.to(DEVICE), positions.to(DEVICE)),
        eps=eps,
        wide=wide,
    )
    angles = [torch.cat((table[positions.long()],) * 2, -1).float()[:, None] for table in (cos, sin)]
    angles[1] = angles[1] * torch.cat((-torch.ones(rotary // 2), torch.ones(rotary // 2)))
    both = torch.cat((projected[..., still:], latents[:, None, rank:]), 1).float()
    turned = rotate(both, *angles)
    queries[..., rank:] = turned[:, :-1].to(dtype)
    torch.testing.assert_close(given_queries.cpu().float(), queries.float(), **rounded(dtype, 2))
    normed = (rms_norm_wide if wide else rms_norm)(latents[:, :rank], weight, eps)
    for token, row in enumerate(rows.tolist()):
        if row >= 0:
            pool[row // 16, LAYER, 0, 0, row % 16] = torch.cat((normed[token], turned[token, -1].to(dtype)))
    torch.testing.assert_close(given_pool.cpu().float(), pool.float(), **rounded(dtype, 4))
    assert np.isfinite(given_pool.float().cpu().numpy()).all()


def test_rows_in_8_bits_have_two_scales():
    """Codes and scales are those of other rows in float8; a large rotated key does not affect the latents'
    precision."""
    tokens, rank, rotary = 3, 48, 16
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn((tokens, rank + rotary), generator=generator)
    latents[:, rank:] *= 1000
    pool = torch.full((2, LAYERS, 1, 1, 16 * (rank + rotary + 8)), 255, dtype=torch.uint8, device=DEVICE)
    rows, tables = torch.tensor([17, 3, 31], dtype=torch.int32), torch.ones(1, rotary // 2)
    latent_write(
        latents.to(DEVICE),
        torch.ones(rank, device=DEVICE),
        torch.zeros(tokens, 1, rotary, device=DEVICE),
        torch.zeros(tokens, 1, rank + rotary, device=DEVICE),
        pool,
        rows.to(DEVICE),
        LAYER,
        Rotary(tables.to(DEVICE), (tables * 0).to(DEVICE), torch.zeros(tokens, dtype=torch.int32, device=DEVICE)),
        eps=1e-6,
        wide=True,
    )
    normed = rms_norm_wide(latents[:, :rank], torch.ones(rank), 1e-6)
    codes = pool.cpu()[..., : 16 * (rank + rotary)].unflatten(-1, (16, -1))
    scales = pool.cpu().view(torch.float32)[..., -32:].unflatten(-1, (2, 16))
    for token, row in enumerate(rows.tolist()):
        place = (row // 16, LAYER, 0, 0)
        for part, values in enumerate((normed[token], latents[token, rank:])):
            wanted_codes, wanted_scale = fp8_rows(values)
            found = codes[place][row % 16].tensor_split([rank])[part]
            torch.testing.assert_close(scales[place][part, row % 16], wanted_scale, rtol=1e-6, atol=0)
            assert (found.int() - wanted_codes.int()).abs().max() <= 1  # A norm's last bit may change a code.
    assert (codes[0, 0] == 255).all()
