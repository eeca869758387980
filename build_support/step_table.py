"""Writes what the extensions know by name: the tables of launchers and of the steps behind functions, and the modules.

The tables are of ``_C`` and list the launchers of both extensions. They include no torch header, so that a new step
compiles itself and its extension's generated file, and never the torch side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from build_support.parts import Launcher, compiled_baselines
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


def render(ops: Iterable[Op], public: Collection[Launcher]) -> str:
    """The C++ text: ``<op>_steps`` for each operation that has launchers, and for all, ``behind`` and ``launchable``.

    Launchers that are not ``public`` are listed, and look for the ladder, which adds them.
    """
    ops = [op for op in ops if _entries(op)]
    head = ["// Generated from kernel_twins/ops by build_support/step_table.py.", "", "#include <iterator>", ""]
    includes = [*_headers(ops), '#include "lib/step.h"', '#include "torch/behind.h"', '#include "torch/ladder.h"']
    return "\n".join(
        [*head, *includes, "", *(_table(op, public) for op in ops), _behind(ops), _launchable(ops, public)]
    )


def render_ladder(ops: Sequence[Op], ladder: Collection[Launcher]) -> str:
    """The C++ text of the ladder's Python module, which adds its launchers to the tables of ``_C``."""
    added = [(op, name) for op in ops for name, _, _ in _entries(op) if (op.name, name) in ladder]
    names = {op.name for op, _ in added}
    return "\n".join(
        [
            "// Generated from kernel_twins/ops by build_support/step_table.py.",
            "",
            "#include <pybind11/pybind11.h>",
            "",
            *_headers(op for op in ops if op.name in names),
            '#include "torch/ladder.h"',
            "",
            *(_declaration(op, name) for op, name in added),
            "",
            "PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {",
            '  module.doc() = "The steps that no public function runs: importing it adds them to kernel_twins._C.";',
            *(f'  kernel_twins::add("{op.name}", {op.name}_steps, "{name}", {op.name}_{name});' for op, name in added),
            "}",
            "",
        ]
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


def require_agreement(ops: Iterable[Op], root: Path) -> None:
    """BuildError where specs and .cu files disagree."""
    if wrong := [sentence for op in ops for sentence in disagreements(op, "cuda", root)]:
        raise BuildError("the specs and the CUDA files disagree:\n  " + "\n  ".join(wrong))


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


def _launchable(ops: Iterable[Op], public: Collection[Launcher]) -> str:
    pairs = [(op.name, name) for op in ops for name, _, _ in _entries(op) if (op.name, name) in public]
    return "\n".join(
        [
            "std::set<std::pair<std::string, std::string>> kernel_twins::launchable = {",
            *(f'    {{"{op}", "{name}"}},' for op, name in pairs),
            "};",
            "",
        ]
    )


def _entries(op: Op) -> list[tuple[str, str, bool]]:
    """Name, architecture and fp32_out of every launcher that is found by name."""
    steps = [(step.name, step.arch, step.fp32_out) for step in op.steps_of("cuda")]
    return steps + [(name, BASELINE_ARCH, False) for name in compiled_baselines(op)]


def _headers(ops: Iterable[Op]) -> list[str]:
    return [f'#include "{op.family}/{op.name}/args.h"' for op in ops]


def _args(op: Op) -> str:
    return "".join(word.capitalize() for word in op.name.split("_")) + "Args"


def _declaration(op: Op, name: str) -> str:
    return f"void {op.name}_{name}(const {_args(op)}& args);"


def _table(op: Op, public: Collection[Launcher]) -> str:
    entries, args, steps = _entries(op), _args(op), f"{op.name}_steps"
    here = {name: f"{op.name}_{name}" for name, _, _ in entries if (op.name, name) in public}
    looked_for = {
        name: f'[](const {args}& args) {{ kernel_twins::launch_from_ladder("{op.name}", {steps}, "{name}", args); }}'
        for name, _, _ in entries
    }
    launchers = looked_for | here
    rows = [f'    {{"{name}", {launchers[name]}, "{arch}", {str(fp32).lower()}}},' for name, arch, fp32 in entries]
    return "\n".join(
        [
            *(_declaration(op, name) for name in here),
            f"static Step<{args}> {op.name}_rows[] = {{",
            *rows,
            "};",
            f"const StepTable<{args}> {steps}{{std::begin({op.name}_rows), std::end({op.name}_rows)}};",
            "",
        ]
    )
