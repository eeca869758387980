"""The two extensions: what public functions run, which a wheel has, and the other steps, which a clone has as well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from build_support import parts, sources
from kernel_twins import OPS

ROOT = sources.ROOT
DIVIDED = parts.divide(OPS.values())


def test_every_launcher_is_in_one_extension() -> None:
    steps = {(op.name, step.name) for op in OPS.values() for step in op.steps_of("cuda")}
    baselines = {(op.name, name) for op in OPS.values() for name in parts.compiled_baselines(op)}
    assert DIVIDED.public | DIVIDED.ladder == steps | baselines
    assert not DIVIDED.public & DIVIDED.ladder


def test_what_public_functions_run_is_in_the_extension_of_a_wheel() -> None:
    assert {(op.name, step) for op in OPS.values() for step in op.behind.get("cuda", ())} <= DIVIDED.public
    assert {*sources.operator_files(), *sources.function_files()} <= {*DIVIDED.public_files}


def test_that_extension_calls_no_step_of_the_other() -> None:
    ladder = {f"{op}_{step}" for op, step in DIVIDED.ladder}
    for op, step in DIVIDED.public:
        text = re.sub(r"//.*", "", (ROOT / OPS[op].file(step, "cuda")).read_text())
        assert not {*re.findall(r"\b(\w+)\(", text)} & ladder, f"{op} {step}"


@pytest.mark.parametrize("included", [False, True])
def test_a_step_that_another_leaves_calls_to_goes_with_it(tmp_path: Path, included: bool) -> None:
    op = OPS["softmax"]
    first, second, *others, last = op.steps_of("cuda")
    assert op.behind["cuda"][0] == last.name
    for step in op.steps_of("cuda"):
        file = tmp_path / op.file(step.name, "cuda")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    call = f"return softmax_{first.name}(args);\n"
    (file.parent / "rest.cuh").write_text(call if included else "")
    file.write_text('#include "rest.cuh"\n' if included else call)
    public = parts.divide([op], tmp_path).public
    assert ("softmax", first.name) in public
    assert public == {("softmax", step) for step in (*op.behind["cuda"], first.name)}
    assert second and others


def test_one_operation_is_its_steps_and_its_familys_operators() -> None:
    of_one = parts.divide(OPS.values(), only="softmax")
    assert {op for op, _ in of_one.public | of_one.ladder} == {"softmax"}
    assert of_one.public | of_one.ladder == {("softmax", step.name) for step in OPS["softmax"].steps_of("cuda")}
    kernels = [file for file in (*of_one.public_files, *of_one.ladder_files) if file.suffix == ".cu"]
    assert {file.parent for file in kernels} == {Path(OPS["softmax"].folder("cuda")), sources.PROBES.parent}
    assert {file.parent.name for file in of_one.public_files if file.name.startswith("torch")} == {"softmax"}


def test_one_operation_has_the_kernels_that_its_familys_operators_launch() -> None:
    of_one = parts.divide(OPS.values(), only="matmul_bf16")
    assert Path("cuda-kernels/matmul/linear/function_backward.cu") in of_one.public_files
