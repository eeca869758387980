"""vector_add v06_bulk_tile: a program copies one tile and ends.

Change:   no ring and no loop: the grid covers the vector, a program has one tile of a and b brought in and its sum
          carried away.
Why:      persistent programs drift apart, so the memory works on many places at once, and the grid waits for the
          slowest program. Programs of one tile are handed out in order; while one waits, the others on its SM work.
Counter:  time and dram_share are those of v04 again, without its load requests.
Requires: compute capability 9.0; contiguous tensors of any size. Plain masked loads take over if an address is no
          multiple of 16 bytes, as the copy engine requires, and for the last few elements.
Twin:     cuda-kernels/elementwise/vector_add/v06_bulk_tile.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

NUM_WARPS = 4
THREADS = NUM_WARPS * 32
ROW_BYTES = 128  # the widest row that is copied in one piece
ROWS = 16  # rows in a tile: 2 KiB


@triton.jit
def vector_add_v06_bulk_tile_kernel(
    a, b, out, n: tl.int64, a_rows, b_rows, out_rows, rows, covered: tl.int64,
    ROWS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    # a, b, out: [n]; a_rows, b_rows, out_rows: their first `covered` elements, as [rows, 128 bytes].
    if a_rows is not None:
        row = tl.program_id(0) * ROWS  # the copy engine clips the last tile by itself
        tile_total = a_rows.load([row, 0]).to(tl.float32) + b_rows.load([row, 0]).to(tl.float32)
        out_rows.store([row, 0], tile_total.to(out.dtype.element_ty))

    # The remainder, one element a thread, by plain masked loads.
    first = covered + tl.program_id(0).to(tl.int64) * TAIL
    for start in tl.range(first, n, tl.num_programs(0).to(tl.int64) * TAIL):
        offsets = start + tl.arange(0, TAIL)
        mask = offsets < n
        total = tl.load(a + offsets, mask=mask).to(tl.float32) + tl.load(b + offsets, mask=mask).to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def vector_add_v06_bulk_tile(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a + b for contiguous tensors of one shape; fp32, bf16 or fp16."""
    n = a.numel()
    if n == 0:
        return
    width = ROW_BYTES // a.element_size()
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (a, b, out))
    rows = n // width if aligned else 0
    descriptors = [
        TensorDescriptor(tensor, [rows, width], [width, 1], [ROWS, width]) if rows else None for tensor in (a, b, out)
    ]
    grid = (triton.cdiv(rows, ROWS) if rows else triton.cdiv(n, THREADS),)
    vector_add_v06_bulk_tile_kernel[grid](
        a, b, out, n, *descriptors, rows, rows * width,
        ROWS=ROWS, TAIL=THREADS, num_warps=NUM_WARPS,
    )  # fmt: skip
