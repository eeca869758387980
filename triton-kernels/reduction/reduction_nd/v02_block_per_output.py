"""reduction_nd v02_block_per_output: the threads of a program share an output's elements.

Change:   a program loads its output's elements in blocks of 1024, and reduces them to one at the end.
Why:      along rows, neighbouring threads now read neighbouring elements, one or two lines a load. Down columns it is
          the other way round: a load brings a sector of 16 columns for one of them, and the programs of the other
          columns find it in L2 if they come soon. Addresses take a division for each axis except the outermost. A
          single axis needs none, so the compiler sees contiguous elements and uses wide loads.
Error:    at most (R / 1024 + 11) eps/2 sum|x|.
Counter:  along rows the time falls; over the middle axis it rises.
Requires: nothing. If an output has few elements, most of its program is idle.
Twin:     cuda-kernels/reduction/reduction_nd/v02_block_per_output.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.reduction.reduction_nd.axes import count, split
from kernel_twins._triton.reduction.reduction_nd.totals import add, none, place_of, reduce, store

NUM_WARPS = 8
BLOCK = 1024
MOST_PROGRAMS = 2**31 - 1


@triton.jit
def reduction_nd_v02_block_per_output_kernel(
    x, out, kept_sizes, kept_strides, kept_steps, sizes, strides, steps, outputs: tl.int64, elements: tl.int64, divisor,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # x, out: addressed by the kept axes and the reduced axes. If there are more outputs than a grid has programs,
    # programs loop.
    for output in tl.range(tl.program_id(0), outputs, tl.num_programs(0)):
        offset, step = place_of(output, kept_sizes, kept_strides, kept_steps)
        values, places = none((BLOCK,), KIND)
        for start in tl.range(0, elements, BLOCK):
            index = start + tl.arange(0, BLOCK)
            element, at = place_of(index, sizes, strides, steps)
            values, places = add(values, places, x + offset + element, at, index < elements, KIND)
        value, place = reduce(values, places, 0, KIND)
        store(out, step, value, place, divisor, None, KIND)


def reduction_nd_v02_block_per_output(
    x: Tensor, *, out: Tensor, dims: tuple[int, ...] = (-1,), kind: str = "sum"
) -> None:
    """out = the sum of x over the axes dims, or mean, max or argmax; fp32, bf16 or fp16 in, argmax int64 out."""
    kept, reduced = split(x.shape, x.stride(), [dim % x.dim() for dim in dims], kind == "argmax")
    outputs, elements = count(kept), count(reduced)
    if outputs == 0:
        return
    divisor = float(elements) if kind == "mean" else 1.0
    reduction_nd_v02_block_per_output_kernel[(min(outputs, MOST_PROGRAMS),)](
        x, out, *zip(*kept, strict=True), *zip(*reduced, strict=True), outputs, elements, divisor,
        KIND="sum" if kind == "mean" else kind, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
