"""Programmatic dependent launch (sm_90 on): a kernel of a step begins while the previous one still runs.

    kernel A   ......wait|go, work, write................|
    kernel B             early part, wait                |go, work, write .....
                         (starts, weights into the L2)

Such a kernel begins when every program of the previous kernel has triggered it or has ended. The code before
:func:`wait_for_earlier` is its *early part*; that function returns when the previous kernel has ended and its memory is
visible. As every such kernel waits, all kernels before that one have then ended as well. The next kernel is triggered
after the wait, so at most one kernel runs ahead.

**An early part reads only memory that no kernel of the step writes**: weights, rotary tables, and the step's record,
which is copied before the step's first kernel. It writes nothing, since an earlier kernel may still read the memory. A
prefetch into the L2 may name any memory, because all processors share the same L2.

Every program of such a kernel calls :func:`wait_for_earlier` exactly as the others do, also if it has no work.
cuBLAS's, torch's and NCCL's kernels begin when all before them have ended, and so do kernels after those.

The entry ``dependent_launch`` of the tuning file switches it for all kernels. Triton's interpreter and sm_80 do not
support it.
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
    """Return the constants of a kernel of a step: whether it begins before the previous kernel has ended."""
    on = arch >= DEPENDENT_ARCH and not interpreting() and bool(tuned("dependent_launch", arch)["on"])
    return {"DEPENDENT": on, "launch_pdl": on}


@triton.jit
def wait_for_earlier(DEPENDENT: tl.constexpr):
    """Wait for all earlier kernels, and let the next one begin its early part."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, sizes):
    """Prefetch ``sizes`` bytes from each pointer into the L2, asynchronously; sizes and addresses are multiples of 16.
    Only for DEPENDENT kernels."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
