"""``out = a @ b`` for fp32 operands on the tensor cores: three TF32 products with an error like fp32's.

An fp32 number is, but for its last bit, the sum of two TF32 numbers, ``big + small``. The product of two such sums has
four products. Three matter: big * big, and the two of big * small.
"""

from __future__ import annotations

from dataclasses import replace

from kernel_twins.ops import ptx
from kernel_twins.ops.matmul.matmul_fp32 import OP as FP32
from kernel_twins.spec import Op, Prediction, Step

# The same products as those of the other ladder in fp32, so that they compare.
OP: Op = replace(
    FP32,
    name="matmul_tf32x3",
    chapter=4,
    title="Matmul, fp32 by three TF32 products",
    summary="`out = a @ b` in fp32, on the tensor cores: the ladder is about speed without losing fp32's accuracy. "
    "The ceiling is that of the FMA pipes, which it may pass.",
    draw=None,  # no public function uses its cases
    behind={},
    steps=(
        Step(
            name="v01_split",
            predictions=(
                Prediction("error_over_torch", "<=", 2),
                Prediction("tensor_pipe", "<=", 50),
            ),
            promises={80: (ptx.MMA_TF32,), 90: (ptx.WGMMA_TF32,)},
        ),
        Step(
            name="v02_lean_split",
            predictions=(
                Prediction("instructions", "<=", 0.8, relative=True),
                Prediction("time", "<=", 0.9, relative=True),
                Prediction("error_over_torch", "<=", 2),
            ),
            promises={80: (ptx.MMA_TF32,), 90: (ptx.WGMMA_TF32,)},
        ),
        Step(
            name="v03_pipelined",
            predictions=(
                Prediction("time", "<=", 0.7, relative=True),
                Prediction("tensor_pipe", ">=", 55, backends=("cuda",)),
            ),
            promises={90: (ptx.WGMMA_TF32, ptx.COPY_16_BYTES)},
        ),
        Step(
            name="v04_autotuned",
            predictions=(Prediction("time", "<=", 0.9, relative=True),),
            no_cuda="The constants of v03_pipelined were chosen by the same search, by hand.",
            promises={90: (ptx.WGMMA_TF32, ptx.COPY_16_BYTES)},
            spills=(80,),
        ),
        Step(
            name="v05_wgmma",
            predictions=(
                Prediction("time", "<=", 0.8, relative=True),
                Prediction("instructions", "<=", 0.6, relative=True),
                Prediction("error_over_torch", "<=", 2),
            ),
            no_triton="tl.dot has been wgmma on Hopper since v01.",
            arch="==9.0a",
            launches=2,  # b is split first
        ),
    ),
)
