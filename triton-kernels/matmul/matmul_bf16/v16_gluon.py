"""matmul_bf16 v16_gluon: one warp fetches, two warpgroups multiply, and every copy and barrier is written out.

Change:   Gluon, the language beneath Triton's, instead of Triton: the kernel, no longer the compiler, says which warps
          copy and which multiply, what lies where in shared memory, and which barrier each warp waits for.
Why:      one warp asks the copy engine for tiles up to STAGES ahead, across the borders of output tiles. Each warpgroup
          multiplies 64 x 256 at its own pace, so that one's tensor work hides the other's waits and stores, where a
          pipelined Triton kernel stops all eight warps at every step. The result leaves through a small staging
          buffer, which the copy engine drains while the next tile is multiplied.
Counter:  tensor_pipe rises above v13's.
Requires: matrices that the copy engine takes: contiguous rows (a and b: or columns), an address of a multiple of 16
          bytes, a pitch of a multiple of 8 elements. Any sizes: it reads zeros outside a matrix and writes nothing.
Twin:     none, see the spec. The scheme is that of CUDA's v13_tma_store without its clusters.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernel_twins._triton.lib.device import layout_of, sm_count

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(64)
STAGES = gl.constexpr(4)  # of 48 KiB
GROUP_M = gl.constexpr(8)
WARPGROUP_M = gl.constexpr(64)  # rows of a tile that one of the two warpgroups multiplies
PARTS = gl.constexpr(4)  # columns of a warpgroup's result leave in so many parts
BUFFERS = gl.constexpr(2)  # for one part each; beside four stages there is room for two
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _corner(tile, out_desc):
    # Within a group the tile's row varies fastest; the last group may have fewer rows.
    tiles_m = (out_desc.shape[0] - 1) // BLOCK_M + 1
    tiles_n = (out_desc.shape[1] - 1) // BLOCK_N + 1
    group = tile // (GROUP_M * tiles_n)
    within = tile % (GROUP_M * tiles_n)
    group_rows = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return (group * GROUP_M + within % group_rows) * BLOCK_M, within // group_rows * BLOCK_N


@gluon.jit
def _place(count):
    # The place in the ring of the stage with this number, and the parity of its barriers' phase. Unsigned, so that both
    # are bits of the count.
    return (count % STAGES).to(gl.int32), (count // STAGES % 2).to(gl.int32)


@gluon.jit
def _halves(values):
    # The columns' left and right half. Both lie in the same thread, so nothing moves.
    rows: gl.constexpr = values.shape[0]
    cols: gl.constexpr = values.shape[1] // 2
    return values.reshape(rows, 2, cols).permute(0, 2, 1).split()


@gluon.jit
def _produce(
    a_desc, b_desc, out_desc, a_ring, b_ring, full, empty, tiles, steps, A_COL: gl.constexpr, B_COL: gl.constexpr
):
    fetched = gl.to_tensor(0).to(gl.uint32)  # stages, over all tiles
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = _corner(tile, out_desc)
        for step in range(steps):
            k = step * BLOCK_K
            stage, phase = _place(fetched)
            # For both warpgroups to have multiplied this stage's tiles. The first time around there are none: the
            # barrier counts the phase before its first as complete.
            mbarrier.wait(empty.index(stage), phase ^ 1)
            # A tile that hangs over a matrix' edge is filled up with zeros, which count as bytes too.
            mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            a_corner = [k, row] if A_COL else [row, k]
            b_corner = [col, k] if B_COL else [k, col]
            tma.async_copy_global_to_shared(a_desc, a_corner, full.index(stage), a_ring.index(stage))
            tma.async_copy_global_to_shared(b_desc, b_corner, full.index(stage), b_ring.index(stage))
            fetched += 1


@gluon.jit
def _consume(
    out_desc, a_ring, b_ring, staging, full, empty, tiles, steps,
    FIRST_ROW: gl.constexpr, A_COL: gl.constexpr, B_COL: gl.constexpr,
):  # fmt: skip
    wgmma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    multiplied = gl.to_tensor(0).to(gl.uint32)  # stages, over all tiles
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        total = gl.zeros((WARPGROUP_M, BLOCK_N), gl.float32, wgmma)
        for step in range(steps):
            stage, phase = _place(multiplied)
            mbarrier.wait(full.index(stage), phase)
            a_tile, b_tile = a_ring.index(stage), b_ring.index(stage)
            if A_COL:
                a_tile = a_tile.permute((1, 0))
            if B_COL:
                b_tile = b_tile.permute((1, 0))
            a_rows = a_tile.slice(FIRST_ROW, WARPGROUP_M)  # [64, 64] times [64, 256]
            total = hopper.warpgroup_mma(a_rows, b_tile, total, use_acc=step > 0, is_async=True)
            # One step's products run on while the next step's are started. Those of the step before are done in all
            # four warps: the wait ends in a barrier of the warpgroup.
            total = hopper.warpgroup_mma_wait(1, deps=(total,))
            before, _ = _place(multiplied - 1)
            mbarrier.arrive(empty.index(before), pred=step > 0)
            multiplied += 1
        total = hopper.warpgroup_mma_wait(0, deps=(total,))
        before, _ = _place(multiplied - 1)
        mbarrier.arrive(empty.index(before))
        row, col = _corner(tile, out_desc)
        left, right = _halves(total.to(out_desc.dtype))
        parts = _halves(left) + _halves(right)
        for part in gl.static_range(PARTS):
            buffer = staging.index(part % BUFFERS)
            tma.store_wait(BUFFERS - 1)  # for the copy engine to have read this buffer
            buffer.store(parts[part])
            hopper.fence_async_shared()  # orders the threads' writes before its reads
            tma.async_copy_shared_to_global(out_desc, [row + FIRST_ROW, col + part * (BLOCK_N // PARTS)], buffer)
    tma.store_wait(0)  # shared memory ends with the program


@gluon.jit
def matmul_bf16_v16_gluon_kernel(a_desc, b_desc, out_desc, A_COL: gl.constexpr, B_COL: gl.constexpr):
    # a: [M, K], b: [K, N], out: [M, N] row-major. What is column-major is described as its transpose.
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, SWIZZLED)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, SWIZZLED)
    upper = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS] + out_desc.block_type.shape, SWIZZLED)
    lower = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS] + out_desc.block_type.shape, SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # one arrival of each warpgroup
    hopper.fence_async_shared()  # before the copy engine counts bytes on the barriers
    tiles = ((out_desc.shape[0] - 1) // BLOCK_M + 1) * ((out_desc.shape[1] - 1) // BLOCK_N + 1)
    steps = (a_desc.shape[0 if A_COL else 1] - 1) // BLOCK_K + 1
    gl.warp_specialize(
        [
            (_consume, (out_desc, a_ring, b_ring, upper, full, empty, tiles, steps, 0, A_COL, B_COL)),
            (_consume, (out_desc, a_ring, b_ring, lower, full, empty, tiles, steps, WARPGROUP_M, A_COL, B_COL)),
            (_produce, (a_desc, b_desc, out_desc, a_ring, b_ring, full, empty, tiles, steps, A_COL, B_COL)),
        ],
        worker_num_warps=[4, 1],  # of all but the first, which has the program's own four
        worker_num_regs=[CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _describe(name: str, matrix: Tensor, layout: str, block: list[int]) -> TensorDescriptor:
    if layout == "pointers" or (name, layout) == ("out", "col"):
        raise ValueError(
            f"{name} has strides {matrix.stride()} at address {matrix.data_ptr()}; rows (of a and b: or columns) must "
            "be contiguous, lie a multiple of 8 elements apart and start at a multiple of 16 bytes: pad it, or call "
            "v15_dispatch, which repacks"
        )
    if layout == "col":
        matrix, block = matrix.t(), block[::-1]
    return TensorDescriptor.from_tensor(matrix, block, SWIZZLED.value)


def matmul_bf16_v16_gluon(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], row- or column-major; out: [M, N], row-major; all bf16 or all fp16."""
    (M, K), N = a.shape, b.shape[1]
    if min(M, N, K) == 0:
        out.zero_()
        return
    block_m, block_n, block_k = BLOCK_M.value, BLOCK_N.value, BLOCK_K.value
    a_layout, b_layout = layout_of(a), layout_of(b)
    grid = (min(triton.cdiv(M, block_m) * triton.cdiv(N, block_n), sm_count(a.device)),)
    matmul_bf16_v16_gluon_kernel[grid](
        _describe("a", a, a_layout, [block_m, block_k]),
        _describe("b", b, b_layout, [block_k, block_n]),
        _describe("out", out, layout_of(out), [WARPGROUP_M.value, block_n // PARTS.value]),
        A_COL=a_layout == "col", B_COL=b_layout == "col", num_warps=4,
    )  # fmt: skip
