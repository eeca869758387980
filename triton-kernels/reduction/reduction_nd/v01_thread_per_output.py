"""reduction_nd v01_thread_per_output: a thread walks over all elements of its output.

Change:   none yet, this is where the ladder starts.
Why:      the definition, word for word, for any strides. The number of an element is divided by the size of every axis
          to find its address; all outputs of a program share these divisions, while in CUDA each thread has its own. If
          the kept axis is contiguous, neighbouring threads read neighbouring elements; along rows, every load of a warp
          touches 32 lines.
Error:    a running sum in fp32: at most R eps/2 sum|x|, and for random terms a quarter eps.
Counter:  dram_share stays low.
Requires: outputs of up to 2^16 elements each, which take a program tens of milliseconds.
Twin:     cuda-kernels/reduction/reduction_nd/v01_thread_per_output.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.reduction.reduction_nd.axes import count, split
from kernel_twins._triton.reduction.reduction_nd.totals import add, none, place_of, store

NUM_WARPS = 8
BLOCK = NUM_WARPS * 32


@triton.jit
def reduction_nd_v01_thread_per_output_kernel(
    x, out, kept_sizes, kept_strides, kept_steps, sizes, strides, steps, outputs: tl.int64, elements: tl.int64, divisor,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # x, out: addressed by the kept axes and the reduced axes. 2^31 outputs and more overflow 32 bits.
    output = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offset, step = place_of(output, kept_sizes, kept_strides, kept_steps)
    values, places = none((BLOCK,), KIND)
    for index in tl.range(0, elements):
        element, at = place_of(index, sizes, strides, steps)
        values, places = add(values, places, x + offset + element, at, output < outputs, KIND)
    store(out, step, values, places, divisor, output < outputs, KIND)


def reduction_nd_v01_thread_per_output(
    x: Tensor, *, out: Tensor, dims: tuple[int, ...] = (-1,), kind: str = "sum"
) -> None:
    """out = the sum of x over the axes dims, or mean, max or argmax; fp32, bf16 or fp16 in, argmax int64 out."""
    kept, reduced = split(x.shape, x.stride(), [dim % x.dim() for dim in dims], kind == "argmax")
    outputs, elements = count(kept), count(reduced)
    if outputs == 0:
        return
    divisor = float(elements) if kind == "mean" else 1.0
    reduction_nd_v01_thread_per_output_kernel[(triton.cdiv(outputs, BLOCK),)](
        x, out, *zip(*kept, strict=True), *zip(*reduced, strict=True), outputs, elements, divisor,
        KIND="sum" if kind == "mean" else kind, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
