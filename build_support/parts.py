"""Which of the two extensions has which source.

``kernel_twins._C`` has what the public functions run: the operators, the steps behind them, and the steps that those
leave some calls to. ``kernel_twins._ladder`` has the other steps and the compiled baselines, which are for reading and
measuring; it adds them to the tables of ``_C`` when it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from build_support import sources
from kernel_twins.spec import Op

PUBLIC = "kernel_twins._C"
LADDER = "kernel_twins._ladder"

Launcher = tuple[str, str]
"""An operation, and the name of a step or of a compiled baseline."""

_LAUNCHER = re.compile(r"\b([a-z]\w*?)_(v\d\d_\w+)\(")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Parts:
    """What each extension is made of: launchers, which the generated tables name, and sources, relative to the root."""

    public: frozenset[Launcher]
    ladder: frozenset[Launcher]
    public_files: tuple[Path, ...]
    ladder_files: tuple[Path, ...]


def divide(ops: Iterable[Op], root: Path = sources.ROOT, only: str = "") -> Parts:
    """The parts of all operations, or of ``only`` one: its steps, and its family's operators."""
    by_name = {op.name: op for op in ops}
    chosen = [op for op in by_name.values() if only in ("", op.name)]
    families = {op.family for op in chosen}
    behind = [(op.name, step) for op in chosen for step in op.behind.get("cuda", ())]
    public = _with_called(behind, by_name, root)
    steps = {(op.name, step.name) for op in chosen for step in op.steps_of("cuda")}
    baselines = {(op.name, name) for op in chosen for name in compiled_baselines(op)}

    def files(launchers: Collection[Launcher]) -> list[Path]:
        return sorted(Path(by_name[op].file(step, "cuda")) for op, step in launchers)

    operators = [file for file in sources.operator_files(root) if file.parent.name in families]
    functions = [file for file in sources.function_files(root) if file.parent.parent.name in families]
    return Parts(
        public=frozenset(public),
        ladder=frozenset((steps | baselines) - public),
        public_files=(
            *(sources.MODULE, sources.EXTENSION, sources.CHOICES, *operators, sources.STEP_TABLE),
            *(*files(public), *functions, sources.PROBES),
        ),
        ladder_files=(
            *(sources.LADDER, *files(steps - public)),
            *(sources.baseline_files(root) if baselines else ()),
        ),
    )


def compiled_baselines(op: Op) -> list[str]:
    """The baselines that are compiled into the extension beside the steps."""
    return [name for name, call in op.baselines.items() if call is None]


def _with_called(launchers: Iterable[Launcher], ops: dict[str, Op], root: Path) -> set[Launcher]:
    """The launchers, and those that any of them calls, directly or through another."""
    found: set[Launcher] = set()
    ahead = list(launchers)
    while ahead:
        if (launcher := ahead.pop()) not in found:
            found.add(launcher)
            op, step = launcher
            text = _text(root / ops[op].file(step, "cuda"), root, set())
            ahead += [(other, name) for other, name in _LAUNCHER.findall(text) if _is_step(ops, other, name)]
    return found


def _is_step(ops: dict[str, Op], op: str, name: str) -> bool:
    return op in ops and name in {step.name for step in ops[op].steps_of("cuda")}


def _text(file: Path, root: Path, seen: set[Path]) -> str:
    """A file's text and that of the headers it includes, each once; empty where there is no such file."""
    if file in seen or not file.is_file():
        return ""
    seen.add(file)
    text = file.read_text()
    folders = (file.parent, *(root / folder for folder in sources.INCLUDE_DIRS))
    headers = (
        next((path for folder in folders if (path := folder / name).is_file()), None) for name in _INCLUDE.findall(text)
    )
    return "\n".join([text, *(_text(header.resolve(), root, seen) for header in headers if header)])
