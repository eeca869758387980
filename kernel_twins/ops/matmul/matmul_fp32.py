"""``out = a @ b`` in true fp32: products and sums on the FMA pipes, no TF32."""

from __future__ import annotations

from kernel_twins.ops import draws, ptx
from kernel_twins.ops.matmul import products, shared
from kernel_twins.spec import Case, Op, Prediction, Step

_REGISTER_GAP = (
    "Triton's compiler divides a block's tile among threads by itself; v05_register_tile_2d is the larger tile."
)
_LAYOUT_GAP = "Triton's compiler chooses the width of loads and the layout of warps by itself."
_TMA_GAP = "An IEEE tl.dot reads its operands from registers through plain loads, whoever fetched them."
_UNROLLING_GAP = "Triton's compiler unrolls and orders the FMAs of a tl.dot by itself."
_TUNING_GAP = "The constants of v09_pipelined were chosen by the same search, by hand."

_HEADLINE_CASES = tuple(
    Case.of(m, n, k, dtype="fp32") for m, n, k in ((4_096, 4_096, 4_096), (8_192, 8_192, 8_192), (3_333, 5_555, 7_777))
)
_BENCH_CASES = (
    Case.of(1_024, 1_024, 1_024, dtype="fp32"),
    Case.of(2_048, 2_048, 2_048, dtype="fp32"),
    *_HEADLINE_CASES,
)

OP = Op(
    name="matmul_fp32",
    family="matmul",
    chapter=3,
    title="Matmul, fp32",
    summary="`out = a @ b` with fp32 products and sums. Each element is used N or M times: the ladder is about reuse.",
    inputs=shared.inputs,
    hostile=True,
    draw=draws.products_of("fp32"),
    outputs=shared.outputs,
    reference=shared.reference,
    check=shared.check_of("fp32"),
    accepts=shared.accepts_of("fp32"),
    test_cases=shared.test_cases("fp32"),
    bench_cases=_BENCH_CASES,
    headline_cases=_HEADLINE_CASES,
    size_axis=shared.SQUARES,
    profile_case=Case.of(4_096, 4_096, 4_096, dtype="fp32"),
    ceiling="fp32",
    flops=shared.flops,
    bytes=shared.bytes_moved,
    baselines={"torch": products.torch_mm_fp32, "compile": products.compiled_product()},
    behind={"cuda": ("v12_short_loop", "v09_pipelined"), "triton": ("v10_autotuned",)},
    steps=(
        Step(
            name="v01_naive",
            predictions=(
                Prediction("sectors_per_load", "==", 16.5, tolerance=0.05, backends=("cuda",)),
                Prediction("fma_pipe", "<=", 10),
            ),
        ),
        Step(
            name="v02_coalesced",
            predictions=(
                Prediction("sectors_per_load", "==", 2.5, tolerance=0.05),
                Prediction("time", "<=", 0.2, relative=True),
            ),
            no_triton="Triton's compiler assigns lanes along the contiguous dimension by itself; there is nothing to "
            "change.",
        ),
        Step(
            name="v03_shared_tile",
            predictions=(
                Prediction("load_requests", "<=", 0.07, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.75, relative=True),
                Prediction("fma_pipe", "<=", 35, backends=("cuda",)),
            ),
            promises={90: (ptx.SHARED_LOAD,)},
        ),
        Step(
            name="v04_register_tile_1d",
            predictions=(
                Prediction("time", "<=", 0.6, relative=True),
                Prediction("fma_pipe", ">=", 25),
            ),
            no_triton=_REGISTER_GAP,
        ),
        Step(
            name="v05_register_tile_2d",
            predictions=(
                Prediction("time", "<=", 0.7, relative=True),
                Prediction("fma_pipe", ">=", 45, backends=("cuda",)),
            ),
            promises={90: (ptx.SHARED_LOAD_16_BYTES,)},
        ),
        Step(
            name="v06_vectorized",
            predictions=(
                Prediction("time", "<=", 0.85, relative=True),
                Prediction("instructions", "<=", 0.9, relative=True),
            ),
            no_triton=_LAYOUT_GAP,
        ),
        Step(
            name="v07_warp_tile",
            predictions=(
                Prediction("time", "<=", 0.95, relative=True),
                Prediction("bank_conflicts", "<=", 5),
            ),
            no_triton=_LAYOUT_GAP,
        ),
        Step(
            name="v08_grouped",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.03),
                Prediction("dram_bytes", "==", 1.0, relative=True, tolerance=0.15),
            ),
            promises={90: (ptx.SHARED_LOAD_16_BYTES,)},
        ),
        Step(
            name="v09_pipelined",
            predictions=(
                Prediction("time", "<=", 0.85, relative=True),
                Prediction("fma_pipe", ">=", 75, backends=("cuda",)),
            ),
            promises={80: (ptx.COPY_16_BYTES,), 90: (ptx.COPY_16_BYTES,)},
        ),
        Step(
            name="v10_autotuned",
            predictions=(Prediction("time", "<=", 0.9, relative=True),),
            no_cuda=_TUNING_GAP,
            promises={90: (ptx.COPY_16_BYTES,)},
        ),
        Step(
            name="v11_tma",
            predictions=(
                Prediction("time", "<=", 0.99, relative=True),
                Prediction("instructions", "<=", 0.98, relative=True),
                Prediction("fma_pipe", ">=", 80),
            ),
            no_triton=_TMA_GAP,
            arch="==9.0a",
        ),
        Step(
            name="v12_short_loop",
            predictions=(
                Prediction("time", "<=", 0.995, relative=True),
                Prediction("instruction_stalls", "<=", 0.8, relative=True),
            ),
            no_triton=_UNROLLING_GAP,
            arch="==9.0a",
        ),
    ),
)
