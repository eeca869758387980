"""What the products' specs say: cases and their tensors, what steps refuse, and which library a baseline calls."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS  # noqa: E402
from kernel_twins.harness.check import check_baseline, generator  # noqa: E402
from kernel_twins.ops.matmul import shared  # noqa: E402
from kernel_twins.ops.matmul.products import compiled_product, torch_mm  # noqa: E402
from kernel_twins.ops.tensors import empty_outputs  # noqa: E402
from kernel_twins.spec import Case, Step  # noqa: E402
from tests.sides import as_interpreted  # noqa: E402

OP = OPS["matmul_bf16"]
PLAIN = Step(name="v98_plain")
FP32_OUT = dataclasses.replace(PLAIN, fp32_out=True)


@pytest.mark.parametrize(
    ("variant", "a_strides", "b_strides"),
    [
        ("", (5, 1), (3, 1)),
        ("-a.col", (1, 4), (3, 1)),
        ("-b.col", (5, 1), (1, 5)),
        ("-pitch.2", (7, 1), (5, 1)),
        ("-a.col-b.col-pitch.2", (1, 6), (1, 7)),
        ("-a.expanded", (0, 1), (3, 1)),
        ("-b.expanded", (5, 1), (0, 1)),
    ],
)
def test_a_case_says_how_its_operands_lie(variant: str, a_strides: tuple[int, int], b_strides: tuple[int, int]) -> None:
    case = Case.parse(f"4x3x5-bf16{variant}")
    a, b = OP.inputs(case, generator(case, "cpu"))
    assert (a.shape, b.shape) == ((4, 5), (5, 3))
    assert (a.stride(), b.stride()) == (a_strides, b_strides)
    assert case.slug == f"4x3x5-bf16{variant}"


def test_an_fp32_out_has_its_own_bytes() -> None:
    narrow, wide = Case.parse("4x3x5-fp16"), Case.parse("4x3x5-fp16-out.fp32")
    assert [output.dtype for case in (narrow, wide) for output in OP.outputs(case)] == ["fp16", "fp32"]
    assert OP.bytes(wide) - OP.bytes(narrow) == 2 * 4 * 3


def test_what_out_may_be() -> None:
    assert OP.accepts(Case.parse("4x3x5-fp16-out.fp32")) == ""
    assert OP.accepts(Case.parse("4x3x5-fp16-out.bf16")) == "out is bf16, must be fp16 or fp32"
    a, b = torch.ones(4, 5, dtype=torch.bfloat16), torch.ones(5, 3, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        OP.check(a, b, out=torch.empty(4, 3, dtype=dtype))
    with pytest.raises(TypeError, match=r"^out is torch.float16, must be torch.bfloat16 or torch.float32: allocate it"):
        OP.check(a, b, out=torch.empty(4, 3, dtype=torch.float16))
    with pytest.raises(TypeError, match=r"^b is torch.float16, must be torch.bfloat16 like a"):
        OP.check(a, b.half(), out=torch.empty(4, 3))
    with pytest.raises(TypeError, match=r"^out is torch.float64, must be torch.float32: allocate it"):
        OPS["matmul_fp32"].check(a.float(), b.float(), out=torch.empty(4, 3, dtype=torch.float64))


def test_only_steps_that_say_so_write_an_fp32_out() -> None:
    usual, fp32 = Case.parse("64x64x64-bf16"), Case.parse("64x64x64-bf16-out.fp32")
    assert OP.serves(PLAIN, usual) and OP.serves(FP32_OUT, usual) and OP.serves(FP32_OUT, fp32)
    able = "v15_dispatch, v17_prologue, v18_few_rows, v19_fitted_tiles"
    assert OP.refusal(PLAIN, fp32) == f"v98_plain does not write out.fp32, take {able}"
    assert OP.refusal(FP32_OUT, Case.parse("64x64x64-fp32")) == "dtype is fp32, must be bf16 or fp16"


def test_a_triton_step_refuses_an_fp32_out_in_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    as_interpreted(monkeypatch)
    from kernel_twins import load
    from kernel_twins.compiler.interpreter import unavailable

    if reason := unavailable():
        pytest.skip(reason)

    call = load("matmul_bf16", "v01_naive", "triton")
    a, b = torch.ones(4, 5, dtype=torch.float16), torch.ones(5, 3, dtype=torch.float16)
    with pytest.raises(
        TypeError,
        match=r"^out is torch.float32, must be torch.float16: matmul_bf16 v01_naive writes no other, "
        r"take v15_dispatch, v17_prologue, v18_few_rows",
    ):
        call(a, b, out=torch.empty(4, 3))


def test_a_step_is_timed_on_wide_cases_only_where_it_is_wide() -> None:
    (case, *_), wide = OP.wide_cases, dataclasses.replace(PLAIN, wide=True)
    assert OP.times(wide, case) and not OP.times(PLAIN, case) and OP.serves(PLAIN, case)
    assert all(OP.times(step, each) for step in (PLAIN, wide) for each in OP.bench_cases)
    refuses = dataclasses.replace(wide, accepts=lambda case: "no")
    assert not OP.times(refuses, case)


def test_all_shapes_are_timed_in_both_layouts() -> None:
    by_layout = {
        layout: [case.shape for case in OP.timed_cases if case.dtype == "bf16" and case.variant == layout]
        for layout in ((), (("b", "col"),))
    }
    assert {*by_layout[()]} == {*by_layout[(("b", "col"),)]}
    assert all(len({*shapes}) == len(shapes) == 18 for shapes in by_layout.values())


def test_copyable_says_what_the_copy_engine_takes() -> None:
    """As Triton's launchers find out from the tensors themselves."""
    pytest.importorskip("triton")
    from kernel_twins._triton.lib.device import layout_of

    with pytest.MonkeyPatch.context() as patch:
        as_interpreted(patch)
        for case in OP.test_cases:
            if 0 in case.shape or case.get("offset") or math.prod(case.shape) > 2**26:
                continue
            taken = {layout_of(matrix) for matrix in OP.inputs(case, generator(case, "cpu"))}
            assert ("pointers" in taken) == bool(shared.copyable(case)), case.slug
            out = empty_outputs(OP, case, "cpu")
            assert isinstance(out, torch.Tensor)
            taken.add(layout_of(out))
            assert ("pointers" in taken) == bool(shared.copyable_with_out(case)), case.slug


@pytest.mark.parametrize(
    ("slug", "operands", "with_out"),
    [
        ("64x64x64-bf16-offset.1", *["a starts 1 elements behind a multiple of 16 bytes"] * 2),
        ("64x64x64-bf16-offset.8", "", ""),
        ("64x64x65-bf16", *["rows or columns of a are 65 elements apart, must be a multiple of 8"] * 2),
        ("64x65x64-bf16", *["rows or columns of b are 65 elements apart, must be a multiple of 8"] * 2),
        ("64x64x64-bf16-b.expanded", *["rows or columns of b are 0 elements apart, must be a multiple of 8"] * 2),
        ("64x65x64-bf16-b.col", "", "rows of out are 65 elements apart, must be a multiple of 8"),
        ("64x66x64-bf16-b.col-out.fp32", "", "rows of out are 66 elements apart, must be a multiple of 4"),
        ("64x68x64-bf16-b.col-out.fp32", "", ""),
        ("5x7x0-bf16", "", ""),
    ],
)
def test_copyable_says_why_not(slug: str, operands: str, with_out: str) -> None:
    case = Case.parse(slug)
    assert (shared.copyable(case), shared.copyable_with_out(case)) == (operands, with_out)


def test_only_a_step_whose_launcher_asks_for_it_refuses_an_out_that_cannot_be_copied() -> None:
    case = Case.parse("136x263x72-bf16-b.col")
    assert [step.name for step in OP.steps if not OP.serves(step, case)] == ["v16_gluon"]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("library", ["cublas", "cublaslt"])
@pytest.mark.parametrize("preferred", ["cublas", "cublaslt"])
def test_a_baseline_calls_its_own_library_and_leaves_the_preference_as_it_was(
    monkeypatch: pytest.MonkeyPatch, preferred: str, library: str, broken: bool
) -> None:
    names = torch.backends.cuda._BlasBackends
    set_to = [names[preferred]]
    monkeypatch.setattr(torch._C, "_get_blas_preferred_backend", lambda: set_to[-1])
    monkeypatch.setattr(torch._C, "_set_blas_preferred_backend", set_to.append)
    used = []

    def mm(*_: object, **__: object) -> None:
        used.append(set_to[-1])
        if broken:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "mm", mm)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    try:
        torch_mm(library)(on_gpu, on_gpu, out=on_gpu)
    except RuntimeError:
        assert broken
    assert used == [names[library]]
    assert set_to[-1] == names[preferred]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What torch.compile is asked for, which gives back the function as it is."""
    asked: list[dict[str, object]] = []

    def compile_nothing(function: object, **wanted: object) -> object:
        asked.append(wanted)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    return asked


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("matmul_bf16", "129x127x65-bf16"),
        ("matmul_bf16", "136x264x72-fp16-b.col"),
        ("matmul_bf16", "129x127x65-bf16-out.fp32"),
        ("matmul_fp32", "129x127x65-fp32-a.col-pitch.1"),
    ],
)
def test_torch_compile_is_given_the_product_as_it_lies(asked: list[dict[str, object]], name: str, slug: str) -> None:
    verdict = check_baseline(OPS[name], compiled_product(), Case.parse(slug), device="cpu")
    assert verdict.ok, verdict.reason
    assert [each["dynamic"] for each in asked] == [False]


def test_the_search_of_torch_compile_is_its_own_mode_and_prints_nothing(asked: list[dict[str, object]]) -> None:
    a = torch.ones(4, 4, dtype=torch.bfloat16)
    compiled_product("max-autotune-no-cudagraphs")(a, a, out=torch.empty_like(a))
    (wanted,) = asked
    mode = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    quiet = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
    assert wanted == {"dynamic": False, "options": {**mode, **quiet}}


def test_a_search_is_made_for_three_headline_products_alone() -> None:
    cases = OP.baseline_cases["max_autotune"]
    assert [case.slug for case in cases] == ["4096x4096x4096-bf16", "8192x8192x8192-bf16", "4095x4097x4096-bf16"]
    assert {*cases} <= {*OP.headline_cases}
    for case in OP.timed_cases:
        assert OP.baselines_at(case) == tuple(OP.baselines)[: 4 if case in cases else 3]


def test_compiled_fp32_is_true_fp32(asked: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    call, a = compiled_product(), torch.ones(4, 4)
    monkeypatch.setattr(shared, "allows_tf32", lambda: True)
    with pytest.raises(RuntimeError, match=r"^TF32 is on; this baseline is true fp32: torch.set_float32_matmul"):
        call(a, a, out=torch.empty_like(a))
    half = a.bfloat16()
    assert call(half, half, out=torch.empty_like(half)).equal(4 * half)
