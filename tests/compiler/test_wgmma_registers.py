"""No compiled kernel writes to a register that a wgmma may still read: by small listings, and by every such kernel."""

from __future__ import annotations

import pytest

from kernel_twins import OPS
from kernel_twins.compiler import disassembly, wgmma_hazards
from kernel_twins.compiler.wgmma_hazards import Listing, Overwrite, overwrites
from kernel_twins.ops.ptx import WGMMA, WGMMA_FROM_REGISTERS, WGMMA_TF32
from kernel_twins.spec import Op, Step
from tests.compiled import compiled
from tests.hazards import Overwrites

STEPS = [
    pytest.param(op, step, id=f"{op.name}-{step.name}")
    for op in OPS.values()
    if any(WGMMA in instruction for step in op.steps for instruction in step.promises.get(90, ()))
    for step in op.steps_of("triton")
]

START = "HGMMA.64x64x8.F32.TF32 R24, R120, gdesc[UR28], R24, gsb0"  # reads R120 to R123
OTHER = "HGMMA.64x64x8.F32.TF32 R56, R128, gdesc[UR28], R56, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
WRITE = "IMAD.MOV.U32 R121, RZ, RZ, R5"


def listing(*texts: str) -> Listing:
    return [(i * 16, text) for i, text in enumerate((*texts, "EXIT"))]


def writes(*texts: str) -> list[int]:
    """Which of the instructions write to a register that a wgmma may be reading."""
    return sorted({found.write // 16 for found in overwrites(listing(*texts))})


# ----------------------------------------------------------------------------------------------------------------------
# The rules
# ----------------------------------------------------------------------------------------------------------------------


def test_a_write_before_the_wait_is_found_and_one_after_it_is_not() -> None:
    assert overwrites(listing(START, WRITE, WAIT)) == [Overwrite(0, 16, 121)]
    assert writes(START, WAIT, WRITE) == []
    assert writes(WRITE, START, WAIT) == []


@pytest.mark.parametrize("written", [f"IMAD.MOV.U32 R{r}, RZ, RZ, R5" for r in (119, 124)])
def test_the_registers_beside_the_operand_are_free(written: str) -> None:
    assert writes(START, written, WAIT) == []


def test_a_predicated_write_counts_and_a_predicated_wait_does_not() -> None:
    assert writes(START, f"@!P0 {WRITE}", WAIT) == [1]
    assert writes(START, f"@P0 {WAIT}", WRITE) == [2]


def test_a_wait_covers_the_groups_before_those_that_may_go_on() -> None:
    assert writes(START, WAIT_BUT_ONE, WRITE) == [2]
    assert writes(START, OTHER, WAIT_BUT_ONE, WRITE, "MOV R130, R5") == [4]
    assert writes(START, OTHER, WAIT_BUT_ONE, WAIT, WRITE, "MOV R130, R5") == []


def test_a_group_is_what_was_started_since_the_one_before() -> None:
    open_, empty = START.removesuffix(", gsb0"), "HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0"
    assert writes(open_, WAIT, WRITE) == [2]
    assert writes(open_, empty, WAIT, WRITE) == []
    assert writes(open_, OTHER, WAIT_BUT_ONE, WRITE) == [3]
    assert writes(open_, OTHER, empty, WAIT_BUT_ONE, WRITE) == []
    assert writes(START, f"@P0 {OTHER}", WAIT_BUT_ONE, WRITE) == [3]


def test_a_write_at_a_loops_head_is_found_behind_its_back_edge() -> None:
    assert writes("NOP", WRITE, START, "@P0 BRA 0x10", WAIT) == [1]
    assert writes("NOP", WRITE, START, WAIT, "@P0 BRA 0x10") == []
    assert writes("NOP", WAIT_BUT_ONE, WRITE, START, "@P0 BRA 0x10", WAIT) == [2]
    assert writes("NOP", WRITE, START, OTHER, WAIT_BUT_ONE, "@P0 BRA 0x10", WAIT) == []


def test_every_path_counts() -> None:
    skipped = START, "@P0 BRA 0x30", WAIT, WRITE
    assert writes(*skipped) == [3]
    assert writes(START, "BRA 0x30", WRITE, WAIT) == []
    assert writes(START, "@P0 BRA P1, 0x40", WAIT, "BRA 0x50", WRITE, WAIT) == [4]
    assert writes(START, "BRA.DIV UR4, 0x40", WAIT, "EXIT", WRITE, WAIT) == [4]
    assert writes(START, "WARPSYNC.COLLECTIVE R6, 0x40", WAIT, "EXIT", WRITE, WAIT) == [4]
    called = "CALL.REL.NOINC 0x50", WAIT, "EXIT", "NOP", WRITE, "RET.REL.NODEC R8 0x0"
    assert writes(START, *called) == [5]
    assert writes("CALL.REL.NOINC 0x40", WRITE, WAIT, "EXIT", START, "RET.REL.NODEC R8 0x0") == [1]


def test_a_jump_to_nobody_knows_where_is_refused_while_a_wgmma_may_be_running() -> None:
    assert writes(START, WAIT, "BRX R2 -0x1230") == []
    with pytest.raises(ValueError, match=r"^'BRX R2 -0x1230' at 0x10 goes nobody knows where"):
        writes(START, "BRX R2 -0x1230")


@pytest.mark.parametrize(
    "text",
    [
        "LDS.128 R120, [R5]",
        "LDG.E.128 R120, desc[UR4][R2.64]",
        "LDG.E.64 R120, desc[UR4][R2.64]",
        "LDSM.16.M88.4 R118, [R5]",
        "LDSM.16.MT88.2 R120, [R5]",
        "IMAD.WIDE.U32 R120, R5, R6, RZ",
        "CS2R R120, SRZ",
        "DFMA R120, R2, R4, R6",
        "F2F.F64.F32 R120, R2",
        "SHFL.BFLY PT, R121, R4, 0x1, 0x1f",
        "LOP3.LUT P0, R121, R4, R5, RZ, 0xc0, !PT",
        "ATOMG.E.CAS.STRONG.GPU PT, R121, desc[UR4][R2], R4, R5",
        "HMMA.16816.F32.BF16 R120, R4, R8, R120",
        "HGMMA.64x128x16.F32.BF16 R64, gdesc[UR4], R64",
        "HGMMA.64x256x16.F16 R60, gdesc[UR4], R60",
    ],
)
def test_destinations_are_as_wide_as_the_instruction_says(text: str) -> None:
    assert writes(START, text, WAIT) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "STS.128 [R120], R120",
        "STG.E.128 desc[UR4][R120.64], R120",
        "RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R121",
        "ISETP.GE.AND P0, PT, R121, R5, PT",
        "FSETP.GT.AND P0, PT, R121, RZ, PT",
        "R2UR UR4, R121",
        "BAR.SYNC.DEFER_BLOCKING R121, 0x80",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R121+URZ], R120",
        "LDGSTS.E.BYPASS.128 [R121], desc[UR4][R120.64]",
        "HGMMA.64x64x8.F32.TF32 R24, R120.reuse, gdesc[UR28], R24",
        "HGMMA.64x128x16.F32.BF16 R128, gdesc[UR4], R128",
        "FADD R124, R121, R122",
        "CS2R.32 R119, SR_CLOCKLO",
        "F2I.TRUNC.NTZ R119, R121",
    ],
)
def test_what_only_reads_the_operand_is_no_write(text: str) -> None:
    assert writes(START, text, WAIT) == []


# ----------------------------------------------------------------------------------------------------------------------
# The kernels
# ----------------------------------------------------------------------------------------------------------------------


def test_no_cuda_kernel_overwrites_what_a_wgmma_reads() -> None:
    libraries = disassembly.find_extensions()
    if not libraries:
        pytest.skip("the extension is not built")
    kernels = disassembly.of_all(libraries, wgmma_hazards.kernels)
    if not kernels and not disassembly.resource_usage(libraries[0], disassembly.ARCH):
        pytest.skip("the extension was not built for 9.0a")
    names = {disassembly.short_name(symbol) for symbol in kernels}
    assert {f"matmul_tf32x3_v05_wgmma_kernel<{n}>" for n in (64, 128)} <= names
    for symbol, given in kernels.items():
        assert wgmma_hazards.reads_registers(given)
        name = disassembly.short_name(symbol)
        alone = "6WantedL" in symbol and "6WantedLb1ELb1ELb1E" not in symbol  # some of the gradients
        Overwrites.of(given).require_none(name, alternates=name.startswith("attention_"), has_few=alone)


@pytest.mark.parametrize(("op", "step"), STEPS)
def test_no_triton_kernel_overwrites_what_a_wgmma_reads(op: Op, step: Step) -> None:
    """Triton takes a left operand from registers where it is computed, as TF32 parts and exponentials are."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    kernels = [kernel for call in compiled(op.name, step.name, 90) for kernel in call.kernels]
    kernels = [kernel for kernel in kernels if kernel.name not in step.helpers]
    assert kernels
    from_registers = not {WGMMA_TF32, WGMMA_FROM_REGISTERS}.isdisjoint(step.promises.get(90, ()))
    for kernel in kernels:
        assert (kernel.overwrites is not None) == from_registers, kernel.name
        if kernel.overwrites is not None:
            alternates = WGMMA_FROM_REGISTERS in step.promises[90]
            kernel.overwrites.require_none(kernel.name, alternates=alternates)
