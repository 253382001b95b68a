"""Copies of whole blocks of a pool as bytes: gathered for a transfer, scattered after one, or copied within the pool.

A pool is [slots, ...], contiguous, of any type; a block is one slot of it. Entries of -1 in a list of slots are
skipped, so that a list in a captured graph may be longer than needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_pool_device, check_tensor
from pillion.kernels.gpu.tuned import tuned

# Types of words, largest first: blocks are copied in the first whose size divides a block. A thread copies two words of
# 8 bytes at a time.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _move(source, target, pairs, PARTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr):
    """Copy one part of one block. ``pairs`` has source and target slots (PAIRED "pairs"), or only the slots of the
    "source" or "target", while blocks of the other buffer are in order."""
    entry = tl.program_id(0) // PARTS
    at = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    if PAIRED == "pairs":
        source_slot, target_slot = tl.load(pairs + 2 * entry), tl.load(pairs + 2 * entry + 1)
    elif PAIRED == "source":
        source_slot, target_slot = tl.load(pairs + entry), entry
    else:
        source_slot, target_slot = entry, tl.load(pairs + entry)
    if (source_slot >= 0) & (target_slot >= 0):
        words = tl.load(source + source_slot.to(tl.int64) * WORDS + at, mask=at < WORDS)
        tl.store(target + target_slot.to(tl.int64) * WORDS + at, words, mask=at < WORDS)


def gather(pool: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copy blocks ``slots`` (int32 [N]) of ``pool`` into ``out`` [N, bytes of a block], uint8, in sequence.

    Rows of ``out`` whose entry is -1 are unchanged. Raises Internal for misshapen tensors.
    """
    _launch(pool, out, slots, _checked_block_bytes(pool, slots, out), "source")


def scatter(buffer: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> None:
    """Copy the blocks of ``buffer`` [N, bytes of a block], uint8, to ``slots`` (int32 [N], each once) of ``pool``.

    Raises Internal for misshapen tensors.
    """
    _launch(buffer, pool, slots, _checked_block_bytes(pool, slots, buffer), "target")


def copy(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks within ``pool``: ``pairs`` (int32 [N, 2]) are (source, target) slots.

    The order of the copies is undefined, so no slot may be written twice, or both written and read. A pair with a -1
    is skipped. Raises Internal for misshapen tensors.
    """
    check_tensor("pairs", pairs, (None, 2), torch.int32)
    check_pool_device(pool, pairs.device)
    _launch(pool, pool, pairs, _checked_block_bytes(pool), "pairs")


def _checked_block_bytes(
    pool: torch.Tensor, slots: torch.Tensor | None = None, buffer: torch.Tensor | None = None
) -> int:
    """Return the bytes of a block. Raises Internal if the pool, the slots or the buffer are misshapen."""
    check(pool.is_contiguous() and pool.ndim > 1, "pool is not contiguous")
    block_bytes = pool[0].numel() * pool.element_size()
    if slots is not None and buffer is not None:
        check_tensor("slots", slots, (None,), torch.int32, pool.device)
        check_tensor("buffer", buffer, (len(slots), block_bytes), torch.uint8, pool.device)
    return block_bytes


def _launch(source: torch.Tensor, target: torch.Tensor, entries: torch.Tensor, block_bytes: int, paired: str) -> None:
    check(len(entries) > 0, "no blocks to move")
    # Unaligned memory is copied in smaller words.
    addresses = block_bytes | source.data_ptr() | target.data_ptr()
    word = next(size for size in _WORDS if addresses % size == 0)
    constants = _constants(block_bytes, word, arch_of(target.device))
    views = (tensor.flatten().view(_WORDS[word]) for tensor in (source, target))
    _move[(len(entries) * constants["PARTS"],)](*views, entries, PAIRED=paired, **constants)


def _constants(block_bytes: int, word: int, arch: int) -> dict[str, int]:
    use = tuned("blocks", arch)
    words, block = block_bytes // word, use["part_words"]
    return {"PARTS": cdiv(words, block), "WORDS": words, "BLOCK": block, "num_warps": use["num_warps"]}
