"""Runs a Gluon kernel for Hopper in Triton's interpreter, which has no Gluon, and detects races.

Layouts are ignored. Shared memory is an array. Copies land as late as possible: the target is NaN until the program has
waited for its group and passed a barrier. A product is computed when it is awaited, from its operands at that time, and
its result cannot be used before. Writes to memory that a product may still read, in this warp or in another one that
has not passed a barrier since, are refused.
"""

from __future__ import annotations

from tests.support.gpu import NATIVE  # isort: skip  (before the kernels)

from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from pillion.kernels.gpu.dot import dot

# NaN in both bfloat16 and float16.
NAN_BITS = 0x7FFF


class SharedTile:
    """A tile of shared memory."""

    def __init__(self, machine: WarpGroups, data: np.ndarray, dtype: tl.dtype) -> None:
        self.machine, self.data, self.dtype = machine, data, dtype

    def index(self, at: Any) -> SharedTile:
        return SharedTile(self.machine, self.data[int(at)], self.dtype)

    def permute(self, order: list[int]) -> SharedTile:
        return SharedTile(self.machine, self.data.transpose(order), self.dtype)

    def store(self, tensor: Any) -> None:
        self.machine.refuse_if_read(self.data)
        self.data[...] = tensor.handle.data

    def tensor(self) -> Any:
        from triton.runtime.interpreter import TensorHandle

        kind = tl.block_type(self.dtype, list(self.data.shape))
        # Transposed tiles keep their memory layout, as in Triton's interpreter: some BLAS multiply the two differently.
        return tl.core.tensor(TensorHandle(self.data.copy(order="K"), self.dtype), kind)


class BegunProduct:
    """A product that was begun and not awaited yet."""

    def __init__(self, left: Any, right: SharedTile, start: Any) -> None:
        self.left, self.right, self.start = left, right, start

    def reads(self, data: np.ndarray) -> bool:
        operands = [each.data for each in (self.left, self.right) if isinstance(each, SharedTile)]
        return any(np.may_share_memory(each, data) for each in operands)

    def result(self) -> Any:
        left = self.left.tensor() if isinstance(self.left, SharedTile) else self.left
        return dot(left, self.right.tensor(), self.start)


class WarpGroups:
    """Copies and products of the running program."""

    def __init__(self) -> None:
        self.asked: list[tuple[np.ndarray, np.ndarray]] = []
        self.groups: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self.waited: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self.begun: list[BegunProduct] = []
        self.done: list[BegunProduct] = []

    def refuse_if_read(self, data: np.ndarray) -> None:
        assert not any(product.reads(data) for product in self.begun + self.done), "a product may still read there"

    def allocate(self, dtype: tl.dtype, shape: list[int], layout: object) -> SharedTile:
        del layout
        bits = np.full(shape, NAN_BITS, np.uint16)
        return SharedTile(self, bits.view(np.float16) if dtype == tl.float16 else bits, dtype)

    def copy(self, target: SharedTile, cells: Any) -> None:
        self.refuse_if_read(target.data)
        target.data.view(np.uint16)[...] = NAN_BITS
        self.asked.append((target.data, tl.load(cells).handle.data))

    def commit(self) -> None:
        self.groups.append(self.asked)
        self.asked = []

    def wait_group(self, outstanding: int) -> None:
        many = max(0, len(self.groups) - outstanding)
        self.waited += self.groups[:many]
        del self.groups[:many]

    def barrier(self) -> None:
        for group in self.waited:
            for target, found in group:
                target[...] = found
        self.waited, self.done = [], []

    def multiply(
        self, left: Any, right: SharedTile, start: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        assert is_async
        assert not isinstance(start, BegunProduct)
        self.begun.append(BegunProduct(left, right, start if use_acc else start * 0.0))
        return self.begun[-1]

    def wait(self, outstanding: int, deps: list[BegunProduct]) -> Any:
        many = max(0, len(self.begun) - outstanding)
        self.done += self.begun[:many]
        found = [each.result() if each in self.begun[:many] else each for each in deps]
        del self.begun[:many]
        return found[0] if len(found) == 1 else tuple(found)


class _Names:
    """A module's names, some of them replaced."""

    def __init__(self, module: ModuleType, **replaced: object) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def emulated(module: ModuleType, kernel: str) -> Any:
    """Return a module's Gluon kernel as one of Triton's interpreter."""
    assert not NATIVE
    machine = WarpGroups()
    names = {
        **vars(module),
        "tl": _Names(tl, debug_barrier=machine.barrier),
        "gl": _Names(
            gl,
            arange=lambda start, end, layout: tl.arange(start, end),
            zeros=lambda shape, dtype, layout: tl.zeros(shape, dtype),
            convert_layout=lambda tensor, layout: tensor,
            static_range=range,
            allocate_shared_memory=machine.allocate,
        ),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=machine.copy, commit_group=machine.commit, wait_group=machine.wait_group
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.wait,
    }
    for name, value in vars(module).items():
        if type(value).__name__ == "GluonJITFunction":
            plain = value.fn
            names[name] = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
            names[name].__annotations__ = plain.__annotations__
    return triton.jit(names[kernel])
