"""Every stage of compilation is printed, and a difference shows what matters and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernel_twins import OPS
from kernel_twins.__main__ import main
from kernel_twins.compiler import disassembly, opcodes
from kernel_twins.compiler.show import diff, essentials, show

OP = OPS["vector_add"]
SCALAR, WIDE = OP.step("v01_scalar"), OP.step("v03_vectorized")
NAME = "vector_add_v01_scalar"

LIBRARIES = disassembly.find_extensions()
needs_build = pytest.mark.skipif(
    not (LIBRARIES and disassembly.find_cuobjdump() and disassembly.resource_usage(LIBRARIES[0], disassembly.ARCH)),
    reason=f"the extension is not built for {disassembly.ARCH}, or there is no cuobjdump",
)


@pytest.fixture
def triton() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")


@needs_build
def test_sass_of_a_cuda_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "vector_add", "v01_scalar", "cuda"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("// vector_add_v01_scalar_kernel<float>: ")
    assert text.count("LDG.E R") == 2
    assert text.endswith(".L0:\n    BRA .L0\n")


@needs_build
def test_case_chooses_the_dtype() -> None:
    assert "kernel<__nv_bfloat16>: " in show(OP, SCALAR, "cuda", "sass", OP.profile_case.parse("1000003-bf16"))


def test_ptx_of_a_cuda_step() -> None:
    from build_support import toolkit

    try:
        toolkit.find(os.environ, "13.0")
    except toolkit.BuildError as error:
        pytest.skip(str(error))
    text = show(OP, SCALAR, "cuda", "ptx", OP.profile_case)
    assert text.startswith(".version")
    assert text.count(".entry") == text.count(".visible .entry _Z28vector_add_v01_scalar_kernelIfE") == 1
    assert text.count("ld.global.f32") == 2


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("stage", "content"),
    [
        ("ttir", "tt.load"),
        ("ttgir", "#ttg.blocked"),
        ("llir", "define ptx_kernel void @vector_add_v03_vectorized_kernel"),
        ("ptx", "ld.global.v4.b32"),
        ("sass", "LDG.E.128"),
    ],
)
def test_stages_of_a_triton_step(stage: str, content: str) -> None:
    if stage == "sass" and disassembly.find_cuobjdump() is None:
        pytest.skip("no cuobjdump")
    assert content in show(OP, WIDE, "triton", stage, OP.profile_case)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vector_add", "v01_scalar", "cuda", "--stage", "ttir"], "--stage is ttir; cuda has ptx, sass"),
        (["matmul_fp32", "v10_autotuned", "cuda"], "exists in triton only"),
        (["vector_add", "v99_none", "cuda"], "vector_add has v01_scalar"),
        (["vector_add", "v01_scalar", "triton", "--stage", "llir", "--diff", "twin"], "twins have ptx and sass"),
        (["vector_add", "v01_scalar", "triton", "--diff", "v99_none"], "--diff is 'v99_none'; vector_add has v01"),
        (["matmul_fp32", "v10_autotuned", "triton", "--diff", "twin"], "exists in triton only"),
        (["matmul_bf16", "v01_naive", "cuda", "--case", "64x64x64-fp32"], "--case 64x64x64-fp32: dtype is fp32"),
    ],
)
def test_wrong_usage_says_what_there_is(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["show", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_extension_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disassembly, "find_extensions", list)
    assert main(["show", "vector_add", "v01_scalar", "cuda"]) == 3
    assert "python setup.py build_ext" in capsys.readouterr().err


@needs_build
def test_a_reader_that_stops_early_is_no_error() -> None:
    command = [sys.executable, "-m", "kernel_twins", "show", "matmul_fp32", "v09_pipelined", "cuda"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


SAME = {
    "sass": (
        "// vector_add_v01_scalar_kernel<float>: 12 registers\n"
        "    @!P0 LDG.E R2, desc[UR4][R2.64+0x10]\n.L0:\n    BSSY B0, .L0\n    FADD R4.reuse, R2, RZ",
        "// vector_add_v01_scalar_kernel<float>: 12 registers\n"
        "    @!P3 LDG.E R8, desc[UR8][R6.64+0x10]\n.L7:\n    BSSY B1, .L7\n    FADD R9, R8, RZ",
    ),
    "ptx": (
        ".version 9.0\n.visible .entry _Z28vector_add_v01_scalar_kernelIfEvPKT_S2_PS0_l(\n"
        "\t.param .u64 _Z28vector_add_v01_scalar_kernelIfEvPKT_S2_PS0_l_param_0\n)\n{\n\t.reg .b32 %r<3>;\n"
        "\tld.param.u64 \t%rd2, [_Z28vector_add_v01_scalar_kernelIfEvPKT_S2_PS0_l_param_0];\n$L__BB0_2:\n\tret;\n}",
        ".version 8.7\n// .globl\n.visible .entry vector_add_v01_scalar_kernel(\n"
        "\t.param .u64 vector_add_v01_scalar_kernel_param_0\n)\n{\n\t.reg .b32 %r<9>;\n\t.loc 1 27 0\n$L__tmp1:\n"
        "\tld.param.u64 %rd7, [vector_add_v01_scalar_kernel_param_0]; // a\n$L__BB0_9:\n\tret;\n}\n"
        "\t.section\t.debug_abbrev\n\t{\n.b8 1\n",
    ),
    "ttir": (
        '#loc = loc("a.py":27:0)\n%0 = tt.splat %a_1 : i64 loc(callsite(#loc1 at #loc2))\n^bb1: loc("x"("a.py":1:2))',
        "%12 = tt.splat %a_7 : i64\n^bb4:",
    ),
    "ttgir": (
        "%0 = ttg.local_load %a_1 : tensor<4xf32, #blocked> loc(#loc)",
        "%9 = ttg.local_load %a : tensor<4xf32, #blocked>",
    ),
    "llir": (
        "; ModuleID = 'x'\n%7 = add i32 %.frozen3, 16, !dbg !4\n12:      ; preds = %6\n!0 = distinct !DICompileUnit()",
        "%9 = add i32 %.frozen, 16, !dbg !8\n14: ; preds = %2, %9",
    ),
}  # fmt: skip
CHANGED = {
    "sass": ("FADD R4, R2, RZ", "FADD R4, R2, 1"),
    "ptx": ("ld.global.f32 %f1, [%rd1];", "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];"),
    "ttir": ("%0 = tt.load %a : tensor<128xf32>", "%0 = tt.load %a : tensor<512xf32>"),
    "ttgir": ("#blocked = #ttg.blocked<{sizePerThread = [1]}>", "#blocked = #ttg.blocked<{sizePerThread = [4]}>"),
    "llir": ("%1 = add i32 %0, 16", "%1 = add i32 %0, 32"),
}


@pytest.mark.parametrize("stage", SAME)
def test_what_differs_between_any_two_compilations_is_filtered(stage: str) -> None:
    one, other = (essentials(text, stage, NAME) for text in SAME[stage])
    assert one == other != []


@pytest.mark.parametrize("stage", CHANGED)
def test_what_matters_is_not_filtered(stage: str) -> None:
    one, other = (essentials(text, stage, NAME) for text in CHANGED[stage])
    assert one != other


@needs_build
@pytest.mark.usefixtures("triton")
def test_difference_of_the_twins() -> None:
    text = diff(OP, SCALAR, "cuda", "sass", OP.profile_case, "twin")
    assert text.startswith("--- vector_add v01_scalar triton sass\n+++ vector_add v01_scalar cuda sass\n")


@needs_build
def test_difference_of_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    added = [
        line for line in diff(OP, WIDE, "cuda", "sass", OP.profile_case, "v01_scalar").splitlines() if line[0] == "+"
    ]
    assert "+LDG.E.128 R, desc[UR][R.64]" in added
    assert main(["show", "vector_add", "v03_vectorized", "cuda", "--diff", "v03_vectorized"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "nothing differs that matters\n")


def test_opcodes_are_counted_with_the_width_of_an_access_alone() -> None:
    listing = (
        "// k: 12 registers\n    @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64]\n.L0:\n    LDG.E R2, [R4]\n    NOP\n"
    )
    assert opcodes.counts(listing, "sass") == {"LDG.128": 1, "LDG": 1}
    ptx = (
        ".visible .entry k(\n)\n{\n\t.reg .b32 %r<3>;\n$L__BB0_2:\n\t@%p1 ld.global.v4.f32 \t{%f1}, [%rd1];\n\tret;\n}"
    )
    assert opcodes.counts(ptx, "ptx") == {"ld.global.v4.f32": 1, "ret": 1}


@needs_build
def test_a_summary_says_which_opcodes_a_step_exchanged(capsys: pytest.CaptureFixture[str]) -> None:
    """Fragments that v02 loads word by word, ldmatrix loads in v03."""
    assert main(["show", "matmul_bf16", "v03", "cuda", "--diff", "v02", "--summary"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if "  " in line}
    assert rows["opcode"] == ["v02_tensor_cores", "v03_swizzled", "change"]
    assert rows["LDS"][1:] == ["0", "gone"] and rows["LDSM"][0] == "0" and rows["LDSM"][2] == "new"
    assert main(["show", "vector_add", "v03", "cuda", "--summary"]) == 0
    assert "LDG.128" in capsys.readouterr().out


@needs_build
def test_one_of_several_kernels_is_chosen_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    one = "matmul_bf16_v03_swizzled_kernel<__nv_bfloat16, true, false>"
    for name in (one, "true, false"):
        assert main(["show", "matmul_bf16", "v03", "cuda", "--kernel", name]) == 0
        heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("//")]
        assert [line.partition(":")[0] for line in heads] == [f"// {one}"]
    assert main(["show", "matmul_bf16", "v03", "cuda", "--diff", "v02", "--summary", "--kernel", one]) == 0
    told = capsys.readouterr().out
    assert told.count("in 1 kernel") == 2 and "matmul_bf16_v02_tensor_cores_kernel<__nv_bfloat16, true, false>" in told


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--stage", "ttir", "--kernel", "other"],
            "--kernel is 'other'; vector_add v03_vectorized triton has vector_add",
        ),
        (["--stage", "ttir", "--summary"], "--summary counts instructions, which are in ptx and sass"),
    ],
)
def test_what_cannot_be_chosen_or_counted_is_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["show", "vector_add", "v03", "triton", *arguments])
    assert message in capsys.readouterr().err
