"""``out = a @ b`` for fp32 operands on the tensor cores: three TF32 products with an error like fp32's.

An fp32 number is, but for its last bit, the sum of two TF32 numbers, ``big + small``. Of the four products of
two such sums, three matter: big * big, and the two of a big with a small.
"""

from __future__ import annotations

from kernel_twins.ops import ptx
from kernel_twins.ops.matmul import shared
from kernel_twins.ops.matmul.compiled import compiled_product
from kernel_twins.spec import Case, Op, Prediction, Step

OP = Op(
    name="matmul_tf32x3",
    family="matmul",
    chapter=4,
    title="Matmul, fp32 by three TF32 products",
    summary="`out = a @ b` in fp32, on the tensor cores: the ladder is about speed without losing fp32's accuracy. "
    "The ceiling is that of the FMA pipes, which it may pass.",
    inputs=shared.inputs,
    hostile=True,
    outputs=shared.outputs,
    reference=shared.reference,
    check=shared.check_of("fp32"),
    accepts=shared.accepts_of("fp32"),
    test_cases=shared.test_cases("fp32"),
    bench_cases=shared.FP32_BENCH_CASES,
    headline_cases=shared.FP32_HEADLINE_CASES,
    size_axis=shared.SQUARES,
    profile_case=Case.of(4_096, 4_096, 4_096, dtype="fp32"),
    ceiling="fp32",
    flops=shared.flops,
    bytes=shared.bytes_moved,
    baselines={"torch": shared.torch_mm_fp32, "compile": compiled_product()},
    steps=(
        Step(
            name="v01_split",
            change="Every operand is split in two TF32 numbers; three products are summed by the tensor cores.",
            predictions=(
                Prediction("error_over_torch", "<=", 2),
                Prediction("tensor_pipe", "<=", 50),
            ),
            promises={80: (ptx.MMA_TF32,), 90: (ptx.WGMMA_TF32,)},
        ),
        Step(
            name="v02_lean_split",
            change="The instructions beside the products are cut to what is needed.",
            predictions=(
                Prediction("instructions", "<=", 0.8, relative=True),
                Prediction("time", "<=", 0.9, relative=True),
                Prediction("error_over_torch", "<=", 2),
            ),
            promises={80: (ptx.MMA_TF32,), 90: (ptx.WGMMA_TF32,)},
        ),
        Step(
            name="v03_pipelined",
            change="Tiles arrive by cp.async several stages ahead, and blocks are numbered in groups.",
            predictions=(
                Prediction("time", "<=", 0.7, relative=True),
                Prediction("tensor_pipe", ">=", 55, backends=("cuda",)),
            ),
            promises={90: (ptx.WGMMA_TF32, ptx.COPY_16_BYTES)},
        ),
        Step(
            name="v04_autotuned",
            change="Tile shape, warps and stages are searched over a short list.",
            predictions=(Prediction("time", "<=", 0.9, relative=True),),
            backends=("triton",),
            gap="The constants of v03_pipelined were chosen by the same search, by hand.",
            promises={90: (ptx.WGMMA_TF32, ptx.COPY_16_BYTES)},
            spills=(80,),
        ),
        Step(
            name="v05_wgmma",
            change="wgmma multiplies tiles in shared memory, which come by the tensor memory accelerator.",
            predictions=(
                Prediction("time", "<=", 0.8, relative=True),
                Prediction("instructions", "<=", 0.6, relative=True),
                Prediction("error_over_torch", "<=", 2),
            ),
            backends=("cuda",),
            gap="tl.dot has been wgmma on Hopper since v01.",
            arch="==9.0a",
            launches=2,  # b is split first
        ),
    ),
)
