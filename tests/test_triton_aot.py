"""Every Triton step compiles for both architectures without a GPU, fits them, and holds what it is about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from kernel_twins import OPS, aot, disassembly, ops
from kernel_twins.spec import Case, Op, Step
from tests import forks

pytest.importorskip("torch")
pytest.importorskip("triton")

SHARED_LIMIT = {80: 166_912, 90: 232_448}  # bytes of shared memory that a block can have

CELLS = [
    pytest.param(op.name, step.name, arch, id=f"{op.name}-{step.name}-sm_{arch}")
    for op in OPS.values()
    for step in op.steps_of("triton")
    for arch in SHARED_LIMIT
    if step.runs_on(divmod(arch, 10))
]

TMA_LOAD = r"cp\.async\.bulk\.tensor\S*\.mbarrier"
TMA_STORE = r"cp\.async\.bulk\.tensor\S*\.bulk_group"
# The next kernel is let in, the one before waited for, and only then is anything touched.
_UNTOUCHED = r"(?:(?!cp\.async\.bulk|(?:ld|st|atom|red)\.global).)*"
EARLY = rf"(?s)\A{_UNTOUCHED}launch_dependents{_UNTOUCHED}griddepcontrol\.wait"

PROMISED = [
    ("vector_add", "v03_vectorized", 80, r"ld\.global\.v4\.b32"),
    ("vector_add", "v03_vectorized", 90, r"ld\.global\.v4\.b32"),
    ("vector_add", "v04_streaming", 90, r"ld\.global\.L1::evict_first\S*\.v4\.b32"),
    ("vector_add", "v05_bulk_ring", 90, TMA_LOAD),
    ("vector_add", "v06_bulk_tile", 90, TMA_LOAD),
    ("reduction", "v04_vectorized", 90, r"ld\.global\.v4\.b32"),
    ("reduction", "v05_grid_stride", 90, r"ld\.global\.v4\.b32"),
    ("reduction", "v06_atomic", 90, r"ld\.global\.v4\.b32"),
    ("reduction", "v06_atomic", 90, r"atom\.global\.gpu\.relaxed\.add\.f32"),
    ("reduction", "v07_last_block", 90, r"ld\.global\.v4\.b32"),
    ("reduction", "v07_last_block", 90, r"atom\.global\.gpu\.acq_rel\.add\.u32"),
    ("reduction", "v07_last_block", 90, r"ld\.global\.cg\.b32"),
    ("reduction_nd", "v04_vectorized", 80, r"ld\.global\.v4\.b32"),
    ("reduction_nd", "v04_vectorized", 90, r"ld\.global\.v4\.b32"),
    ("matmul_fp32", "v03_shared_tile", 90, r"ld\.shared"),
    ("matmul_fp32", "v05_register_tile_2d", 90, r"ld\.shared\.v4"),
    ("matmul_fp32", "v08_grouped", 90, r"ld\.shared\.v4"),
    ("matmul_fp32", "v09_pipelined", 80, r"cp\.async\.cg"),
    ("matmul_fp32", "v09_pipelined", 90, r"cp\.async\.cg"),
    ("matmul_fp32", "v10_autotuned", 90, r"cp\.async\.cg"),
    ("matmul_tf32x3", "v01_split", 80, r"mma\.sync\S*\.tf32"),
    ("matmul_tf32x3", "v01_split", 90, r"wgmma\.mma_async\S*\.tf32"),
    ("matmul_tf32x3", "v02_lean_split", 80, r"mma\.sync\S*\.tf32"),
    ("matmul_tf32x3", "v02_lean_split", 90, r"wgmma\.mma_async\S*\.tf32"),
    ("matmul_tf32x3", "v03_pipelined", 90, r"wgmma\.mma_async\S*\.tf32"),
    ("matmul_tf32x3", "v03_pipelined", 90, r"cp\.async\.cg"),
    ("matmul_tf32x3", "v04_autotuned", 90, r"wgmma\.mma_async\S*\.tf32"),
    ("matmul_tf32x3", "v04_autotuned", 90, r"cp\.async\.cg"),
    ("matmul_bf16", "v02_tensor_cores", 80, r"mma\.sync"),
    ("matmul_bf16", "v02_tensor_cores", 90, r"wgmma\.mma_async"),
    ("matmul_bf16", "v04_pipelined", 80, r"cp\.async\.cg"),
    ("matmul_bf16", "v04_pipelined", 90, r"cp\.async\.cg"),
    ("matmul_bf16", "v04_pipelined", 90, r"wgmma\.mma_async"),
    ("matmul_bf16", "v05_grouped", 90, r"cp\.async\.cg"),
    ("matmul_bf16", "v05_grouped", 90, r"wgmma\.mma_async"),
    ("matmul_bf16", "v06_autotuned", 80, r"cp\.async\.cg"),
    ("matmul_bf16", "v06_autotuned", 80, r"mma\.sync"),
    ("matmul_bf16", "v06_autotuned", 90, r"wgmma\.mma_async"),
    ("matmul_bf16", "v06_autotuned", 90, r"cp\.async\.cg"),
    ("matmul_bf16", "v07_tma", 90, r"wgmma\.mma_async"),
    ("matmul_bf16", "v07_tma", 90, TMA_LOAD),
    ("matmul_bf16", "v11_persistent", 90, r"wgmma\.mma_async"),
    ("matmul_bf16", "v11_persistent", 90, TMA_LOAD),
    ("matmul_bf16", "v13_tma_store", 90, r"wgmma\.mma_async"),
    ("matmul_bf16", "v13_tma_store", 90, TMA_LOAD),
    ("matmul_bf16", "v13_tma_store", 90, TMA_STORE),
    ("matmul_bf16", "v15_dispatch", 90, r"wgmma\.mma_async"),
    ("matmul_bf16", "v16_gluon", 90, r"wgmma\.mma_async\S*\.m64n256k16"),
    ("matmul_bf16", "v16_gluon", 90, r"setmaxnreg\.inc"),
    ("matmul_bf16", "v16_gluon", 90, r"mbarrier\.try_wait"),
    ("matmul_bf16", "v16_gluon", 90, r"stmatrix"),
    ("matmul_bf16", "v16_gluon", 90, r"fence\.proxy\.async"),
    ("matmul_bf16", "v16_gluon", 90, TMA_LOAD),
    ("matmul_bf16", "v16_gluon", 90, TMA_STORE),
    ("matmul_bf16", "v17_prologue", 90, r"wgmma\.mma_async"),
    ("matmul_bf16", "v17_prologue", 90, TMA_LOAD),
    ("matmul_bf16", "v17_prologue", 90, TMA_STORE),
    ("matmul_bf16", "v17_prologue", 90, EARLY),
    ("linear", "v01_fused", 90, r"wgmma\.mma_async"),
    ("linear", "v01_fused", 90, TMA_LOAD),
    ("linear", "v01_fused", 90, TMA_STORE),
    ("linear", "v01_fused", 90, EARLY),
    ("dropout_add", "v02_four_words", 80, r"ld\.global\S*\.v4\.b32"),
    ("dropout_add", "v02_four_words", 90, r"ld\.global\S*\.v4\.b32"),
]
# And what only the configurations hold whose values are among these, at few tiles: many are never split.
PROMISED_WHERE = [
    ("matmul_bf16", "v15_dispatch", 90, "TMA", (True,), TMA_LOAD),
    ("matmul_bf16", "v15_dispatch", 90, "TMA", (True,), TMA_STORE),
    ("matmul_bf16", "v15_dispatch", 90, "TMA", (False,), r"cp\.async\.c[ag]"),
    ("matmul_bf16", "v15_dispatch", 90, "SPLIT_K", (2, 4), r"atom\.global\.gpu\.acq_rel\.add\.u32"),
    ("matmul_bf16", "v17_prologue", 90, "SPLIT_K", (2, 4), r"atom\.global\.gpu\.acq_rel\.add\.u32"),
]
# Of these lists some entries spill, and the search passes over them; never the first, which runs where nothing can be
# searched, nor what the reference GPU runs.
SPILLING = [
    ("matmul_tf32x3", "v04_autotuned", 80),
    ("matmul_bf16", "v06_autotuned", 80),
    ("layer_norm", "v06_cooperative", 90),  # one register, of rows side by side, where 64 are rationed
]
TENSOR_CORES = "mma"
WITHOUT_TENSOR_CORES = [
    ("matmul_fp32", "v01_naive"),
    ("matmul_fp32", "v03_shared_tile"),
    ("matmul_fp32", "v05_register_tile_2d"),
    ("matmul_fp32", "v08_grouped"),
    ("matmul_fp32", "v09_pipelined"),
    ("matmul_fp32", "v10_autotuned"),
    ("matmul_bf16", "v01_naive"),
]


def aligned_cases(op: Op, step: Step) -> list[Case]:
    """For every dtype and variant that a step is timed on, the last case whose sizes all tiles divide.

    Of the wide cases that is one with few tiles, among which every split of K is possible.
    """
    even = [case for case in op.timed_cases if op.times(step, case) and all(n % 512 == 0 for n in case.shape)]
    return list({(case.dtype, case.variant): case for case in even}.values())


def odd_cases(op: Op, step: Step) -> list[Case]:
    """The timed cases with an odd size that a step serves, or the largest such test case."""
    timed, tested = (
        [case for case in cases if op.serves(step, case) and any(n % 2 for n in case.shape)]
        for cases in (op.bench_cases, op.test_cases)
    )
    return timed or [max(tested, key=op.bytes)]


@dataclass(frozen=True)
class Kernel:
    """What the tests ask of a kernel: its ``promises`` are the instructions of its step that its PTX holds."""

    name: str
    shared_bytes: int
    stack_bytes: int
    promises: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """What one call launches, by a configuration, or by what the reference GPU runs."""

    case: str
    odd: bool
    reference: bool
    settings: dict[str, Any]
    kernels: tuple[Kernel, ...]


@cache
def compiled(op: str, step: str, arch: int) -> list[Compiled]:
    """All that the tests ask of a step, compiled once: in a process of its own, as the compiler keeps its memory."""
    calls = forks.call("tests.test_triton_aot", "compile_all", op, step, arch)
    return [Compiled(**call | {"kernels": tuple(Kernel(*each) for each in call["kernels"])}) for call in calls]


def compile_all(name: str, step_name: str, arch: int) -> list[dict[str, Any]]:
    op = ops.get(name)
    step = op.step(step_name)
    instructions = [promise[3] for promise in PROMISED if promise[:3] == (name, step_name, arch)]
    instructions += [promise[5] for promise in PROMISED_WHERE if promise[:3] == (name, step_name, arch)]
    instructions += [TENSOR_CORES] if (name, step_name) in WITHOUT_TENSOR_CORES else []

    def call(case: Case, odd: bool, config: Any = None, reference: bool = False) -> dict[str, Any]:
        kernels = [
            (each.name, each.metadata.shared, stack_bytes(each), held(each.asm["ptx"], instructions))
            for each in aot.compiled(op, step, case, arch, config)
        ]
        settings = config.kwargs if config else {}
        return {"case": case.slug, "odd": odd, "reference": reference, "settings": settings, "kernels": kernels}

    calls = [
        call(case, odd, config)
        for odd, cases in ((False, aligned_cases(op, step)), (True, odd_cases(op, step)))
        for case in cases
        for config in aot.configs(op, step)
    ]
    return calls + [call(case, False, reference=True) for case in aligned_cases(op, step)]


def held(ptx: str, instructions: list[str]) -> list[str]:
    return [instruction for instruction in instructions if re.search(instruction, ptx)]


def stack_bytes(kernel: Any) -> int:
    """Bytes of local memory a thread, which is where registers spill to."""
    with aot.cubin(kernel) as cubin:
        return disassembly.resource_usage(cubin)[kernel.name].stack_bytes


def of_list(op: str, step: str, arch: int, odd: bool = False) -> list[Compiled]:
    """By every configuration that the step may be tuned to."""
    return [call for call in compiled(op, step, arch) if not call.reference and call.odd == odd]


@pytest.mark.parametrize(("op", "step", "arch"), CELLS)
def test_step_compiles_and_fits(op: str, step: str, arch: int) -> None:
    for case in aligned_cases(ops.get(op), ops.get(op).step(step)):
        calls = [call for call in of_list(op, step, arch) if call.case == case.slug]
        kernels = [kernel for call in calls for kernel in call.kernels]
        assert f"{op}_{step}_kernel" in {kernel.name for kernel in kernels}
        assert max(kernel.shared_bytes for kernel in kernels) <= SHARED_LIMIT[arch]
        if ops.get(op).step(step).finished:
            must_not = kernels
            if (op, step, arch) in SPILLING:
                (reference,) = (each for each in compiled(op, step, arch) if each.reference and each.case == case.slug)
                must_not = [kernels[0], *reference.kernels]
            spilled = [kernel.stack_bytes for kernel in must_not]
            assert max(spilled) == 0, f"{case.slug}: registers spill, {spilled} bytes"


@pytest.mark.parametrize(("op", "step", "arch"), CELLS)
def test_step_compiles_for_odd_sizes(op: str, step: str, arch: int) -> None:
    kernels = [kernel for call in of_list(op, step, arch, odd=True) for kernel in call.kernels]
    assert kernels
    assert max(kernel.shared_bytes for kernel in kernels) <= SHARED_LIMIT[arch]


@pytest.mark.parametrize(("op", "step", "arch", "instruction"), PROMISED)
def test_step_holds_the_instruction_it_is_about(op: str, step: str, arch: int, instruction: str) -> None:
    for call in of_list(op, step, arch):
        for kernel in call.kernels:
            assert instruction in kernel.promises, f"{call.case}: no {instruction}"


@pytest.mark.parametrize(("op", "step", "arch", "name", "values", "instruction"), PROMISED_WHERE)
def test_configuration_holds_the_instruction_it_is_about(
    op: str, step: str, arch: int, name: str, values: tuple[int, ...], instruction: str
) -> None:
    wide = {case.slug for case in ops.get(op).wide_cases}
    calls = [call for call in of_list(op, step, arch) if call.case in wide and call.settings[name] in values]
    assert calls
    for call in calls:
        (kernel,) = call.kernels
        assert instruction in kernel.promises, f"{call.case}: no {instruction} in {call.settings}"


@pytest.mark.parametrize(
    ("op", "step", "said"),
    [
        ("matmul_bf16", "v17_prologue", "a is 1 x 2147483648 and b 2147483648 x 1, all sizes must be below 2147483648"),
        ("linear", "v01_fused", "x is 1 x 2147483648 and weight 1 x 2147483648, all sizes must be below 2147483648"),
    ],
)
def test_sizes_that_descriptors_cannot_count_are_refused(op: str, step: str, said: str) -> None:
    spec = ops.get(op)
    with pytest.raises(ValueError, match=said):
        aot.compiled(spec, spec.step(step), Case.of(1, 1, 2**31, dtype="bf16"))


@pytest.mark.parametrize(("op", "step"), WITHOUT_TENSOR_CORES)
def test_step_leaves_the_tensor_cores_alone(op: str, step: str) -> None:
    calls = of_list(op, step, 90)
    assert calls
    for call in calls:
        assert all(TENSOR_CORES not in kernel.promises for kernel in call.kernels), call.case
