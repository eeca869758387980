"""``out = a @ b`` for bf16 or fp16 operands, accumulated in fp32: the tensor cores' own product."""

from __future__ import annotations

from kernel_twins.ops import draws, ptx
from kernel_twins.ops.matmul import products, shared
from kernel_twins.spec import Case, Op, Prediction, Step, Where

_LAYOUT_GAP = "Triton's compiler swizzles shared memory and picks the instruction that reads it by itself."
_TUNING_GAP = "The constants of v05_grouped were chosen by the same search, by hand."
_TILE_GAP = "Triton's tiles have been as large since v05, and searched since v06."
_SPECIALIZED_GAP = "Triton pipelines loads by itself; roles by hand are for Gluon, see v16_gluon."
_WIDTHS_GAP = "Triton's tiles have sizes that are powers of two."
_CLUSTER_GAP = "Triton 3.6 has no multicast copy that a kernel could ask for."


# More tiles than an H100 has SMs, long sums behind few tiles, and few columns.
_MANY_TILES = tuple(
    Case.of(m, n, k, dtype="bf16", **variant)
    for m, n, k, variant in (
        (2_104, 2_200, 136, {}),
        (2_101, 2_203, 135, {"b": "col"}),
        (64, 4_096, 4_096, {}),
        (64, 4_096, 4_096, {"b": "col", "out": "fp32"}),
        (16, 1_000, 8_200, {"a": "col"}),
        (40, 20_000, 64, {}),
        (3, 128, 16_384, {"b": "col"}),
        (4_096, 5, 4_096, {"b": "col"}),
        (5_000, 33, 520, {"a": "col", "out": "fp32"}),
    )
)
# All steps are timed on the first, the last steps also on the others: many users' shapes, in both layouts of b.
_BENCH_CASES = tuple(
    Case.of(m, n, k, dtype=dtype, **variant)
    for m, n, k, dtype, variant in (
        (1_024, 1_024, 1_024, "bf16", {}),
        (2_048, 2_048, 2_048, "bf16", {}),
        (4_096, 4_096, 4_096, "bf16", {}),
        (8_192, 8_192, 8_192, "bf16", {}),
        (4_096, 4_096, 4_096, "bf16", {"b": "col"}),
        (8_192, 8_192, 8_192, "bf16", {"b": "col"}),
        (4_096, 4_096, 4_096, "fp16", {}),
        (4_095, 4_097, 4_096, "bf16", {}),
        (3_333, 5_555, 7_777, "bf16", {}),
    )
)
_WIDE_CASES = tuple(
    case
    for m, n, k in (
        (1_024, 1_024, 1_024),
        (2_048, 2_048, 2_048),
        (4_096, 4_096, 4_096),
        (6_144, 6_144, 6_144),
        (8_192, 8_192, 8_192),
        (16_384, 16_384, 16_384),
        (4_096, 14_336, 4_096),
        (4_096, 4_096, 14_336),
        (8_192, 28_672, 8_192),
        (8_192, 1_024, 8_192),
        (64, 4_096, 4_096),
        (128, 8_192, 8_192),
        (16, 14_336, 4_096),
        (4_096, 512, 16_384),
        (1_024, 5_120, 4_096),
        (1_000, 1_000, 1_000),
        (4_095, 4_097, 4_096),
        (3_333, 5_555, 7_777),
    )
    for case in (Case.of(m, n, k, dtype="bf16"), Case.of(m, n, k, dtype="bf16", b="col"))
    if case not in _BENCH_CASES
)
_FEW = Case.of(16, 14_336, 4_096, dtype="bf16", b="col")
_FITTED = Case.of(1_024, 5_120, 4_096, dtype="bf16", b="col")  # two rounds of 66 clusters of 128 x 160, but for four

OP = Op(
    name="matmul_bf16",
    family="matmul",
    chapter=5,
    title="Matmul, bf16",
    summary="`out = a @ b` for bf16 or fp16 with fp32 sums. The ladder is about keeping the tensor cores fed.",
    rounds="Tensor cores add to their fp32 sums, and cut off what these have no places for.",
    inputs=shared.inputs,
    hostile=True,
    draw=draws.products_of("bf16", "fp16"),
    outputs=shared.outputs,
    reference=shared.reference,
    check=shared.check_of("bf16", "fp16"),
    accepts=shared.accepts_of("bf16", "fp16"),
    test_cases=shared.test_cases("bf16", "fp16") + shared.fp32_out_test_cases("bf16", "fp16") + _MANY_TILES,
    bench_cases=_BENCH_CASES,
    wide_cases=_WIDE_CASES,
    headline_cases=(
        Case.of(4_096, 4_096, 4_096, dtype="bf16"),
        Case.of(8_192, 8_192, 8_192, dtype="bf16"),
        Case.of(4_096, 4_096, 4_096, dtype="fp16"),
        Case.of(4_095, 4_097, 4_096, dtype="bf16"),
    ),
    size_axis=shared.SQUARES,
    profile_case=Case.of(4_096, 4_096, 4_096, dtype="bf16"),
    ceiling="bf16",
    flops=shared.flops,
    bytes=shared.bytes_moved,
    baselines={
        "torch": products.torch_mm("cublas"),
        "cublaslt": products.torch_mm("cublaslt"),
        "compile": products.compiled_product(),
        "max_autotune": products.compiled_product("max-autotune-no-cudagraphs"),
    },
    baseline_cases={
        "max_autotune": tuple(
            Case.of(m, n, k, dtype="bf16")
            for m, n, k in ((4_096, 4_096, 4_096), (8_192, 8_192, 8_192), (4_095, 4_097, 4_096))
        )
    },
    behind={"cuda": ("v19_fitted_tiles", "v05_grouped"), "triton": ("v18_few_rows",)},
    steps=(
        Step(
            name="v01_naive",
            predictions=(
                Prediction("tensor_pipe", "<=", 0.1),
                Prediction("ceiling_share", "<=", 2),
            ),
        ),
        Step(
            name="v02_tensor_cores",
            predictions=(
                Prediction("time", "<=", 0.05, relative=True),
                Prediction("tensor_pipe", "<=", 50),
                Prediction("bank_conflicts", ">=", 20, backends=("cuda",)),
            ),
            promises={80: (ptx.MMA,), 90: (ptx.WGMMA,)},
        ),
        Step(
            name="v03_swizzled",
            predictions=(
                Prediction("bank_conflicts", "<=", 3),
                Prediction("time", "<=", 0.75, relative=True),
            ),
            no_triton=_LAYOUT_GAP,
        ),
        Step(
            name="v04_pipelined",
            predictions=(
                Prediction("time", "<=", 0.7, relative=True),
                Prediction("tensor_pipe", ">=", 45),
            ),
            promises={80: (ptx.COPY_16_BYTES,), 90: (ptx.COPY_16_BYTES, ptx.WGMMA)},
        ),
        Step(
            name="v05_grouped",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.04),
                Prediction("dram_bytes", "==", 1.0, relative=True, tolerance=0.15),
            ),
            promises={90: (ptx.COPY_16_BYTES, ptx.WGMMA)},
        ),
        Step(
            name="v06_autotuned",
            predictions=(
                Prediction("time", "<=", 0.85, relative=True),
                Prediction("tensor_pipe", ">=", 70),
            ),
            no_cuda=_TUNING_GAP,
            promises={80: (ptx.COPY_16_BYTES, ptx.MMA), 90: (ptx.WGMMA, ptx.COPY_16_BYTES)},
            spills=(80,),
        ),
        Step(
            name="v07_tma",
            predictions=(
                Prediction("time", "==", 1.35, relative=True, tolerance=0.2, backends=("cuda",)),
                Prediction("instructions", "<=", 0.3, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.97, relative=True, backends=("triton",)),
                Prediction("instructions", "<=", 0.7, relative=True, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.copyable,
            promises={90: (ptx.WGMMA, ptx.TMA_LOAD)},
        ),
        Step(
            name="v08_large_tile",
            predictions=(
                Prediction("time", "<=", 0.8, relative=True),
                Prediction("l2_bytes", "==", 0.5, relative=True, tolerance=0.1),
            ),
            no_triton=_TILE_GAP,
            arch="==9.0a",
            accepts=shared.copyable,
        ),
        Step(
            name="v09_warp_specialized",
            predictions=(
                Prediction("time", "<=", 0.9, relative=True),
                Prediction("tensor_pipe", ">=", 55),
            ),
            no_triton=_SPECIALIZED_GAP,
            arch="==9.0a",
            accepts=shared.copyable,
        ),
        Step(
            name="v10_two_consumers",
            predictions=(
                Prediction("time", "<=", 0.88, relative=True),
                Prediction("l2_bytes", "==", 0.75, relative=True, tolerance=0.1),
                Prediction("tensor_pipe", ">=", 65),
            ),
            no_triton=_SPECIALIZED_GAP,
            arch="==9.0a",
            accepts=shared.copyable,
        ),
        Step(
            name="v11_persistent",
            predictions=(Prediction("time", "<=", 0.98, relative=True),),
            arch="==9.0a",
            accepts=shared.copyable,
            promises={90: (ptx.WGMMA, ptx.TMA_LOAD)},
        ),
        Step(
            name="v12_multicast",
            predictions=(
                Prediction("time", "<=", 0.98, relative=True),
                Prediction("l2_bytes", "<=", 0.8, relative=True),
            ),
            no_triton=_CLUSTER_GAP,
            arch="==9.0a",
            accepts=shared.copyable,
        ),
        Step(
            name="v13_tma_store",
            predictions=(
                Prediction("time", "<=", 0.985, relative=True, backends=("cuda",)),
                Prediction("sectors_per_store", "==", 0, tolerance=0, backends=("cuda",)),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.03, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.copyable,
            promises={90: (ptx.WGMMA, ptx.TMA_LOAD, ptx.TMA_STORE)},
        ),
        Step(
            name="v14_hilbert",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("dram_bytes", "==", 1.0, relative=True, tolerance=0.15),
            ),
            no_triton="The order is arithmetic on the number of a tile, which is the same in both languages.",
            arch="==9.0a",
            accepts=shared.copyable,
        ),
        Step(
            name="v15_dispatch",
            predictions=(Prediction("time", "==", 1.0, relative=True, tolerance=0.02),),
            arch="==9.0a",
            fp32_out=True,
            wide=True,
            promises={90: (ptx.WGMMA,)},
            promises_where={
                90: (
                    Where("TMA", (True,), ptx.TMA_LOAD),
                    Where("TMA", (True,), ptx.TMA_STORE),
                    Where("TMA", (False,), ptx.COPY),
                    Where("SPLIT_K", (2, 4), ptx.TICKET),
                )
            },
        ),
        Step(
            name="v16_gluon",
            predictions=(
                Prediction("time", "==", 0.99, relative=True, tolerance=0.03),
                Prediction("tensor_pipe", ">=", 88),
            ),
            no_cuda="In CUDA C++ every step is explicit.",
            arch="==9.0a",
            accepts=shared.copyable_with_out,
            wide=True,
            promises={
                90: (
                    ptx.WGMMA_256_COLUMNS,
                    ptx.MORE_REGISTERS,
                    ptx.BARRIER_WAIT,
                    ptx.MATRIX_STORE,
                    ptx.PROXY_FENCE,
                    ptx.TMA_LOAD,
                    ptx.TMA_STORE,
                )
            },
        ),
        Step(
            name="v17_prologue",
            predictions=(Prediction("time", "==", 1.0, relative=True, tolerance=0.02),),
            no_cuda="CUDA's maps come with the launch since v07_tma, and v15_dispatch is set up early.",
            arch="==9.0a",
            fp32_out=True,
            wide=True,
            promises={90: (ptx.WGMMA, ptx.TMA_LOAD, ptx.TMA_STORE, ptx.EARLY)},
            promises_where={90: (Where("SPLIT_K", (2, 4), ptx.TICKET),)},
        ),
        Step(
            name="v18_few_rows",
            predictions=(
                Prediction("time", "<=", 0.9, relative=True, case=_FEW),
                Prediction("dram_bytes", "==", 1.0, relative=True, tolerance=0.1, case=_FEW),
            ),
            arch="==9.0a",
            fp32_out=True,
            wide=True,
            profile_case={"cuda": _FEW, "triton": _FEW},
            promises={90: (ptx.WGMMA, ptx.TMA_LOAD, ptx.TMA_STORE, ptx.EARLY)},
        ),
        Step(
            name="v19_fitted_tiles",
            predictions=(
                Prediction("time", "<=", 0.95, relative=True, case=_FITTED),
                Prediction("tensor_pipe", ">=", 70, case=_FITTED),
            ),
            no_triton=_WIDTHS_GAP,
            arch="==9.0a",
            fp32_out=True,
            wide=True,
            profile_case={"cuda": _FITTED},
            promises={90: (ptx.WGMMA, ptx.TMA_LOAD, ptx.TMA_STORE, ptx.EARLY)},
        ),
    ),
)
