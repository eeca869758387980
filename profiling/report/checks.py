"""What `check` looks at: documents against data, data against code, speed against the run before."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_twins import OPS
from kernel_twins._profiling.report import documents, history, losses, predictions, static, store
from kernel_twins._profiling.report.analysis import Results
from kernel_twins.spec import Name, Op

FOLDER = store.DATA / store.REFERENCE_GPU


@dataclass(slots=True)
class Findings:
    """What fails a check, and what is only told."""

    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run(release: bool, audit: bool) -> Findings:
    """All checks that need no GPU. A release may hold neither stale rows nor predictions that are not frozen."""
    found = Findings()
    wrong = documents.disagreements()
    if wrong:
        wrong.append("run `python profiling/ncu_report.py log` and commit what it writes")
    found.failures += wrong + static.differences(thorough=release)
    late = found.failures if release else found.warnings
    if reason := static.not_compared():
        late.append(f"the static data was not compared with a build: {reason}")
    for op in OPS.values():
        results = Results(op, FOLDER, None)
        for step in op.steps:
            for backend in step.backends:
                cell = f"{op.name}/{step.name}/{backend}"
                if results.stale(Name(backend, step.name)):
                    late.append(f"{cell} changed since it was measured: run `ncu_report.py --op {op.name}`")
                if any(results.mark(step, backend, each) == "not frozen" for each in results.judge(step, backend)):
                    late.append(f"{cell} has predictions that are not frozen: run `ncu_report.py predict`")
        found.warnings += [
            f"{_told(op, loss)} (accepted: {loss.reason})" for loss in losses.losses(results) if loss.reason
        ]
    found.failures += regressions() + predictions.violations(FOLDER)
    if audit:
        violations, notes = history.audit(FOLDER)
        found.failures += violations
        found.warnings += notes
    return found


def regressions() -> list[str]:
    """Finished steps that give wrong results, or that lost speed without an accepted reason, a line each."""
    lines = []
    for op in OPS.values():
        results = Results(op, FOLDER, None)
        lines += [f"{op.name}/{line}" for line in losses.wrong(results)]
        lines += [
            f"{_told(op, loss)}; mend it, or `check --accept REASON`"
            for loss in losses.losses(results)
            if not loss.reason
        ]
    return lines


def _told(op: Op, loss: losses.Loss) -> str:
    return f"{op.name}/{loss.name.step}/{loss.name.backend} at {loss.case}: {loss.told}"


def accept(reason: str) -> None:
    """Write the reason into the rows of the steps that lost."""
    for op in OPS.values():
        lost = {(loss.case, loss.name) for loss in losses.losses(Results(op, FOLDER, None))}
        table = store.read_table(FOLDER, op.name, "previous")
        if lost:
            table["reason"] = [
                reason if (row.case, Name(row.backend, row.step)) in lost else row.reason for row in table.itertuples()
            ]
            store.write(store.path(FOLDER, op.name, "previous"), table)
