"""``out = a @ b`` for fp32 operands on the tensor cores: three TF32 products with an error like fp32's.

An fp32 number is, but for its last bit, the sum of two TF32 numbers, ``big + small``. Of the four products of
two such sums, three matter: big * big, and the two of a big with a small.
"""

from __future__ import annotations

from kernel_twins.ops import ptx, size_axes
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
    size_axis=size_axes.SQUARES,
    profile_case=Case.of(4_096, 4_096, 4_096, dtype="fp32"),
    ceiling="fp32",
    flops=shared.flops,
    bytes=shared.bytes_moved,
    baselines={"torch": shared.torch_mm_fp32, "compile": compiled_product()},
    steps=(
        Step(
            name="v01_split",
            change="Every operand is split in two TF32 numbers; three products are summed by the tensor cores.",
            why="TF32 keeps ten bits of the mantissa and so does its remainder, which together are nearly fp32. The "
            "tensor cores round towards zero when they add, which over a long K would show: the checker refused a "
            "first draft that let them. So each short piece of K starts from zero and is added outside, by FADDs, "
            "which round to nearest. (Predicted after that trial.)",
            predictions=(
                Prediction("error_over_torch", "<=", 2),
                Prediction("tensor_pipe", "<=", 50),
            ),
            promises={80: (ptx.MMA_TF32,), 90: (ptx.WGMMA_TF32,)},
        ),
        Step(
            name="v02_lean_split",
            change="The instructions beside the products are cut to what is needed.",
            why="Splitting and adding take issue slots and latency from the tensor cores. In CUDA the small half is "
            "not rounded, as the tensor cores ignore what TF32 does not hold, and sums are added outside once in 32 "
            "of K; in Triton the split is written out, with half of the compiler's instructions.",
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
            why="Nobody waits for device memory any more; what remains beside the tensor cores is the splitting, two "
            "or three instructions for every element of a fragment.",
            predictions=(
                Prediction("time", "<=", 0.7, relative=True),
                Prediction("tensor_pipe", ">=", 55, backends=("cuda",)),
            ),
            promises={90: (ptx.WGMMA_TF32, ptx.COPY_16_BYTES)},
        ),
        Step(
            name="v04_autotuned",
            change="Tile shape, warps and stages are searched over a short list.",
            why="Larger tiles split fewer elements for each product but need more registers; the best compromise "
            "depends on the product.",
            predictions=(Prediction("time", "<=", 0.9, relative=True),),
            backends=("triton",),
            gap="The constants of v03_pipelined were chosen by the same search, by hand.",
            promises={90: (ptx.WGMMA_TF32, ptx.COPY_16_BYTES)},
            spills=(80,),
        ),
        Step(
            name="v05_wgmma",
            change="wgmma multiplies tiles in shared memory, which come by the tensor memory accelerator.",
            why="mma.sync reaches little more than half of a Hopper tensor core's rate, and every warp split the same "
            "elements again. A warpgroup's wgmma reads b's tile from shared memory, where it lies split: that is done "
            "once for all blocks.",
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
