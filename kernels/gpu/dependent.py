"""Lets a kernel of a step begin while the one before it still runs: programmatic dependent launch, from sm_90 on.

    kernel A   ......wait|go, work, write................|
    kernel B             early part, wait                |go, work, write .....
                         (starts, weights into the L2)

A kernel that is launched so begins when every program of the kernel before it has asked for that, or has ended. What
it does before :func:`wait_for_earlier` is its *early part*; that function returns when the kernel before it has ended
and its memory is visible. As every such kernel waits, all kernels before that one have ended then, too. The next
kernel is asked for after the wait, so no two kernels ahead ever run.

**An early part reads only what no kernel of the step writes**: weights, tables of rotations, and the step's record,
which a copy brings before the step's first kernel. It writes nothing, for an earlier kernel may still read it. A
prefetch into the L2 may name any memory, because all processors see the same L2.

Every program of such a kernel calls :func:`wait_for_earlier` exactly as the others do, also where it has no work.
cuBLAS's, torch's and NCCL's kernels begin when all before them have ended, and so do kernels after those.

The entry ``dependent_launch`` of the tuning file switches it for all kernels. Triton's interpreter and sm_80 have none
of it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pillion.kernels.gpu.launch import interpreting
from pillion.kernels.gpu.tuned import tuned

# The first architecture with dependent launches.
DEPENDENT_ARCH = 90


def dependent(arch: int) -> dict[str, bool]:
    """Return the constants of a kernel of a step: whether it begins before the kernel before it has ended."""
    on = arch >= DEPENDENT_ARCH and not interpreting() and bool(tuned("dependent_launch", arch)["on"])
    return {"DEPENDENT": on, "launch_pdl": on}


@triton.jit
def wait_for_earlier(DEPENDENT: tl.constexpr):
    """Wait for all earlier kernels, and lets the next one begin its early part."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, sizes):
    """Ask for ``sizes`` bytes from each pointer to be brought into the L2, multiples of 16 at such addresses, without
    waiting for them. A kernel calls this only where it is DEPENDENT."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
