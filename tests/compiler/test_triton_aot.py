"""Every Triton step compiles for both architectures without a GPU, fits them, and holds what it is about."""

from __future__ import annotations

import pytest

from kernel_twins import OPS, ops
from kernel_twins.compiler import aot
from kernel_twins.ops.ptx import TENSOR_CORES
from kernel_twins.spec import Case
from tests.compiled import SHARED_LIMIT, aligned_cases, compiled, of_list

pytest.importorskip("torch")
pytest.importorskip("triton")

CELLS = [
    pytest.param(op.name, step.name, arch, id=f"{op.name}-{step.name}-sm_{arch}")
    for op in OPS.values()
    for step in op.steps_of("triton")
    for arch in SHARED_LIMIT
    if step.runs_on(divmod(arch, 10))
]

PROMISED = [
    (op.name, step.name, arch, instruction)
    for op in OPS.values()
    for step in op.steps_of("triton")
    for arch, instructions in step.promises.items()
    for instruction in instructions
]
# And what only some configurations hold, at few tiles: many are never split.
PROMISED_WHERE = [
    (op.name, step.name, arch, *where)
    for op in OPS.values()
    for step in op.steps_of("triton")
    for arch, several in step.promises_where.items()
    for where in several
]
# These steps leave the call to a step before them, but at their own profile case: where multiples of 16 bytes are
# known, where Gluon serves it, and where neither rows nor columns are few.
LEFT_TO = {
    ("reduction_nd", "v06_dispatch"): "reduction_nd_v05_split_kernel",
    ("attention_backward", "v10_dispatch"): "attention_backward_v07_register_reduction_kernel",
    ("matmul_bf16", "v18_few_rows"): "matmul_bf16_v17_prologue_kernel",
    ("linear", "v02_few_rows"): "linear_v01_fused_kernel",
}
WITHOUT_TENSOR_CORES = [
    (op.name, step.name)
    for op in OPS.values()
    for step in op.steps_of("triton")
    if not any(TENSOR_CORES in instruction for instruction in step.promises.get(90, ()))
]


@pytest.mark.parametrize(("op", "step", "arch"), CELLS)
def test_step_compiles_and_fits(op: str, step: str, arch: int) -> None:
    own = ops.get(op).step(step).profile_case.get("triton")
    for case in aligned_cases(ops.get(op), ops.get(op).step(step)):
        calls = [call for call in of_list(op, step, arch) if call.case == case.slug]
        kernels = [kernel for call in calls for kernel in call.kernels]
        expected = LEFT_TO.get((op, step)) if case != own else None
        assert (expected or f"{op}_{step}_kernel") in {kernel.name for kernel in kernels}
        assert max(kernel.shared_bytes for kernel in kernels) <= SHARED_LIMIT[arch]
        if ops.get(op).step(step).finished:
            must_not = kernels
            if arch in ops.get(op).step(step).spills:  # never the first, which runs where nothing can be searched
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
    helpers = ops.get(op).step(step).helpers
    for call in of_list(op, step, arch):
        for kernel in call.kernels:
            assert kernel.name in helpers or instruction in kernel.instructions, f"{call.case}: no {instruction}"


@pytest.mark.parametrize(("op", "step", "arch", "name", "values", "instruction"), PROMISED_WHERE)
def test_configuration_holds_the_instruction_it_is_about(
    op: str, step: str, arch: int, name: str, values: tuple[int, ...], instruction: str
) -> None:
    wide = {case.slug for case in ops.get(op).wide_cases}
    calls = [call for call in of_list(op, step, arch) if call.case in wide and call.settings[name] in values]
    assert calls
    for call in calls:
        (kernel,) = call.kernels
        assert instruction in kernel.instructions, f"{call.case}: no {instruction} in {call.settings}"


@pytest.mark.parametrize(
    ("op", "step", "said"),
    [
        ("matmul_bf16", "v17_prologue", "a is 1 x 2147483648 and b 2147483648 x 1, all sizes must be below 2147483648"),
        ("matmul_bf16", "v18_few_rows", "a is 1 x 2147483648 and b 2147483648 x 1, all sizes must be below 2147483648"),
        ("linear", "v01_fused", "x is 1 x 2147483648 and weight 1 x 2147483648, all sizes must be below 2147483648"),
        ("linear", "v02_few_rows", "x is 1 x 2147483648 and weight 1 x 2147483648, all sizes must be below 2147483648"),
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
        assert all(TENSOR_CORES not in kernel.instructions for kernel in call.kernels), call.case
