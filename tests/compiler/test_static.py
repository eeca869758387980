"""What is read from compiled kernels, the committed rows of it, and the gate that notices when they change."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from build_support import compiler, kept, sources, toolkit
from kernel_twins import OPS
from kernel_twins.compiler import aot, disassembly
from kernel_twins.compiler.disassembly import Usage
from kernel_twins.compiler.show import show
from kernel_twins.report.meaning import static
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.static import occupancy
from kernel_twins.report.rows import identity, store
from kernel_twins.report.rows.base import CannotRunError
from kernel_twins.spec import Name, Op, Step
from tests import forks

ADD = "_Z28vector_add_v01_scalar_kernelIfEvPKT_S2_PS0_l"
HALF = "_Z28vector_add_v01_scalar_kernelI6__halfEvPKT_S3_PS1_l"

USAGE = f"""
Fatbin elf code:
================
arch = sm_90a
identifier = cuda-kernels/elementwise/vector_add/v01_scalar.cu

Resource usage:
 Common:
  GLOBAL:0
 Function {HALF}:
  REG:11 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {ADD}:
  REG:255 STACK:16 SHARED:9224 LOCAL:8 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = f"""
	code for sm_90
		Function : {ADD}
	.headerflags	@"EF_CUDA_64BIT_ADDRESS"
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;  /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0020*/                   NOP;                              /* 0x00000a00ff017b82 */
		Function : {HALF}
        /*0000*/                   EXIT ;                            /* 0x00000a00ff017b82 */
"""
INFO = f"""
.nv.info.{ADD}
	Attribute:	EIATTR_MAXREG_COUNT
	Format:	EIFMT_HVAL
	Value:	0xff
	<0x8>
	Attribute:	EIATTR_MAX_THREADS
	Format:	EIFMT_SVAL
	Value:	0x80 0x2 0x1 
	<0x11>
.nv.info.triton_kernel
	Attribute:	EIATTR_REQNTID
	Format:	EIFMT_SVAL
	Value:	0x100 0x1 0x1 
	Attribute:	EIATTR_CBANK_PARAM_SIZE
	Format:	EIFMT_HVAL
	Value:	0x20
.nv.info.unbounded
	Attribute:	EIATTR_MAXREG_COUNT
	Format:	EIFMT_HVAL
	Value:	0xff
"""  # noqa: W291


def test_usage_leaves_out_the_shared_memory_that_cuda_reserves() -> None:
    assert disassembly.parse_usage(USAGE) == {HALF: Usage(11, 0, 0), ADD: Usage(255, 8200, 24)}


def test_instructions_are_read_with_their_addresses() -> None:
    assert disassembly.parse_sass(SASS) == {
        ADD: [(0, "LDC R1, c[0x0][0x28] "), (16, "@!P0 LDG.E.128 R4, desc[UR4][R2.64] "), (32, "NOP")],
        HALF: [(0, "EXIT ")],
    }


TOOL = """#!/bin/sh
for binary; do :; done
tail -c +17 "$binary"
"""


@pytest.mark.parametrize("names", [["first", "second"], ["first", "second", "third"]])
def test_the_device_code_of_every_source_is_read(
    names: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each source's stands in a fat binary of its own, and cubins of several sources may have one name."""
    tool, library = tmp_path / "bin" / "cuobjdump", tmp_path / "extension.so"
    tool.parent.mkdir()
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    texts = [f"Function : {name}\n/*0000*/ EXIT;\n".encode() for name in names]
    headers = [b"\x50\xed\x55\xba\x01\0\x10\0" + len(text).to_bytes(8, "little") for text in texts]
    library.write_bytes(b"\0" * 16 + b"".join(header + text for header, text in zip(headers, texts, strict=True)))
    assert list(disassembly.sass(library)) == names


def test_an_extension_is_disassembled_once_for_as_long_as_it_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, tool, read = tmp_path / "_C.so", tmp_path / "cuobjdump", []

    def sass(binary: Path, arch: str = "") -> dict[str, list[tuple[int, str]]]:
        read.append(binary.read_text())
        return {"kernel": [(0, read[-1])]}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(kept.OFF, raising=False)
    monkeypatch.setattr(disassembly, "find_cuobjdump", lambda: tool)
    monkeypatch.setattr(disassembly, "sass", sass)
    tool.touch()
    for code, times in (("EXIT", 1), ("NOP", 2)):
        library.write_text(code)
        assert identity.sass_digests([library]) == identity.sass_digests([library]) == {"kernel": identity.digest(code)}
        assert len(read) == times


def test_bounds_on_threads_are_read_where_there_are_any() -> None:
    assert disassembly.parse_block_limits(INFO) == {ADD: 256, "triton_kernel": 256}


@pytest.mark.parametrize(
    ("instruction", "name"),
    [
        ("LDG.E.128 R4, desc[UR4][R2.64]", "LDG.128"),
        ("@!P0 LDG.E.EF.128.CONSTANT R4, desc[UR4][R2.64]", "LDG.128"),
        ("LDG.E.64 R4, desc[UR4][R2.64+0x128]", "LDG"),
        ("LDGSTS.E.BYPASS.128 [R7], desc[UR6][R2.64]", "LDGSTS"),
        ("LDGDEPBAR", ""),
        ("LDS.128 R4, [R2]", "LDS.128"),
        ("LDS R4, [R2+UR4]", "LDS"),
        ("LDSM.16.MT88.4 R24, [R4]", "LDSM"),
        ("@P1 UBLKCP.S.G [UR8], [UR4], UR6", "UBLKCP"),
        ("@UP0 UTMALDG.2D [UR8], [UR6], desc[UR10]", "UTMALDG"),
        ("UTMASTG.2D [UR8], [UR6]", ""),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "HMMA"),
        ("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", "HGMMA"),
        ("FFMA.FTZ R4, R5, R6, R4", "FFMA"),
        ("FADD R4, R5, R6", ""),
        ("MUFU.RCP R4, R5", "MUFU"),
        ("LDL.LU R4, [R1]", "LDL"),
        ("STL.64 [R1+0x8], R4", "STL"),
    ],
)
def test_instruction_belongs_to_one_class(instruction: str, name: str) -> None:
    counted = disassembly.mix([instruction])
    assert {key: count for key, count in counted.items() if count} == ({name: 1} if name else {})
    assert list(counted) == list(disassembly.CLASSES)


def test_spills_count_what_is_stored() -> None:
    code = ["STL [R1], R4", "@P0 STL.64 [R1+0x8], R4", "STL.128 [R1+0x10], R4", "STL.U8 [R1], R4", "LDL R4, [R1]"]
    assert disassembly.spilled_bytes(code) == 4 + 8 + 16 + 1
    assert disassembly.length([*code, "NOP", "@!P0 NOP"]) == 5


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        (ADD, "vector_add_v01_scalar_kernel<float>"),
        ("_Z35matmul_bf16_v02_tensor_cores_kernelI13__nv_bfloat16Lb1ELb0EEv10MatmulArgsIvE",
         "matmul_bf16_v02_tensor_cores_kernel<__nv_bfloat16, true, false>"),
        ("_Z6kernelIfLi8ELin1EEvPf", "kernel<float, 8, -1>"),
        ("_Z28matmul_fp32_v01_naive_kernel10MatmulArgsIfE", "matmul_fp32_v01_naive_kernel"),
        ("vector_add_v01_scalar_kernel", "vector_add_v01_scalar_kernel"),
        ("_ZN12memory_probe17probe_copy_kernelEPK5uint4PS0_l", "_ZN12memory_probe17probe_copy_kernelEPK5uint4PS0_l"),
        ("_ZN46_GLOBAL__N__01a147f8_13_v02_online_cu_80f4bc9025softmax_v02_online_kernelI6__halfEEvPKT_PS2_llb",
         "softmax_v02_online_kernel<__half>"),
        ("_ZN38_GLOBAL__N__63a70d54_6_v02_cu_80f4bc9014add_v02_kernelEv", "add_v02_kernel"),
        ("_Z10add_kernelI6__halfL10Activation4ELb0EEv4Args", "add_kernel<__half, Activation(4), false>"),
        ("_Z10row_kernelI6__half6HeldAsILi4ELb1EELb0EEvPKT_", "row_kernel<__half, HeldAs<4, true>, false>"),
        ("_ZN38_GLOBAL__N__63a70d54_6_v02_cu_80f4bc9010row_kernelI6__half4LoadIS1_ELi4EL7Operand0ELS4_1EEEvPKT_",
         "row_kernel<__half, Load<__half>, 4, Operand(0), Operand(1)>"),
        ("_Z10row_kernelI6__halfS0_EvPKT_", "row_kernel<__half, __half>"),
        ("_Z10row_kernelIS1_EvPKT_", "_Z10row_kernelIS1_EvPKT_"),
        ("_Z10row_kernelI6HeldAsIPKfEEvT_", "_Z10row_kernelI6HeldAsIPKfEEvT_"),
        ("_Z10add_kernelIL10Activation", "_Z10add_kernelIL10Activation"),
        ("_Z6kernelIPKfEvT_", "_Z6kernelIPKfEvT_"),
        ("_Z6kernelIf", "_Z6kernelIf"),
    ],
)  # fmt: skip
def test_symbol_is_spelled_as_in_the_source(symbol: str, name: str) -> None:
    assert disassembly.short_name(symbol) == name


def test_a_step_has_the_kernels_of_the_dtype() -> None:
    plain = "_Z33matmul_fp32_v06_vectorized_kernelILb0EEv10MatmulArgsIfE"
    symbols = [HALF, ADD, plain]
    assert list(disassembly.step_kernels(symbols, "vector_add", "v01_scalar", "fp32")) == [ADD]
    assert list(disassembly.step_kernels(symbols, "vector_add", "v01_scalar", "fp16")) == [HALF]
    assert list(disassembly.step_kernels(symbols, "matmul_fp32", "v06_vectorized", "fp32")) == [plain]


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks", "limit"),
    [
        (32, 0, 1024, 2, "registers and warps"),
        (33, 0, 1024, 1, "registers"),
        (64, 0, 1024, 1, "registers"),
        (65, 0, 1024, 0, "registers"),
        (16, 0, 32, 32, "blocks"),
        (32, 0, 64, 32, "registers and warps and blocks"),
        (16, 0, 65, 21, "warps"),
        (128, 0, 128, 4, "registers"),
        (16, 113 * 1024, 128, 2, "shared memory"),
        (16, 113 * 1024 + 1, 128, 1, "shared memory"),
        (16, 227 * 1024, 128, 1, "shared memory"),
        (16, 227 * 1024 + 1, 128, 0, "shared memory"),
        (0, 0, 1, 32, "blocks"),
    ],
)
def test_occupancy_and_its_limit(registers: int, shared: int, threads: int, blocks: int, limit: str) -> None:
    """The numbers agree with those of cuda_occupancy.h."""
    assert occupancy(registers, shared, threads) == (blocks, limit)


@pytest.mark.parametrize("threads", [0, 1025])
def test_occupancy_refuses_a_block_that_cannot_be(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads is {threads}; a block has 1 to 1024"):
        occupancy(32, 0, threads)


@pytest.fixture(scope="module")
def committed() -> pd.DataFrame:
    return store.read(static.FILE, static.STATIC)


def test_committed_rows_cover_every_step_in_both_languages(committed: pd.DataFrame) -> None:
    """But for those that are not measured yet: a contributor may have neither nvcc nor a GPU."""
    folder = store.DATA / store.REFERENCE_GPU
    unmeasured = {
        (op.name, name.step, name.backend) for op in OPS.values() for name in Results(op, folder, None).unmeasured
    }
    cells = {(op.name, step.name, backend) for op in OPS.values() for step in op.steps for backend in step.backends}
    recorded = set(zip(committed["op"], committed["step"], committed["backend"], strict=True))
    late = static.unrecorded()
    assert recorded | late.keys() == cells and recorded <= cells
    assert not committed.duplicated(static.KEY).any()
    assert (committed["reason"] != "").all()
    assert late.keys() <= unmeasured, late
    if late:
        pytest.skip("; ".join(f"{'/'.join(cell)} has no static rows: {remedy}" for cell, remedy in late.items()))


def test_a_step_without_rows_is_named_with_what_makes_them(
    committed: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(static, "FILE", tmp_path / "static.csv")
    gone = (committed["op"] == "softmax") & (committed["step"] == "v02_online") & (committed["backend"] == "triton")
    store.write(static.FILE, committed)
    before = static.unrecorded()
    store.write(static.FILE, committed[~gone])
    ((cell, remedy),) = static.unrecorded().items() - before.items()
    assert cell == ("softmax", "v02_online", "triton")
    assert remedy.startswith("run `python setup.py build_ext`, then `python profiling/ncu_report.py static")


def test_committed_rows_of_finished_steps_have_no_spills(committed: pd.DataFrame) -> None:
    for row in committed.to_dict("records"):
        if OPS[row["op"]].step(row["step"]).finished:
            assert (row["spill_bytes"], row["stack_bytes"], row["LDL"]) == ("0", "0", "0"), row


def test_line_for_the_log_gives_ranges_over_kernels() -> None:
    row = dict.fromkeys(static.STATIC, "0") | {"op": "o", "step": "s", "backend": "cuda"}
    one = row | {"registers": "31", "instructions": "1612", "LDG.128": "16", "FFMA": "64"}
    two = one | {"registers": "40", "spill_bytes": "8", "LDG.128": "0", "STL": "2"}
    table = pd.DataFrame([one], columns=static.STATIC)
    assert static.told(table, "o", "s", "cuda", {}) == (
        "31 registers, no spills, 1,612 instructions (16 LDG.128, 64 FFMA)"
    )
    assert static.told(pd.DataFrame([one, two], columns=static.STATIC), "o", "s", "cuda", {}) == (
        "2 kernels: 31–40 registers, 0–8 bytes spilled, 1,612 instructions (0–16 LDG.128, 64 FFMA, 0–2 STL)"
    )
    assert static.told(table, "o", "s", "triton", {}) == ""


ROW = dict.fromkeys(static.STATIC, "1") | {"op": "o", "step": "s", "backend": "cuda", "kernel": "k", "reason": ""}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets what ``measure`` returns; the table lies in a folder of its own."""
    monkeypatch.setattr(static, "FILE", tmp_path / "static.csv")

    def set_rows(*rows: dict[str, str]) -> None:
        monkeypatch.setattr(static, "measure", lambda progress: pd.DataFrame(rows, columns=static.STATIC))

    return set_rows


def reasons() -> list[str]:
    return list(store.read(static.FILE, static.STATIC)["reason"])


def test_a_change_is_recorded_with_its_reason(measured: Callable[..., None]) -> None:
    other = ROW | {"kernel": "other"}
    measured(ROW, other)
    assert static.record("first", lambda step: None) == 2
    assert static.record("", lambda step: None) == 0
    measured(ROW | {"registers": "2"}, other)
    assert static.record("a wider tile", lambda step: None) == 1
    assert reasons() == ["a wider tile", "first"]
    measured(ROW | {"registers": "2"})
    assert static.record("one kernel serves both", lambda step: None) == 1
    assert reasons() == ["a wider tile"]


@pytest.mark.parametrize(
    "after", [[ROW | {"registers": "2"}], [ROW | {"toolchain": "nvcc 14"}], [ROW | {"code": "2"}], []]
)
def test_a_change_without_a_reason_is_refused(measured: Callable[..., None], after: list[dict[str, str]]) -> None:
    measured(ROW)
    static.record("first", lambda step: None)
    measured(*after)
    with pytest.raises(ValueError, match=r"1 recorded rows changed \(o s cuda k\): say why with --reason"):
        static.record(" ", lambda step: None)
    assert reasons() == ["first"]


def test_a_new_row_needs_no_reason(measured: Callable[..., None]) -> None:
    measured(ROW)
    static.record("first", lambda step: None)
    measured(ROW, ROW | {"kernel": "new"})
    assert static.record("", lambda step: None) == 1
    assert reasons() == ["first", ""]


SXM = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("binary", "gpu", "nvcc", "stale"),
    [
        ("aaaaaaaa", SXM, "13.0.88", False),
        ("bbbbbbbb", SXM, "13.0.88", True),  # a shared header has changed: the step's own file has not
        ("-", SXM, "13.0.88", False),
        ("", SXM, "13.0.88", False),
        ("bbbbbbbb", SXM, "12.9.41", False),
        ("bbbbbbbb", "NVIDIA A100-SXM4-80GB", "13.0.88", False),
    ],
)
def test_rows_of_other_compiled_code_are_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, binary: str, gpu: str, nvcc: str, stale: bool
) -> None:
    op, step = OPS["vector_add"], "v01_scalar"
    source = identity.source_digest(op.name, step, "cuda")
    timing = dict.fromkeys(store.TABLES["timings"], "") | {"backend": "cuda", "step": step, "run": "r"}
    timing |= {"case": op.profile_case.slug, "contest": "fast", "code": f"{source}:{binary}"}
    run = dict.fromkeys(store.PROVENANCE, "") | {"run": "r", "gpu": gpu, "nvcc": nvcc}
    store.write(tmp_path / "vector_add.timings.csv", pd.DataFrame([timing], columns=store.TABLES["timings"]))
    store.write(tmp_path / "runs.csv", pd.DataFrame([run], columns=store.PROVENANCE))
    monkeypatch.setattr(static, "FILE", tmp_path / "static.csv")
    row = ROW | {"op": op.name, "step": step, "toolchain": "nvcc 13.0.88", "code": "aaaaaaaa"}
    store.write(static.FILE, pd.DataFrame([row], columns=static.STATIC))
    assert Results(op, tmp_path, None).stale(Name("cuda", step)) is stale


@pytest.fixture
def built(committed: pd.DataFrame) -> pd.DataFrame:
    """The committed rows, where the extension is one that they can be compared with."""
    libraries = disassembly.find_extensions()
    if not libraries or disassembly.find_cuobjdump() is None:
        pytest.skip("the extension is not built, or there is no cuobjdump")
    toolchains = set(committed.loc[committed["backend"] == "cuda", "toolchain"])
    if toolchains != {f"nvcc {disassembly.compiler_version(libraries)}"} or not disassembly.resource_usage(
        libraries[0], disassembly.ARCH
    ):
        pytest.skip(f"the extension was built with another compiler than {', '.join(toolchains)}, or for another GPU")
    return committed


def test_the_build_is_what_is_recorded(built: pd.DataFrame) -> None:
    assert static.differences() == []


def test_the_gate_notices_every_change(built: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(static, "FILE", tmp_path / "static.csv")
    monkeypatch.setattr(disassembly, "newer_sources", lambda libraries, root: [])
    changed = built.copy()
    is_step = (changed["step"] == "v03_vectorized") & (changed["op"] == "vector_add") & (changed["backend"] == "cuda")
    now = changed.loc[is_step, "registers"].item()
    changed.loc[is_step, "registers"] = "29"
    store.write(static.FILE, changed)
    (line,) = static.differences()
    start = f"vector_add v03_vectorized cuda vector_add_v03_vectorized_kernel<float>: registers 29 → {now}: "
    assert line == start + 'if it is meant, run `python profiling/ncu_report.py static --reason "..."`'

    store.write(static.FILE, built[~is_step])
    (line,) = static.differences()
    assert "v03_vectorized cuda vector_add_v03_vectorized_kernel<float> is compiled and not recorded" in line

    more = built.loc[is_step].assign(kernel="vector_add_v03_vectorized_kernel<double>")
    store.write(static.FILE, pd.concat([built, more]))
    (line,) = static.differences()
    assert "vector_add_v03_vectorized_kernel<double> is recorded and no longer compiled" in line

    monkeypatch.setattr(disassembly, "newer_sources", lambda libraries, root: ["cuda-kernels/lib/common.cuh"])
    (line,) = static.differences()
    assert line.endswith("cuda-kernels/lib/common.cuh is newer than the build: run `python setup.py build_ext`")


def test_a_release_is_not_judged_by_a_build_that_lacks_a_change(
    built: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(static, "FILE", tmp_path / "static.csv")
    store.write(static.FILE, built[built["backend"] == "cuda"])
    monkeypatch.setattr(disassembly, "newer_sources", lambda libraries, root: ["cuda-kernels/lib/ptx/ampere.cuh"])
    assert static.differences() == []
    (line,) = static.differences(thorough=True)
    assert line == "cuda-kernels/lib/ptx/ampere.cuh is newer than the build: run `python setup.py build_ext`"


def test_the_gate_is_silent_where_nothing_can_be_compared(
    built: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(static, "FILE", tmp_path / "static.csv")
    assert static.differences() == []
    store.write(static.FILE, built.assign(registers="1", toolchain="nvcc 12.0.1"))
    assert static.differences() == []
    store.write(static.FILE, built.assign(registers="1"))
    assert static.differences() != []
    monkeypatch.setattr(disassembly, "find_cuobjdump", lambda: None)
    assert static.differences() == []


def test_a_build_of_one_operation_is_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_one = {f"_Z1_softmax_{step.name}_kernelv": Usage(16, 0, 0) for step in OPS["softmax"].steps_of("cuda")}
    monkeypatch.setattr(disassembly, "find_extensions", lambda: [tmp_path / "_C.so"])
    monkeypatch.setattr(disassembly, "find_cuobjdump", lambda: tmp_path / "cuobjdump")
    monkeypatch.setattr(disassembly, "compiler_version", lambda libraries: "13.0.88")
    monkeypatch.setattr(disassembly, "resource_usage", lambda library, arch: of_one)
    (toolchain,) = {toolchain for toolchain, _ in static.codes().values() if toolchain.startswith("nvcc")}
    assert toolchain == "nvcc 13.0.88"
    told = static.not_compared()
    assert told.startswith("the build lacks steps of ") and told.endswith(": run `python setup.py build_ext`")
    assert "softmax_backward" in told and "softmax," not in told
    assert static.differences() == []


def test_a_missing_extension_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "find_extensions", list)
    with pytest.raises(CannotRunError, match=r"not built: run `python setup\.py build_ext`"):
        static.measure(lambda step: None)


def test_a_build_older_than_its_sources_is_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_C.so").touch()
    source = tmp_path / "cuda-kernels" / "op" / "v01_scalar.cu"
    source.parent.mkdir(parents=True)
    source.touch()
    os.utime(tmp_path / "_C.so", (0, 0))
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setattr(disassembly, "find_extensions", lambda: [tmp_path / "_C.so"])
    with pytest.raises(CannotRunError, match=r"cuda-kernels/op/v01_scalar\.cu is newer than the built extension"):
        static.measure(lambda step: None)


def change_one_code(rows: pd.DataFrame, op: str, step: str) -> str:
    """Record other code for a step and everything else as it is; the start of the line that tells of it."""
    is_step = (rows["op"] == op) & (rows["step"] == step)
    (now,) = set(rows.loc[is_step, "code"])
    store.write(static.FILE, rows.assign(code=rows["code"].mask(is_step, "00000000")))
    (backend,) = set(rows["backend"])
    return f"{op} {step} {backend}: code 00000000 → {now}: "


def differences_beside_a_change(backend: str, op: str, step: str) -> list[str]:
    """The line that must be told, where one code is recorded otherwise than it is, and the lines that are."""
    rows = store.read(static.FILE, static.STATIC)
    new = tuple(f"{' '.join(cell)} " for cell in static.unrecorded())  # steps that came later
    with tempfile.TemporaryDirectory() as folder:
        setattr(static, "FILE", Path(folder) / "static.csv")  # noqa: B010
        start = change_one_code(rows[rows["backend"] == backend], op, step)
        return [start, *(line for line in static.differences(thorough=True) if not line.startswith(new))]


@pytest.mark.slow
def test_cuda_compiles_to_the_code_that_is_recorded(built: pd.DataFrame) -> None:
    assert not disassembly.newer_sources(disassembly.require_extensions(), store.ROOT)
    start, line = forks.call(
        "tests.compiler.test_static", "differences_beside_a_change", "cuda", "matmul_bf16", "v02_tensor_cores"
    )
    assert line.startswith(start)


@pytest.mark.slow
def test_triton_compiles_to_what_is_recorded(committed: pd.DataFrame) -> None:
    pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    rows = committed[committed["backend"] == "triton"]
    if set(rows["toolchain"]) != {f"triton {triton.__version__}"}:
        pytest.skip(f"Triton {triton.__version__} is installed, which is not what the rows were compiled with")
    start, line = forks.call(
        "tests.compiler.test_static", "differences_beside_a_change", "triton", "matmul_tf32x3", "v04_autotuned"
    )
    assert line.startswith(start)


def test_the_configuration_of_the_reference_gpu_is_compiled() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    op = OPS["matmul_fp32"]
    step = op.step("v10_autotuned")
    tuned = json.loads((store.ROOT / "triton-kernels" / "tuned" / f"{store.REFERENCE_GPU}.json").read_text())
    winner = tuned["matmul_fp32/v10_autotuned"][op.profile_case.slug]
    (chosen,) = [config for config in aot.configs(op, step) if config.all_kwargs() == winner]
    others = [config for config in aot.configs(op, step) if config is not chosen]
    (kernel,) = aot.compiled(op, step, op.profile_case)
    assert [kernel.hash] == [each.hash for each in aot.compiled(op, step, op.profile_case, config=chosen)]
    assert [kernel.hash] != [each.hash for each in aot.compiled(op, step, op.profile_case, config=others[0])]


FENCES = [
    # what a kernel does, and what it must do then; no tool that watches it run notices where that is missing
    (r"mbarrier\.init\.", r"fence\.mbarrier_init\."),
    (r"cp\.async\.bulk\.[^;]*\.global\.shared::cta\.", r"fence\.proxy\.async"),  # after it wrote what is copied
    (r"wgmma\.mma_async\.", r"wgmma\.fence\."),
]


def left_to(op: Op, step: Step) -> list[str]:
    """The steps of a Hopper GPU that a step's launcher leaves some sizes to."""
    reached = {path.resolve() for path in identity.reached([store.ROOT / op.file(step.name, "cuda")])}
    others = (other for other in op.steps_of("cuda") if other != step and other.arch != ">=8.0")
    return [other.name for other in others if (store.ROOT / op.file(other.name, "cuda")).resolve() in reached]


def ptx_of_the_build(op: Op, step: Step) -> str:
    """What ptxas got; compiled again where the build kept none, or is older."""
    source = Path(op.file(step.name, "cuda"))
    libraries, ptx = disassembly.find_extensions(), compiler.ptx_of(sources.object_of(source))
    if not libraries or not ptx.exists() or disassembly.newer_sources(libraries, store.ROOT):
        return show(op, step, "cuda", "ptx", op.profile_case)
    text = ptx.read_text()
    heads = re.findall(r"\.entry (\w+)", text)
    wanted = disassembly.step_kernels(heads, op.name, step.name, op.profile_case.dtype)
    _, *kernels = re.split(r"^(?=(?:\.visible |\.weak )?\.entry )", text, flags=re.MULTILINE)
    return "\n".join(kernel for name, kernel in zip(heads, kernels, strict=True) if name in wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "step"),
    [
        pytest.param(op, step, id=f"{op.name}-{step.name}")
        for op in OPS.values()
        for step in op.steps_of("cuda")
        if step.arch != ">=8.0"
    ],
)
def test_hopper_kernels_have_their_fences(op: Op, step: Step) -> None:
    """In PTX, as ptxas merges several of them into one instruction."""
    try:
        toolkit.find(os.environ, "13.0")
    except toolkit.BuildError as error:
        pytest.skip(str(error))
    _, *kernels = ptx_of_the_build(op, step).split(".entry ")
    assert kernels
    for kernel in kernels:
        for cause, fence in FENCES:
            if re.search(cause, kernel):
                assert re.search(fence, kernel), f"{kernel.split('(')[0]} has {cause} and no {fence}"
        # Blocks meet before the first write to another's memory. None may leave before the last one into its own:
        # blocks meet again for multicasts, and with st.async each waits for what the others send.
        meetings = len(re.findall(r"barrier\.cluster\.wait", kernel))
        assert meetings >= (2 if ".multicast::cluster" in kernel else 1 if "st.async" in kernel else 0)
    of_hopper = any(re.search(r"cp\.async\.bulk|st\.async", kernel) for kernel in kernels)
    assert of_hopper or left_to(op, step), (
        f"{op.file(step.name, 'cuda')} has no instruction of Hopper and leaves nothing to a step that has: its arch in "
        f"kernel_twins/ops/{op.family}/{op.name}.py is {step.arch!r}, and can be '>=8.0'"
    )
    # Whichever of a step's kernels lets the next one in early: what is let in must wait before it reads.
    if any("griddepcontrol.launch_dependents" in kernel for kernel in kernels):
        assert any("griddepcontrol.wait" in kernel for kernel in kernels)
