"""vector_add v05_bulk_ring: bulk asynchronous copies through a ring in shared memory.

Change:   the vector is seen as rows of 128 bytes, and the TMA copies tiles of rows into a ring in shared memory
          (cp.async.bulk.tensor), ahead of the additions; results leave the same way.
Why:      one thread asks for kilobytes at a time, and registers hold nothing while data travel. v04 is at the memory's
          limit already, so this should only tie.
Counter:  load_requests vanish; time should not move.
Requires: compute capability 9.0; contiguous tensors of any size. Plain masked loads take over if an address is no
          multiple of 16 bytes, as the copy engine requires, and for the last few elements.
Twin:     cuda-kernels/elementwise/vector_add/v05_bulk_ring.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_twins._triton.lib.device import sm_count

NUM_WARPS = 4
THREADS = NUM_WARPS * 32
ROW_BYTES = 128  # the widest row that is copied in one piece
ROWS = 64  # rows in a tile: 8 KiB
STAGES = 4  # three tiles of each operand in flight in the ring, one being added in registers
PROGRAMS_PER_SM = 3  # as many as fit: with the tile of results a program takes 56 KiB


@triton.jit
def vector_add_v05_bulk_ring_kernel(
    a, b, out, n: tl.int64, a_rows, b_rows, out_rows, rows, covered: tl.int64,
    ROWS: tl.constexpr, STAGES: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    # a, b, out: [n]; a_rows, b_rows, out_rows: their first `covered` elements, as [rows, 128 bytes].
    if a_rows is not None:
        # The copy engine clips the last tile. num_stages makes the compiler build the ring: it waits for a tile's bytes
        # (mbarrier), and for the previous results to have left their tile.
        for row in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
            total = a_rows.load([row, 0]).to(tl.float32) + b_rows.load([row, 0]).to(tl.float32)
            out_rows.store([row, 0], total.to(out.dtype.element_ty))

    # The remainder, one element a thread, by plain masked loads.
    first = covered + tl.program_id(0) * TAIL
    for start in tl.range(first, n, tl.num_programs(0) * TAIL):
        offsets = start + tl.arange(0, TAIL)
        mask = offsets < n
        total = tl.load(a + offsets, mask=mask).to(tl.float32) + tl.load(b + offsets, mask=mask).to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def vector_add_v05_bulk_ring(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a + b for contiguous tensors of one shape; fp32, bf16 or fp16."""
    n = a.numel()
    if n == 0:
        return
    sms = sm_count(a.device)
    width = ROW_BYTES // a.element_size()
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (a, b, out))
    rows = n // width if aligned else 0
    tile = ROWS if rows >= 2 * sms * ROWS else ROWS // 4  # small tiles spread a smaller vector over more programs
    descriptors = [
        TensorDescriptor(tensor, [rows, width], [width, 1], [tile, width]) if rows else None for tensor in (a, b, out)
    ]
    grid = (min(triton.cdiv(rows, tile) if rows else triton.cdiv(n, THREADS), PROGRAMS_PER_SM * sms),)
    vector_add_v05_bulk_ring_kernel[grid](
        a, b, out, n, *descriptors, rows, rows * width,
        ROWS=tile, STAGES=STAGES, TAIL=THREADS, num_warps=NUM_WARPS,
    )  # fmt: skip
