"""The recorded stages: their lines are of the step's file, passes leave evidence, compiling anew gives them again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernel_twins import OPS
from kernel_twins.report.meaning.static import FILE as STATIC_FILE
from kernel_twins.report.meaning.static import STATIC
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import ROOT
from kernel_twins.report.sweeps import compiling, evidence, inductor, lines, passes, stages
from kernel_twins.report.sweeps.cells import KERNELS, Kernel, Setting
from kernel_twins.spec import Backend

NAMES = [
    stages.name(kernel, backend, setting)
    for kernel in KERNELS
    for backend, settings in (("triton", (Setting(), *kernel.settings)), ("cuda", (Setting(),) if kernel.cuda else ()))
    for setting in settings
]
TURNED_OFF = [(kernel, setting) for kernel in KERNELS for setting in kernel.settings if setting.off]
MLIR = """#loc = loc("/a/v04.py":26:0)
#loc5 = loc("total"(#loc1))
tt.func @kernel(%a: i32 loc("a"(#loc))) {
  %0 = arith.addi %a, %a : i32 loc(#loc5)
  %1 = arith.divsi %0, %a : i32 loc(#loc3)
}
#loc1 = loc("/a/v04.py":41:9)
#loc2 = loc("/b/standard.py":43:17)
#loc3 = loc(callsite(#loc2 at #loc4))
#loc4 = loc("tiles"(#loc6))
#loc6 = loc("/a/v04.py":31:25)
"""


def recorded(name: str) -> stages.Recorded:
    return stages.read(stages.FOLDER / f"{name}.txt")


def test_inlined_code_has_the_line_of_its_call() -> None:
    assert lines.mlir(MLIR, "v04.py") == [
        (26, "tt.func @kernel(%a: i32) {"),
        (41, "  %0 = arith.addi %a, %a : i32"),
        (31, "  %1 = arith.divsi %0, %a : i32"),
        (0, "}"),
    ]


def test_ptx_of_both_compilers_names_lines_of_the_steps_file() -> None:
    text = (
        ".entry kernel()\n{\n.loc 2 141 29, function_name $L__info_string1, inlined_at 1 31 3\nmov.u32 %r1, 0;\n"
        ".loc 2 43 17 // standard.py:43:17 @[ v04.cu:35:3 ]\nmov.u32 %r2, 0;\n.loc 2 9 9\nret;\n}\n"
        '.file 1 "/a/v04.cu"\n.file 2 "/b/standard.py"\n'
    )
    found = lines.ptx(lines.own_places(text, "v04.cu"))
    assert [at for at, _ in found] == [0, 0, 31, 35, 0, 0]
    assert not any("/" in line for _, line in found)


def test_lines_that_repeat_are_folded_and_counted() -> None:
    repeated = [(7, f"mov {i}") for i in range(9)] + [(8, f"mov {i}") for i in range(2)]
    folded = lines.folded(repeated)
    assert folded == [(7, "mov 0"), (7, "    … and 8 like the line above"), (8, "mov 0"), (8, "mov 1")]
    assert lines.count(folded) == len(repeated)


def test_long_lists_are_written_briefly() -> None:
    types, registers = ", ".join(["float"] * 64), ", ".join(f"%r{i}" for i in range(1, 65))
    assert lines.briefly(f"call {{ {types} }} ({registers}, %rd4)") == "call { 64 x float } (%r1…%r64, %rd4)"
    assert lines.briefly("add %r1, %r2, %r3;") == "add %r1, %r2, %r3;"


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_of_the_steps_file(name: str) -> None:
    made = recorded(name)
    if made.stale:
        pytest.skip("the step changed since it was recorded")
    backend: Backend = "cuda" if made.head["backend"] == "cuda" else "triton"
    length = len((ROOT / OPS[made.head["op"]].file(made.head["step"], backend)).read_text().splitlines())
    for stage, found in made.stages.items():
        assert {at for at, _ in found} <= {*range(length + 1)}, stage
        assert len({at for at, _ in found if at}) > 1, f"{stage} has no lines"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_recorded_tells_of_a_machine(name: str) -> None:
    assert not re.search(r"(?<![\w.])/(?:home|work|tmp|usr|root)/", recorded(name).text())


def test_what_is_recorded_is_small() -> None:
    sizes = [path.stat().st_size for path in stages.FOLDER.glob("*.txt")]
    assert max(sizes) <= 2**20
    assert sum(sizes) <= 3 * 2**20


def test_nothing_else_is_recorded() -> None:
    assert {path.stem for path in stages.FOLDER.glob("*.txt")} <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("triton", "cuda"))])
def test_sass_is_that_of_the_static_rows(name: str) -> None:
    made = recorded(name)
    if made.stale:
        pytest.skip("the step changed since it was recorded")
    rows = store.read(STATIC_FILE, STATIC)
    rows = rows[(rows["op"] == made.head["op"]) & (rows["step"] == made.head["step"])]
    (row, *_) = rows[(rows["backend"] == made.head["backend"]) & (rows["kernel"] == made.head["kernel"])].to_dict(
        "records"
    )
    code = [line for line in made.stages["sass"] if not line[1].endswith(":")]
    assert (row["instructions"], row["registers"]) == (str(lines.count(code)), made.head["registers"])


def test_all_five_passes_leave_evidence_in_matmul_v04() -> None:
    found = evidence.of(recorded("matmul_bf16.v04_pipelined.triton"))
    assert list(found) == [each.name for each in evidence.PASSES]
    assert all(found.values())
    assert [one.stage for one in found["tensor cores"]] == ["ttgir", "ptx", "sass"]


@pytest.mark.parametrize(("kernel", "setting"), TURNED_OFF, ids=lambda each: getattr(each, "name", ""))
def test_a_setting_takes_its_passs_evidence_away(kernel: Kernel, setting: Setting) -> None:
    before, after = (
        [one.text for one in evidence.of(recorded(stages.name(kernel, "triton", each)))[setting.off]]
        for each in (Setting(), setting)
    )
    assert before
    if setting.off == "tensor cores":  # a smaller instruction takes over
        assert any("wgmma" in text for text in before)
        assert any("mma.sync" in text for text in after)
        assert not any("wgmma" in text for text in after)
    else:
        assert not after


def test_every_named_job_is_some_passs() -> None:
    named = [each for cell in passes.read()["named"] for each in cell.split("; ") if each]
    assert sorted(named) == sorted(each.name for each in evidence.PASSES)


def test_a_kernel_compiled_anew_is_what_is_recorded() -> None:
    pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    kernel = KERNELS[0]
    path = stages.FOLDER / f"{stages.name(kernel, 'triton')}.txt"
    if stages.read(path).head["compiler"] != f"triton {triton.__version__}":
        pytest.skip("another version of Triton recorded it")
    if stages.read(path).stale:
        pytest.skip("the step changed since it was recorded")
    with compiling.anew():
        assert stages.of_triton(kernel, Setting()).text() == path.read_text()


INDUCTOR = """# AOT ID: ['0_inference']
from ctypes import c_void_p
# kernel path: /tmp/torchinductor_me/ab/cab.py
triton_per_fused_add_mul_0 = async_compile.triton('triton_per_fused_add_mul_0', '''
@triton_heuristics.persistent_reduction(
    triton_meta={'device': DeviceProperties(type='cuda', index=0, cc=90), 'x': 1},
    inductor_meta={'backend_hash': 'AB12', 'num_load': 1}
)
@triton.jit
def triton_per_fused_add_mul_0(in_ptr0, xnumel):
    pass
''', device_str='cuda')
def call(args):
    extern_kernels.mm(a, b, out=c)
def benchmark_compiled_module(times=10):
    pass
"""


def test_inductors_code_is_normalised() -> None:
    code = inductor.normalised(INDUCTOR)
    assert inductor.kernels(code) == ["triton_per_fused_add_mul_0", "extern_kernels.mm"]
    for gone in ("/tmp", "AB12", "DeviceProperties", "benchmark", "AOT ID"):
        assert gone not in code
    assert inductor.normalised(code) == code


@pytest.mark.parametrize(
    ("op", "told"),
    [
        (
            "softmax",
            ["rows in pieces; fuses aten._softmax, prims.prepare_softmax_online, aten.sub, aten.exp, aten.copy_"],
        ),
        ("layer_norm", ["rows in pieces; fuses aten.native_layer_norm"]),
        ("linear", ["element by element; fuses aten.gelu", "a library's kernel"]),
    ],
)
def test_what_inductor_fuses_is_told(op: str, told: list[str]) -> None:
    head, code = inductor.read(inductor.file(op))
    assert (head["op"], head["case"]) == (op, OPS[op].profile_case.slug)
    fused = inductor.fused(code)
    assert [each for _, each in fused] == told
    assert ", ".join(kernel for kernel, _ in fused) == head["kernels"]
    kernels = inductor.of_kernels(code)
    assert kernels.count("@triton.jit") == sum(kernel.startswith("triton") for kernel, _ in fused)
    assert "async_compile" not in kernels


def test_inductors_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "softmax.py.txt"
    path.write_text("# op: softmax\n# gpu: some GPU\nimport torch\n# a comment\n")
    assert inductor.read(path) == ({"op": "softmax", "gpu": "some GPU"}, "import torch\n# a comment\n")
