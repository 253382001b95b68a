"""Attention of chunks in Gluon against Triton's on the same inputs: native on Hopper, elsewhere in an emulator that
detects copies and products that are used too early, or overwritten."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE, rounded  # isort: skip  (before the kernels)
from tests.support.paged_case import UNTOUCHED, PagedCase, PagedShape  # isort: skip

import pytest
import torch

from lab.benchmarks.gpu.search import trying
from pillion.kernels.gpu.attention import overlapped_attention, paged_attention
from pillion.kernels.gpu.launch import arch_of

pytestmark = pytest.mark.skipif(
    arch_of(DEVICE) != overlapped_attention.ARCH, reason="the instructions are those of sm_90"
)
# Tiles are small in the emulator, so that few tokens are many tiles; it does not check that layouts fit.
ROWS, KEYS = (128, 128) if NATIVE else (32, 32)
TILES = {"rows": ROWS, "keys": KEYS, "num_warps": 8, "programs": 1, "unit_tiles": 1}
# Long enough to cycle through all buffers, to be cut among programs, and to end inside and at the end of a tile.
PARTS = [(150, 41), (0, 20), (90, 1)]
if NATIVE:
    PARTS = [(1500, 411), (3, 660), (0, 200), (128, 128), (5000, 1)]
# Shapes with their numbers of buffers.
SHAPES = {
    "Llama": (PagedShape(4, 128, 16, torch.bfloat16), 3),
    "heads of 64, sinks": (PagedShape(8, 64, 32, torch.bfloat16, sinks=True), 4),
    "heads of 256": (PagedShape(2, 256, 64, torch.float16), 2),
    "heads of 512": (PagedShape(8, 512, 16, torch.bfloat16), 2),
    "a window in tiles": (PagedShape(7, 64, 128, torch.float16, window=2 * KEYS), 2),
    "chunks of positions": (PagedShape(5, 128, 16, torch.bfloat16, window=-(KEYS + 16)), 3),
    "a window, a cap, sinks": (PagedShape(1, 128, 16, torch.bfloat16, window=KEYS + 9, softcap=1.5, sinks=True), 3),
}


@pytest.fixture(autouse=True)
def emulation(monkeypatch):
    if not NATIVE:
        from tests.support.gluon_emulator import emulated

        monkeypatch.setattr(paged_attention, "_attend_overlapped", emulated(overlapped_attention, "_attend_overlapped"))


def tiles(head_dim: int, buffers: int) -> dict[str, int]:
    # Shared memory and registers are sufficient for 64 keys of heads of 256, and for 32 keys and 64 rows of heads of
    # 512.
    keys = min(KEYS, 128 * 128 // max(head_dim, 128))
    return {**TILES, "rows": min(ROWS, 64) if head_dim == 512 else ROWS, "keys": keys, "num_stages": buffers}


@pytest.mark.parametrize(("shape", "buffers"), SHAPES.values(), ids=SHAPES)
def test_overlapped_chunks_match_the_other_kernel(shape, buffers):
    case = PagedCase.of(shape, PARTS)
    found = []
    for overlap in (0, 1):
        use = tiles(shape.head_dim, buffers) | {"overlap": overlap}
        with trying("attention_chunk", overlapped_attention.ARCH, use):
            attention = case.attention()
        assert ("BUFFERS" in attention._chunk) == bool(overlap)
        found.append(case.run(attention))
    many = case.batch.num_tokens
    assert (found[1][many:] == UNTOUCHED).all()
    torch.testing.assert_close(found[1][:many].float(), case.reference(), **rounded(shape.dtype, 8))
    if NATIVE:
        torch.testing.assert_close(found[1][:many], found[0][:many], **rounded(shape.dtype, 2))
    else:
        # Both fold the same tiles in the same order.
        assert torch.equal(found[1], found[0])


def test_float32_float8_and_other_heads_use_the_other_kernel():
    cases = [
        PagedCase.of(PagedShape(4, 64, 16, torch.float32), [(3, 30)]),
        PagedCase.of(PagedShape(4, 64, 16, torch.bfloat16), [(3, 30)], fp8=True),
        PagedCase.of(PagedShape(4, 80, 16, torch.bfloat16), [(3, 30)]),
    ]
    with trying("attention_chunk", overlapped_attention.ARCH, {**tiles(64, 2), "rows": 32, "keys": 32, "overlap": 1}):
        assert not any("BUFFERS" in case.attention()._chunk for case in cases)
