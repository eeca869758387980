"""Which code a time of a public function belongs to: one digest for each function, of what its calls run.

That is its family's modules and operators, the steps that stand behind its operations in both languages and what their
ladders share, all that these include or import, and the configurations that a search found for its Triton steps; and
how the calls are declared, judged and timed. Where the files lie has no say, nor has a step that no function runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kernel_twins import OPS
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.rows import identity, store
from kernel_twins.spec import BACKENDS, Step

_TIMED = "kernel_twins/report/measure/functions.py"


def sources(function: str, *, timed: bool = True) -> set[Path]:
    """The files of code that a function's calls run, and of that by which they are judged; ``timed``, and timed."""
    declared = FUNCTIONS[function]
    modules = (store.ROOT / "kernel_twins" / "functional" / declared.family).glob("*.py")
    operators = (store.ROOT / "cuda-kernels" / declared.family).glob("torch*.cpp")
    ladders = (path for op in declared.ops for path in _behind(op))
    return identity.reached([*modules, *operators, *ladders, *([store.ROOT / _TIMED] if timed else [])])


def _behind(op: str) -> Iterator[Path]:
    """The steps behind an operation's function, and the files beside them that are no steps."""
    steps = {step.name for step in OPS[op].steps}
    for backend in BACKENDS:
        for path in (store.ROOT / OPS[op].folder(backend)).iterdir():
            if path.is_file() and (path.stem not in steps or path.stem in OPS[op].behind.get(backend, ())):
                yield path


def _choice(step: Step) -> list[object]:
    """What decides whether a call takes a step, beside the GPU and the call."""
    return [step.name, step.arch, step.fp32_out]


def code(gpu: str, function: str, *, timed: bool = True) -> str:
    """Digest of what a function's calls run on a GPU, as it is now; sampled cases are ``timed`` elsewhere."""
    file = store.ROOT / "triton-kernels" / "tuned" / f"{gpu}.json"
    tuned = json.loads(file.read_text()) if file.exists() else {}
    files = sources(function, timed=timed)
    places = {step: step.partition("/") for step in tuned}
    own = {
        step: tuned[step] for step, (op, _, name) in places.items() if identity.step_file(op, name, "triton") in files
    }
    behind = {
        op: {backend: [_choice(OPS[op].step(name)) for name in names] for backend, names in OPS[op].behind.items()}
        for op in FUNCTIONS[function].ops
    }
    return identity.digest(f"{identity.files_digest(files)} {json.dumps([own, behind], sort_keys=True)}")


def codes(gpu: str, *, timed: bool = True) -> dict[str, str]:
    """The digest of every function."""
    return {function: code(gpu, function, timed=timed) for function in FUNCTIONS}
