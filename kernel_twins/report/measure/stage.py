"""Where a run's measurements lie until they are extracted: written after every case, so that a run can go on later.

A stage holds the run's provenance (``runs.csv``), what its binaries and shared files were (``stage.json``), each
operation's timings so far, and, once the operation has been profiled, its reports and ``<op>.profiled.json``.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_twins.compiler import disassembly
from kernel_twins.report.ncu import ncu
from kernel_twins.report.rows import identity, libraries, store
from kernel_twins.report.rows.base import CannotRunError, InvalidDataError
from kernel_twins.report.rows.metrics import Tier
from kernel_twins.spec import Name, Op

_SHARED = (
    "triton-kernels/*/*.py",
    "triton-kernels/tuned/*.json",
    "kernel_twins/*.py",
    *(f"kernel_twins/{room}/**/*.py" for room in ("ops", "harness", "compiler")),
)


@dataclass(frozen=True, slots=True)
class Profiled:
    """What extraction must know of a profiled operation beside its reports: labels' launches and codes."""

    tool: str
    tier: Tier
    launches: dict[str, int]
    codes: dict[str, str]


class Stage:
    """One run's folder. ``open`` begins a run, or goes on with the one that lies there."""

    def __init__(self, folder: Path, run: dict[str, str], binaries: dict[str, str]) -> None:
        self.folder = folder
        self.run = run
        self._binaries = binaries

    @classmethod
    def open(cls, folder: Path, resume: bool, selected: str) -> Stage:
        """Begin a run, or go on with the one that lies there; ``selected`` says what it is about.

        CannotRunError where ``resume`` asks to go on with a run that was made with something else; ValueError where a
        new run would take the place of one that was collected and not extracted. One that was interrupted is set
        aside under its own name.
        """
        facts = _facts()
        about = {"selected": selected, "shared": _shared_digest()}
        earlier = store.read_runs(folder)
        if len(earlier) and resume:
            row = dict(earlier.iloc[0])
            told = read_json(folder / "stage.json")
            changed = [f"{k} was {row[k]!r}, is {v!r}" for k, v in facts.items() if row[k] != v]
            changed += [f"{k} was {told.get(k)!r}, is {v!r}" for k, v in about.items() if told.get(k) != v]
            if changed:
                raise CannotRunError(
                    f"cannot go on with run {row['run']}: {'; '.join(changed)}; start a new one without --resume"
                )
            return cls(folder, row, _binaries())
        if len(earlier) and list(folder.glob("*.profiled.json")):
            raise ValueError(
                f"run {earlier.iloc[0]['run']} was collected and not extracted: `ncu_report.py extract` it, or go on "
                "with it with --resume"
            )
        binaries = _binaries()  # before anything is moved or written: there may be no extension to read
        if len(earlier):
            folder.rename(folder.with_name(f"{folder.name}-{earlier.iloc[0]['run']}"))
        row = new_run(facts)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "stage.json", {**about, "published": []})
        enter_run(folder, row)
        return cls(folder, row, binaries)

    @classmethod
    def lying_in(cls, folder: Path) -> Stage:
        """The stage of a run that was collected, for extraction; CannotRunError where there is none."""
        rows = store.read_runs(folder)
        if not len(rows) or not list(folder.glob("*.profiled.json")):
            raise CannotRunError(f"nothing that was profiled waits in {folder}: run `ncu_report.py collect` first")
        return cls(folder, dict(rows.iloc[0]), {})

    def code(self, op: Op, name: Name) -> str:
        """A step's code as it is now: source and, for CUDA, binary; Triton's is known once it has been launched."""
        if not name.step:
            return ""
        source = identity.source_digest(op.name, name.step, name.backend)
        binary = self._binaries.get(f"{op.name}/{name.step}", "-") if name.backend == "cuda" else ""
        return f"{source}:{binary}"

    def report(self, op: Op, kind: str) -> Path:
        """``counters`` and ``cycles`` are ncu's, ``proton`` is Proton's."""
        return self.folder / f"{op.name}.{kind}.{'hatchet' if kind == 'proton' else 'ncu-rep'}"

    def profiled(self, op: Op) -> Profiled | None:
        path = self._profiled_path(op)
        return Profiled(**read_json(path)) if path.exists() else None

    def note_profiled(self, op: Op, profiled: Profiled) -> None:
        write_json(self._profiled_path(op), asdict(profiled))

    def forget_profile(self, op: Op) -> None:
        self._profiled_path(op).unlink(missing_ok=True)

    def _profiled_path(self, op: Op) -> Path:
        return self.folder / f"{op.name}.profiled.json"

    def published(self, op: Op) -> bool:
        """Whether the operation has been extracted from this run already."""
        return op.name in read_json(self.folder / "stage.json")["published"]

    def clear(self, op: Op) -> None:
        """Drop an operation that has been extracted, but for its reports, which other viewers can open.

        The stage itself goes with its last operation.
        """
        reports = self.folder.with_name("reports") / self.run["run"]
        reports.mkdir(parents=True, exist_ok=True)
        for file in self.folder.glob(f"{op.name}.*"):
            if file.suffix in (".ncu-rep", ".hatchet"):
                os.replace(file, reports / file.name)
            else:
                file.unlink()
        about = read_json(self.folder / "stage.json")
        write_json(self.folder / "stage.json", about | {"published": [*about["published"], op.name]})
        if not list(self.folder.glob("*.timings.csv")):
            shutil.rmtree(self.folder)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidDataError(f"{path} cannot be read ({error}): remove {path.parent} and collect again") from error


def write_json(path: Path, content: object) -> None:
    """In one move: a run may be interrupted at any moment."""
    half = path.with_suffix(".tmp")
    try:
        half.write_text(json.dumps(content))
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def enter_run(folder: Path, run: dict[str, str]) -> None:
    """Add a run to those that rows are of; to be done before any table names it."""
    runs = pd.concat([store.read_runs(folder), pd.DataFrame([run], columns=store.PROVENANCE)])
    store.write(folder / "runs.csv", runs.drop_duplicates("run"))


def new_run(facts: dict[str, str] | None = None) -> dict[str, str]:
    """The provenance of a run that begins now: a row of ``runs.csv``."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"run": f"{date[:10]}-{secrets.token_hex(3)}", "date": date, **(facts or _facts())}


def _facts() -> dict[str, str]:
    """Machine and versions: a run is of one of each."""
    import torch
    import triton

    from kernel_twins.harness.sensors import identity as gpu_identity

    gpu = gpu_identity()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": str(gpu.get("driver") or ""),
        "power_limit_w": str(gpu.get("power_limit_w") or ""),
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nvcc": ncu.version("nvcc", r"release [\d.]+, V([\d.]+)"),
        "ncu": _ncu_version(),
        "python": platform.python_version(),
        **libraries.versions(),
    }


def _ncu_version() -> str:
    try:
        return ncu.version(str(ncu.find()), ncu.VERSION)
    except CannotRunError:  # Proton does without
        return ""


def _binaries() -> dict[str, str]:
    """Digest of every CUDA step's instructions: these pin the headers and flags that the source's digest does not."""
    from kernel_twins import OPS

    kernels = identity.sass_digests(disassembly.require_extensions())
    if not kernels:
        return {}
    return {
        f"{op.name}/{step.name}": identity.cuda_digest(op.name, step.name, kernels)
        for op in OPS.values()
        for step in op.steps_of("cuda")
    }


def _shared_digest() -> str:
    """Of the files that all steps are measured through and no step's own digest covers."""
    content = hashlib.sha256()
    for pattern in _SHARED:
        for path in sorted(store.ROOT.glob(pattern)):
            content.update(path.read_bytes())
    return content.hexdigest()[:8]
