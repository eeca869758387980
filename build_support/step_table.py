"""Generates two C++ files: the table of launchers and of steps behind functions, and the Python module.

The table includes no torch header, so a new step recompiles only itself and the table, not the torch side.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from build_support.toolkit import BuildError
from kernel_twins.spec import Backend, Op

BASELINE_ARCH = ">=8.0"


def disagreements(op: Op, backend: Backend, root: Path) -> list[str]:
    """The differences between an operation's ladder and the files of one language, one sentence each."""
    wanted = {op.file(step.name, backend) for step in op.steps_of(backend)}
    found = {path.relative_to(root).as_posix() for path in root.glob(op.file("v*", backend))}
    write = f"write it, or give the Step a no_{backend}"
    missing = [f"{file} is missing, the spec has the step: {write}" for file in wanted - found]
    spec = f"kernel_twins/ops/{op.family}/{op.name}.py"
    extra = [f"{file} has no step in the spec: add a Step to {spec}, or delete the file" for file in found - wanted]
    steps = {step.name for step in op.steps_of(backend)}
    unknown = [
        f"{name} is behind {op.name}'s function, and no step that the spec has in {backend}"
        for name in op.behind.get(backend, ())
        if name not in steps
    ]
    return sorted(missing + extra) + unknown


def compiled_baselines(op: Op) -> list[str]:
    """The baselines that are compiled into the extension beside the steps."""
    return [name for name, call in op.baselines.items() if call is None]


def render(ops: Iterable[Op]) -> str:
    """The C++ text: the launchers' declarations and ``<op>_steps`` of each operation, and ``behind`` for all."""
    ops = list(ops)
    tables = [table for op in ops if (table := _table(op))]
    includes = [f'#include "{op.family}/{op.name}/args.h"' for op in ops if _entries(op)]
    head = ["// Generated from kernel_twins/ops by build_support/step_table.py.", "", "#include <iterator>", ""]
    return "\n".join(
        [*head, *includes, '#include "lib/step.h"', '#include "torch/behind.h"', "", *tables, _behind(ops)]
    )


def render_module(operator_files: Iterable[Path]) -> str:
    """The C++ text of the Python module, to which each family with torch files adds its steps."""
    families = sorted({file.parent.name for file in operator_files})
    functions = [f"register_{name}" for name in ("extension", *families)]
    return "\n".join(
        [
            "// Generated from the folders of cuda-kernels/ by build_support/step_table.py.",
            "",
            "#include <pybind11/pybind11.h>",
            "",
            *(f"void {function}(pybind11::module_& module);" for function in functions),
            "",
            "PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {",
            *(f"  {function}(module);" for function in functions),
            "}",
            "",
        ]
    )


def write(ops: Iterable[Op], root: Path, path: Path) -> None:
    """Write the table if it changed; BuildError if specs and .cu files disagree."""
    ops = list(ops)
    if wrong := [sentence for op in ops for sentence in disagreements(op, "cuda", root)]:
        raise BuildError("the specs and the CUDA files disagree:\n  " + "\n  ".join(wrong))
    write_changed(path, render(ops))


def write_changed(path: Path, text: str) -> None:
    """Write a file only if its text changes, so that nothing is compiled again without need."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _behind(ops: Iterable[Op]) -> str:
    quoted = {op.name: ", ".join(f'"{step}"' for step in op.behind["cuda"]) for op in ops if "cuda" in op.behind}
    arrays = [f"static constexpr const char* {name}_behind[] = {{{steps}}};" for name, steps in quoted.items()]
    found = [f'  if (op == "{name}") return {name}_behind;' for name in quoted]
    function = ["std::span<const char* const> kernel_twins::behind(std::string_view op) {", *found, "  return {};", "}"]
    return "\n".join([*arrays, *function, ""])


def _entries(op: Op) -> list[tuple[str, str, bool]]:
    """Name, architecture and fp32_out of every launcher that is found by name."""
    steps = [(step.name, step.arch, step.fp32_out) for step in op.steps_of("cuda")]
    return steps + [(name, BASELINE_ARCH, False) for name in compiled_baselines(op)]


def _table(op: Op) -> str:
    entries = _entries(op)
    if not entries:
        return ""
    args = "".join(word.capitalize() for word in op.name.split("_")) + "Args"
    declarations = [f"void {op.name}_{name}(const {args}& args);" for name, _, _ in entries]
    rows = [f'    {{"{name}", {op.name}_{name}, "{arch}", {str(fp32).lower()}}},' for name, arch, fp32 in entries]
    return "\n".join(
        [
            *declarations,
            f"static constexpr Step<{args}> {op.name}_rows[] = {{",
            *rows,
            "};",
            f"const StepTable<{args}> {op.name}_steps{{std::begin({op.name}_rows), std::end({op.name}_rows)}};",
            "",
        ]
    )
