"""A sequence's state in slots of the pool (docs/decisions/states.md), and the kernels' inputs of a step beside its
rows.

A layer's state is pieces, each in one slot, at places that are int32 [pieces, 2]: which of the state's slots, and the
offset in it, in values (:mod:`pillion.engine.models.state_layout`).

Matrices advance in chunks of CHUNK tokens, which begin at multiples of CHUNK in each text. A state contains a matrix at
the begin of the last chunk, and the rows since then (keys, values and rates): the output of a chunk's row is computed
from these alone, by products of fixed shape in which later rows are zeros. So a row has the same bits whether its chunk
came in one step or in several, however it was cut, and after a whole chunk no rows are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import check, check_tensor, processors_of
from pillion.kernels.state_pieces import CHUNK, PIECE_CHANNELS, PIECE_COLUMNS

# Version of a state's content of a chunk, part of the block namespace of models with states (I2).
CHUNKS_LAYOUT_VERSION = "chunks-1"
# Second index of ``slots`` [sequences, 2, pages]: slots that the state is read from, and slots that it is written to.
READS, WRITES = tl.constexpr(0), tl.constexpr(1)
SIDES = 2


@triton.jit
def piece_of(pool, slots, places, sequence, number, SIDE: tl.constexpr, PAGES: tl.constexpr, SLOT_VALUES: tl.constexpr):
    """Return the address of piece ``number`` of the state that a sequence reads or writes (SIDE), and whether it has
    one."""
    page = tl.load(places + number * 2)
    slot = tl.load(slots + (sequence * 2 + SIDE) * PAGES + page)
    at = slot.to(tl.int64) * SLOT_VALUES + tl.load(places + number * 2 + 1)
    # Pieces begin at cache lines (PIECE_ALIGNMENT_BYTES): rows are read in words of 16 bytes.
    return pool + tl.multiple_of(at, 16), slot >= 0


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) without cancellation for small exponentials; x itself above 20, as torch does."""
    # log1p(u) = log(1 + u) * u / ((1 + u) - 1), in which the rounding error of 1 + u cancels.
    u = tl.exp(tl.minimum(x, 20.0))
    sum_ = 1.0 + u
    difference = tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)
    log1p = tl.where(sum_ == 1.0, u, tl.log(sum_) * (u / difference))
    return tl.where(x > 20.0, x, log1p)


@dataclass(frozen=True, slots=True)
class StepOfStates:
    """A step's inputs of the state kernels, besides its rows.

    Attributes:
        pool: float32 [slots, slot_values].
        owners: int32 [T or more], the sequence of each row; -1 for padding.
        starts: int32 [S + 1 or more], sequence s has rows starts[s] .. starts[s + 1] - 1.
        count: int32 [1], number of sequences.
        firsts: int32 [S or more], the position of each sequence's first row.
        chunk_starts: int32 [S + 1 or more], sequence s has chunks chunk_starts[s] .. chunk_starts[s + 1] - 1 of the
            step.
        chunk_owners: int32 [chunks or more], the sequence of each chunk.
        slots: int32 [S or more, 2, pages]: slots that each sequence's state is read from and written to. -1 reads
            zeros, and writes nothing.
    """

    pool: torch.Tensor
    owners: torch.Tensor
    starts: torch.Tensor
    count: torch.Tensor
    firsts: torch.Tensor
    chunk_starts: torch.Tensor
    chunk_owners: torch.Tensor
    slots: torch.Tensor

    def check(self, tokens: int) -> None:
        """Raise Internal for misshapen tensors, or if the step has fewer rows than ``tokens``."""
        device = self.owners.device
        check_tensor("pool", self.pool, (None, None), torch.float32)
        check(self.pool.device.type == device.type, "pool is on {}, not on {}", self.pool.device, device)
        check_tensor("owners", self.owners, (None,), torch.int32, device)
        check(0 < tokens <= len(self.owners), "{} rows of {}", tokens, len(self.owners))
        check_tensor("slots", self.slots, (None, SIDES, None), torch.int32, device)
        check_tensor("starts", self.starts, (len(self.slots) + 1,), torch.int32, device)
        check_tensor("count", self.count, (1,), torch.int32, device)
        check_tensor("firsts", self.firsts, (len(self.slots),), torch.int32, device)
        check_tensor("chunk_starts", self.chunk_starts, (len(self.slots) + 1,), torch.int32, device)
        chunks = most_chunks(len(self.owners), len(self.slots))
        check_tensor("chunk_owners", self.chunk_owners, (chunks,), torch.int32, device)

    @property
    def constants(self) -> dict[str, int]:
        """Constexprs of :func:`piece_of`."""
        return {"PAGES": self.slots.shape[2], "SLOT_VALUES": self.pool.shape[1]}


def check_places(places: torch.Tensor, pieces: int, step: StepOfStates) -> None:
    """Raise Internal unless ``places`` is int32 [pieces, 2] on the step's device."""
    check_tensor("places", places, (pieces, 2), torch.int32, step.owners.device)


def most_chunks(tokens: int, seqs: int) -> int:
    """Return the max chunks of a step: a sequence may have partial chunks at its begin and end, and every chunk has at
    least one row."""
    return min(tokens, tokens // CHUNK + 2 * seqs)


def pieces_of_inputs(channels: int) -> int:
    """Return the number of pieces of the last inputs of ``channels`` channels."""
    return -(-channels // PIECE_CHANNELS)


def columns_of(values: int) -> int:
    """Return the number of pieces of a matrix with ``values`` columns. Raises Internal unless pieces divide it."""
    check(values > 0 and values % PIECE_COLUMNS == 0, "{} columns are not a multiple of {}", values, PIECE_COLUMNS)
    return values // PIECE_COLUMNS


def programs_for(items: int, each: int, device: torch.device) -> tuple[int]:
    """Return the grid of a persistent kernel for up to ``items`` items: at most ``each`` programs per multiprocessor.
    It does not depend on the batch, so that a CUDA graph serves any."""
    return (min(items, each * processors_of(device)),)
