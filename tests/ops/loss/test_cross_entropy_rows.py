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
