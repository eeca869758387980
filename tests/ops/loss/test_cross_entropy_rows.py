"""cross_entropy's last Triton step: rows split over two launches, rows of one launch, and vectors where rows start."""

from __future__ import annotations

import importlib

import pytest

from kernel_twins import OPS, load, ops
from kernel_twins.compiler import aot
from kernel_twins.spec import Case
from tests import forks

pytest.importorskip("torch")
pytest.importorskip("triton")

OP, STEP = "cross_entropy", "v06_dispatch"
PARTS, ROWS = f"{OP}_{STEP}_kernel", f"{OP}_{STEP}_rows_kernel"


@pytest.mark.parametrize(
    ("slug", "names"),
    [
        ("2x9995457-fp16", [PARTS, ROWS]),
        ("512x151936-bf16", [PARTS, ROWS]),
        ("13342x45916-fp16-logits.pitched", [PARTS]),
        ("8192x40000-fp32-logits.spaced-smoothing.tenth", [PARTS]),
        ("262144x1024-bf16", [f"{OP}_v04_rows_per_block_kernel"]),
        ("300000x88-fp32", [f"{OP}_short_rows_kernel"]),
        ("300000x256-bf16", [f"{OP}_short_rows_kernel"]),
    ],
)
def test_few_long_rows_take_two_launches_and_all_long_rows_are_read_by_vectors(slug: str, names: list[str]) -> None:
    kernels = aot.compiled(OPS[OP], OPS[OP].step(STEP), Case.parse(slug))
    assert [kernel.name for kernel in kernels] == names
    assert ".v4.b32" in kernels[0].asm["ptx"]  # accesses of 16 bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", [1, 5])
def test_long_rows_are_right_when_interpreted(parts: int, dtype: str) -> None:
    forks.interpreted("tests.ops.loss.test_cross_entropy_rows", "judge", parts, dtype)


def judge(parts: int, dtype: str) -> None:
    """Rows in that many parts, of which some are empty, at each alignment, with each special value and target."""
    from kernel_twins.harness.check import Problem, generator

    kernels = importlib.import_module(f"kernel_twins._triton.loss.{OP}.{STEP}")
    split = importlib.import_module("kernel_twins._triton.softmax.routes").Split
    setattr(kernels, "LONG_BYTES", 0)  # noqa: B010
    setattr(kernels, "split", lambda rows, _: split(parts, rows.together))  # noqa: B010
    op, call = ops.get(OP), load(OP, STEP, "triton")
    lse, tenth = {"lse": "yes"}, {"smoothing": "tenth"}
    sized: list[tuple[int, int, dict[str, str]]] = [
        (1, 1, {}),
        (3, 12, lse),
        (2, 2_053, tenth),
        (3, 6_007, {"values": "edges", "target": "first"}),
        (3, 6_007, {"values": "edges", "target": "last"}),
        (9, 515, {"logits": "pitched"}),
        (9, 517, {**tenth, "logits": "spaced"}),
        (3, 520, {"logits": "expanded"}),
        (3, 515, {"offset": "1"}),
        *((3, 1_003, {**lse, "values": values}) for values in ("outliers", "inf", "infs", "nan", "masked")),
        (3, 1_003, {**tenth, "values": "masked"}),
        (9, 1_003, {**lse, **tenth, "target": "ignored", "ignore": "5"}),
    ]
    wrong = []
    for m, n, variant in sized:
        for case in op.judged_cases(Case.of(m, n, dtype=dtype, **variant)):
            verdict = Problem(op, case, op.inputs(case, generator(case, "cpu"))).run(call)
            wrong += [] if verdict.ok else [f"{case.slug}: {verdict.reason}"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_short_rows_have_as_few_lanes_as_hold_them(itemsize: int) -> None:
    short = importlib.import_module("kernel_twins._triton.loss.cross_entropy.short_rows")
    lanes = importlib.import_module("kernel_twins._triton.loss.lanes")
    rows_of = importlib.import_module("kernel_twins._triton.softmax.routes").Rows
    for n in range(1, 8_192 // itemsize + 1):
        for pitch in (0, 1, 3, 8):
            rows = rows_of(1_000, n, itemsize, (n + pitch,), True)
            way = short.held(rows, 132)
            assert way.lanes * way.pieces * way.vector >= n > way.lanes * (way.pieces - 1) * way.vector
            assert way.pieces * way.vector <= lanes.HELD
    assert short.held(rows_of(10**7, 88, 4, (88,), True), 132).lanes == 4


@pytest.mark.parametrize("slug", ["120000x649-bf16-logits.spaced", "5341x50257-bf16", "700000x63-fp16"])
def test_gradients_of_misaligned_rows_are_moved_by_vectors(slug: str) -> None:
    op = OPS["cross_entropy_backward"]
    (kernel,) = aot.compiled(op, op.step("v03_rows_per_block"), Case.parse(slug))
    assert kernel.name == "cross_entropy_backward_packed_rows_kernel"
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
    assert "st.global.v4.b32" in kernel.asm["ptx"]
    assert kernel.asm["ptx"].count("ld.global.b16") <= 4  # the ends


@pytest.mark.parametrize("skews", [(0, 0), (0, 3), (3, 0), (3, 3), (8, 0), (5, 2)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_element_of_a_gradient_has_one_place(itemsize: int, skews: tuple[int, int]) -> None:
    ways = importlib.import_module("kernel_twins._triton.loss.cross_entropy_backward.packed_rows")
    for n in (*range(1, 300), 649, 1_024, 1_027, 4_095, 4_097, 8_200, 50_257):
        for aligned in ((True, True), (False, True), (True, False)):
            way = ways.packed(1_000, n, itemsize, (n + skews[0], n + skews[1]), aligned, 132)
            assert way.lanes * way.rows % ways.THREADS == 0
            packs = way.parts * way.chunks * way.lanes
            assert packs * way.vector >= n - way.edges * (way.vector - 1)
            assert way.edges or n % way.vector == 0
            # Chunks without a mask are full in every part of every row.
            least = (n - way.edges * (way.vector - 1)) // way.vector - (way.parts - 1) * way.chunks * way.lanes
            assert way.full * way.lanes <= max(least, 0)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_gradients_of_misaligned_rows_are_right_when_interpreted(dtype: str) -> None:
    forks.interpreted("tests.ops.loss.test_cross_entropy_rows", "judge_gradients", dtype)


def judge_gradients(dtype: str) -> None:
    """Rows of one and of several parts, of like and of other skews, in place, too."""
    import torch

    import kernel_twins
    from kernel_twins.harness.check import Problem, generator

    op, call, wrong = (
        ops.get("cross_entropy_backward"),
        load("cross_entropy_backward", "v03_rows_per_block", "triton"),
        [],
    )
    for m, n, variant in (
        (33, 63, {}),
        (33, 64, {"logits": "pitched"}),
        (40, 21, {"target": "ignored"}),
        (9, 649, {"logits": "spaced", "smoothing": "tenth"}),
        (3, 4_501, {"values": "edges", "target": "last"}),
        (9, 777, {"offset": "1", "dout": "scalar"}),
    ):
        for case in op.judged_cases(Case.of(m, n, dtype=dtype, **variant)):
            verdict = Problem(op, case, op.inputs(case, generator(case, "cpu"))).run(call)
            wrong += [] if verdict.ok else [f"{case.slug}: {verdict.reason}"]
    assert not wrong, "\n".join(wrong)
    for m, n, pitch in ((33, 64, 67), (9, 649, 657), (5, 21, 24)):
        memory = torch.randn(m * pitch, dtype=torch.float32).to(
            getattr(torch, {"fp32": "float32"}.get(dtype, "float16"))
        )
        logits, between = memory.view(m, pitch)[:, :n], memory.view(m, pitch)[:, n:].clone()
        target = torch.arange(m) % n
        target[::3] = -100
        leaf = logits.double().requires_grad_()
        torch.nn.functional.cross_entropy(leaf, target).backward()
        kernel_twins.cross_entropy_gradient_(logits, target, backend="triton")
        torch.testing.assert_close(logits.double(), leaf.grad, rtol=2e-3, atol=1e-4)
        assert torch.equal(memory.view(m, pitch)[:, n:], between)
