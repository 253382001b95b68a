"""The lab's replacement of Triton's interpreter gives the same results."""

from __future__ import annotations

from tests.support.gpu import NATIVE  # isort: skip  (before the kernels)

import itertools
from typing import Any

import numpy as np
import pytest
import triton.language as tl

pytestmark = pytest.mark.skipif(NATIVE, reason="nothing is interpreted")

TYPES = (tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64)
TYPES += (tl.float8e4nv, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.pointer_type(tl.float32))
NUMBERS = (0, -1, 1, True, 127, 128, 255, 2**31, 2**40, 2**64, 0.0, -0.0, 0.5, -3.0, 1e-40, 1e300, float("nan"))
# Whether each side may be a pointer, whether both are cast to one type, and whether they are divided: of sums,
# differences, products, quotients, and bits.
OPTIONS = [
    *((True, True, True, False), (True, False, True, False), (False, False, True, False)),
    *((False, False, True, True), (False, False, False, False)),
]
SHAPES = ((), (1,), (4,), (4, 1), (1, 4), (2, 4), (2, 2, 4), (8,))


def tensor(kind: Any, shape: tuple[int, ...] = ()) -> Any:
    from triton.runtime import interpreter

    values = np.arange(np.prod(shape, dtype=int)).reshape(shape or (1,)) % 2
    handle = interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(kind)), kind)
    return tl.core.tensor(handle, tl.block_type(kind, shape) if shape else kind)


def result(function: Any, *given: Any) -> Any:
    """The result of both sides, or the error."""
    try:
        sides = function(*given)
    except Exception as error:
        return type(error)
    return [(str(side.type), str(side.shape), str(side.handle.dtype), shown(side.handle.data)) for side in sides]


def shown(values: np.ndarray) -> tuple[Any, ...]:
    return values.dtype, values.shape, values.tobytes()


@pytest.fixture
def both() -> Any:
    """Triton's own function and its replacement, by its name."""
    from triton.runtime.interpreter import interpreter_semantic as semantic

    def find(name: str) -> tuple[Any, Any]:
        found = getattr(semantic, name)
        assert found != getattr(type(semantic), name).__get__(semantic)
        return getattr(type(semantic), name).__get__(semantic), found

    return find


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_operators_accept_the_same_operands(both, options):
    wanted, found = both("binary_op_type_checking_impl")
    sides = [*NUMBERS, *(tensor(kind, shape) for kind in TYPES for shape in ((), (4,)))]
    for one, other in itertools.product(sides, sides):
        assert result(found, one, other, *options) == result(wanted, one, other, *options), (one, other)


@pytest.mark.parametrize("kinds", [(tl.float32, tl.int1), (tl.pointer_type(tl.float16), tl.int32)], ids=str)
def test_shapes_broadcast_alike(both, kinds):
    wanted, found = both("broadcast_impl_value")
    for shape, other in itertools.product(SHAPES, SHAPES):
        sides = tensor(kinds[0], shape), tensor(kinds[1], other)
        assert result(found, *sides) == result(wanted, *sides), (shape, other)


def test_types_have_the_same_names():
    """Also derived types, and those of pointers."""
    for kind, shape in itertools.product(TYPES, SHAPES[1:]):
        made = tl.block_type(tl.float32, [tl.constexpr(size) for size in shape]).with_element_ty(kind)
        assert made == tl.block_type(kind, shape)
        assert (made.name, made.numel) == (f"<{list(map(str, shape))}, {kind}>", np.prod(shape))
        assert made.shape.values == list(shape)
        assert made.scalar is kind
