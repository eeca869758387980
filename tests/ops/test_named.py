"""A step is named by as much of its beginning as tells it from the others, wherever a command takes one."""

from __future__ import annotations

import pytest

from kernel_twins import OPS, named
from kernel_twins.__main__ import main
from kernel_twins.report.compare.operands import Operand, OperandError, cell
from kernel_twins.report.measure.selection import Selection
from kernel_twins.report.rows import store

DATA = store.DATA / store.REFERENCE_GPU


def test_every_step_is_named_by_its_number() -> None:
    for op in OPS.values():
        for step in op.steps:
            assert named.step(op, step.name[:3]) is step
            assert named.step(op, step.name) is step


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("v1", "step is 'v1', with which several names of softmax begin: v10_cluster_registers, v13_dispatch"),
        ("v99", "step is 'v99'; softmax has v01_"),
        ("", "step is ''; softmax has v01_"),
        ("cluster", "step is 'cluster'; softmax has v01_"),
    ],
)
def test_what_names_no_step_or_several_lists_them(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        named.step(OPS["softmax"], text)


def test_a_name_that_begins_another_is_itself() -> None:
    assert named.whole("v01", ["v01_a", "v01"], "step", "op") == "v01"


def test_a_selection_takes_a_beginning() -> None:
    assert Selection.of(["vector_add"], "v03", None, None).step == "v03_vectorized"
    with pytest.raises(ValueError, match=r"--step is 'v03', with which several names of all operations begin: v03_by"):
        Selection.of(None, "v03", None, None)
    with pytest.raises(ValueError, match="--step is 'v99'; there is, for example, v01_scalar"):
        Selection.of(["vector_add"], "v99", None, None)


def test_a_cell_takes_a_beginning() -> None:
    found = cell(DATA, Operand.parse("vector_add/v03/cuda"))
    assert (found.name.step, found.name.backend) == ("v03_vectorized", "cuda")
    with pytest.raises(OperandError, match=r"'vector_add/v0/cuda': step is 'v0', with which several"):
        cell(DATA, Operand.parse("vector_add/v0/cuda"))
    with pytest.raises(
        OperandError, match=r"'vector_add/v99/cuda' was not measured; vector_add has .*v03_vectorized/cuda"
    ):
        cell(DATA, Operand.parse("vector_add/v99/cuda"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "softmaks", "v02", "triton"], "op is 'softmaks'; there are vector_add"),
        (["run", "softmax", "v99", "triton"], "step is 'v99'; softmax has v01_"),
        (["bench", "softmax", "v1"], "step is 'v1', with which several names of softmax begin"),
        (["show", "softmax", "v02", "cuda", "--diff", "v1"], "--diff is 'v1', with which several names"),
    ],
)
def test_a_wrong_name_is_told_with_and_without_a_gpu(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_a_wrong_call_is_told_with_the_usage_of_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["bench", "softmax", "v02", "triton"], "unrecognized arguments: triton"),
        (["bench", "softmax", "v99"], "step is 'v99'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("usage: python -m kernel_twins bench [-h]")
        assert told in said
