"""A new operation edits at most two files that are there, and a new step two: as a contributor does, in copies.

tests/fixtures/new_operation is all that a family of one operation and its gradient brings, each file in the folder that
it belongs to; tests/fixtures/new_step is a second step on its ladder. ``pytest -rP`` shows how many files they are.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from build_support import kept, toolkit
from build_support.toolkit import BuildError
from tests import copies, forks

OPERATION: copies.Edits = {
    "kernel_twins/__init__.py": (
        (
            "``kernel_twins.dropout_add(x, residual)``,",
            "``kernel_twins.dropout_add(x, residual)``, ``kernel_twins.scale(x, alpha)``,",
        ),
        (
            "import softmax as softmax\n",
            "import softmax as softmax\n    from kernel_twins.functional.toy.scale import scale as scale\n",
        ),
        ('    "rms_norm": "norm.norm",\n', '    "rms_norm": "norm.norm",\n    "scale": "toy.scale",\n'),
    ),
    "docs/README.md": (
        (
            "which thread takes which element\n",
            "which thread takes which element\n- [Scale](scale.md): one number for all elements\n"
            "- [Scale, backward](scale_backward.md): the same one again\n",
        ),
    ),
}
STEP: copies.Edits = {
    "kernel_twins/ops/toy/scale.py": (
        ("from kernel_twins.spec import Op, Step", "from kernel_twins.spec import Op, Prediction, Step"),
        (
            "predictions=shared.FIRST_PREDICTIONS,\n        ),\n",
            """predictions=shared.FIRST_PREDICTIONS,
        ),
        Step(
            name="v02_grid_stride",
            predictions=(Prediction("time", "==", 1.0, relative=True, tolerance=0.04),),
        ),
""",
        ),
    ),
    "docs/scale.md": (
        (
            "<!-- counters:v01_scalar:end -->\n",
            """<!-- counters:v01_scalar:end -->

## v02_grid_stride: a grid that strides

![Instead of one block for every tile, eight blocks take three tiles each](drawings/grid-stride.svg)

The grid has only as many blocks as the GPU can hold at a time.

Twins: [CUDA](../cuda-kernels/toy/scale/v02_grid_stride.cu),
[Triton](../triton-kernels/toy/scale/v02_grid_stride.py).

<!-- counters:v02_grid_stride:begin -->
<!-- counters:v02_grid_stride:end -->
""",
        ),
    ),
}
ALL = (
    *("build", "check", "documents", "functional", "functions_report", "predictions"),
    *("sampled_contests", "sampling", "triton_aot", "triton_interpreter"),
)
"""Tests of all operations and functions, a file each."""
OF_MEASUREMENTS = ("was_tried", "recorded_counters")
"""Those of them that are skipped until an operation is measured, which takes a GPU."""


def laid(copy: Path, fixture: str, edits: copies.Edits) -> list[str]:
    """The files that are new in the copy."""
    new = copies.lay(fixture, copy)
    copies.edit(edits, copy)
    print(f"{fixture.replace('_', ' ')}: {len(new)} new files, {len(edits)} edited: {', '.join(edits)}")
    assert not {*new} & {*edits}
    return new


def passed(copy: Path, selected: str, *files: str) -> None:
    """Run tests of the copy, all of which must pass."""
    quiet = ("-q", "-p", "no:cacheprovider", f"--basetemp={copy.parent / 'within'}")
    told = copies.run(copy, "-m", "pytest", *quiet, "-k", selected, *files, REQUIRE_BUILD="1")
    summary = re.search(r"^\d+ passed, \d+ deselected", told, re.MULTILINE)
    assert summary, told
    print(summary[0])


def test_a_new_operation_edits_at_most_two_files(tmp_path: Path) -> None:
    copy = copies.copied(tmp_path / "copy")
    new = laid(copy, "new_operation", OPERATION)
    assert len(OPERATION) <= 2
    assert not any((kept.ROOT / file).exists() for file in new)
    copies.run(copy, "-c", "from tests.build_support import test_new_operation; test_new_operation.found()")


def found() -> None:
    """In the copy: whoever looks for operations finds the new ones."""
    from build_support import sources, step_table
    from kernel_twins import OPS
    from kernel_twins.report.calls.functions import FUNCTIONS
    from kernel_twins.spec import BACKENDS

    assert FUNCTIONS["scale"].ops == ("scale", "scale_backward")
    for op in map(OPS.__getitem__, FUNCTIONS["scale"].ops):
        assert [step_table.disagreements(op, backend, sources.ROOT) for backend in BACKENDS] == [[], []]
        assert f'{{"v01_scalar", {op.name}_v01_scalar, ">=8.0", false}}' in _tables()
    assert "register_toy(module);" in step_table.render_module(sources.operator_files())


def _tables() -> str:
    """What the build writes of the launchers: those that public functions reach, then the others."""
    from build_support import parts, step_table
    from kernel_twins import OPS

    ops = [*OPS.values()]
    divided = parts.divide(ops)
    return step_table.render(ops, divided.public) + step_table.render_ladder(ops, divided.ladder)


@pytest.mark.slow
def test_a_new_operation_is_built_tested_and_told_of(tmp_path: Path) -> None:
    """With a second step; once for the same files, whatever they are of."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA, so there is nothing to build")
    try:
        cuda = toolkit.find(os.environ, torch.version.cuda)
    except BuildError as error:
        pytest.skip(str(error))
    lacking = copies.unbuilt()
    if lacking and os.environ.get("REQUIRE_BUILD") != "1":
        pytest.skip(lacking)
    assert not lacking

    key = ["a new operation", str(cuda.version), *forks.surroundings()]
    if kept.find("verdicts", key):
        return
    began = time.time_ns()
    copy = copies.copied(tmp_path / "copy")
    laid(copy, "new_operation", OPERATION)
    laid(copy, "new_step", STEP)
    copies.build(copy)
    planned = copies.run(copy, "profiling/ncu_report.py", "plan", "--op", "scale")
    assert "36 cells were never timed there" in planned
    for verb in ("predict", "log"):
        copies.run(copy, "profiling/ncu_report.py", verb)
    entries = (copy / "docs" / "log" / "scale.md").read_text()
    assert entries.count("*not measured*: run `python profiling/ncu_report.py --op scale` on a machine with the") == 4
    files = [file for name in ALL for file in (kept.ROOT / "tests").rglob(f"test_{name}.py")]
    assert len(files) == len(ALL)
    wanted = "scale or documents_agree or functions_are or all_frozen"
    selected = f"({wanted}) and not ({' or '.join(OF_MEASUREMENTS)})"
    passed(copy, selected, "tests/functional/toy", *(str(file.relative_to(kept.ROOT)) for file in files))
    kept.keep("verdicts", key, copies.files(), {}, {}, since=began)


def test_a_new_step_edits_two_files(tmp_path: Path) -> None:
    copy = copies.copied(tmp_path / "copy")
    copies.lay("new_operation", copy)
    copies.edit(OPERATION, copy)
    laid(copy, "new_step", STEP)
    assert len(STEP) == 2
    copies.run(copy, "-c", "from tests.build_support import test_new_operation; test_new_operation.found_step()")


def found_step() -> None:
    """In the copy: the table has the step, and the page tells of it."""
    from build_support import sources, step_table
    from kernel_twins import OPS
    from kernel_twins.report.pages import ladder_page
    from kernel_twins.spec import BACKENDS

    op = OPS["scale"]
    assert [step_table.disagreements(op, backend, sources.ROOT) for backend in BACKENDS] == [[], []]
    assert 'kernel_twins::add("scale", scale_steps, "v02_grid_stride", scale_v02_grid_stride);' in _tables()
    assert ladder_page.gaps((sources.ROOT / "docs" / "scale.md").read_text(), op) == []
