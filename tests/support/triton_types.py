"""Makes the types of Triton's tensors cheap where its interpreter runs kernels.

The interpreter makes a type and a shape of constants for each value that it computes, which takes longer than the value
itself. Here each shape is made once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from triton.language import core


@functools.cache
def _known(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """The shape as Triton keeps it in a type, its number of elements, and its text. Raises as Triton does for a shape
    that no tensor may have."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    kept = core.tuple(shape)
    return kept, core.validate_block_shape(kept), str(kept)


@functools.cache
def _constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape of a tensor and its number of elements, as constants."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _make_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel, text = _known(tuple([getattr(size, "value", size) for size in shape]))
    self.name = f"<{text}, {element_ty}>"


def _make_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _constants(tuple(kind.shape) if kind.is_block() else ())


def share_shapes() -> None:
    """Has each shape of a type and of a tensor made once, in this process from now on."""
    core.block_type.__init__ = _make_type
    core.tensor.__init__ = _make_tensor
