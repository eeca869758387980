"""Writes the table by which the extension finds a launcher by the name of its step.

It is the only generated file and includes no torch header, so that a new step compiles itself and this table, and
never the bindings.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from build_support.toolkit import BuildError
from kernel_twins.spec import Backend, Op

BASELINE_ARCH = ">=8.0"


def disagreements(op: Op, backend: Backend, root: Path) -> list[str]:
    """Where an operation's ladder and the files of one language differ, one sentence each."""
    wanted = {op.file(step.name, backend) for step in op.steps_of(backend)}
    found = {path.relative_to(root).as_posix() for path in root.glob(op.file("v*", backend))}
    missing = [f"{file} is missing, the spec has the step" for file in wanted - found]
    extra = [f"{file} has no step in the spec" for file in found - wanted]
    return sorted(missing + extra)


def compiled_baselines(op: Op) -> list[str]:
    """The baselines that are compiled into the extension beside the steps."""
    return [name for name, call in op.baselines.items() if call is None]


def render(ops: Iterable[Op]) -> str:
    """The C++ text: for each operation its launchers' declarations and ``<op>_steps``."""
    tables = [table for op in ops if (table := _table(op))]
    includes = [f'#include "{op.family}/{op.name}/args.h"' for op in ops if _entries(op)]
    head = ["// Generated from kernel_twins/ops by build_support/step_table.py.", "", "#include <iterator>", ""]
    return "\n".join([*head, *includes, '#include "lib/step.h"', "", *tables])


def write(ops: Iterable[Op], root: Path, path: Path) -> None:
    """Write the table where it changed; BuildError where specs and .cu files disagree."""
    ops = list(ops)
    if wrong := [sentence for op in ops for sentence in disagreements(op, "cuda", root)]:
        raise BuildError("the specs and the CUDA files disagree:\n  " + "\n  ".join(wrong))
    text = render(ops)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _entries(op: Op) -> list[tuple[str, str, bool]]:
    """Name, architecture and fp32_out of all that is launched by name."""
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
