"""vector_add v02_grid_stride: a grid of one wave strides over the vector.

Change:   as many programs as the SMs hold at once; each takes every so-many-th block of 128 elements.
Why:      set-up is paid once a thread, not once an element, and the grid no longer grows with n. The memory
          system sees the same requests.
Counter:  sectors_per_load stays 4; time should not move.
Requires: contiguous tensors of any size and alignment.
Twin:     cuda-kernels/elementwise/vector_add/v02_grid_stride.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.device import sm_count

NUM_WARPS = 4
BLOCK = NUM_WARPS * 32
PROGRAMS_PER_SM = 16  # 2048 threads, all that an SM holds


@triton.jit
def vector_add_v02_grid_stride_kernel(a, b, out, n: tl.int64, BLOCK: tl.constexpr):
    # a, b, out: [n]. The program's index is widened first: 2^31 elements and more overflow 32 bits.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(first, n, stride):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < n
        total = tl.load(a + offsets, mask=mask).to(tl.float32) + tl.load(b + offsets, mask=mask).to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def vector_add_v02_grid_stride(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a + b for contiguous tensors of one shape; fp32, bf16 or fp16."""
    n = a.numel()
    if n == 0:
        return
    grid = (min(triton.cdiv(n, BLOCK), PROGRAMS_PER_SM * sm_count(a.device)),)
    vector_add_v02_grid_stride_kernel[grid](a, b, out, n, BLOCK=BLOCK, num_warps=NUM_WARPS)
