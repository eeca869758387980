"""What `check` looks at: documents against data, data against code, speed against the run before."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_twins import OPS
from kernel_twins._profiling.report import documents, history, static, store
from kernel_twins._profiling.report.analysis import Results
from kernel_twins.spec import Name

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
    found.failures += wrong + static.differences()
    late = found.failures if release else found.warnings
    for op in OPS.values():
        results = Results(op, FOLDER, None)
        for step in op.steps:
            for backend in step.backends:
                cell = f"{op.name}/{step.name}/{backend}"
                if results.stale(Name(backend, step.name)):
                    late.append(f"{cell} changed since it was measured: run `ncu_report.py --op {op.name}`")
                if any(results.mark(step, backend, each) == "not frozen" for each in results.judge(step, backend)):
                    late.append(f"{cell} has predictions that are not frozen: run `ncu_report.py predict`")
        for case, name, before, now, reason in results.losses():
            line = (
                f"{op.name}/{name.step}/{name.backend} at {case.slug}: {now:.3f} × the best baseline, was {before:.3f}"
            )
            if reason:
                found.warnings.append(f"{line} (accepted: {reason})")
            else:
                found.failures.append(f"{line}; mend it and measure again, or `check --accept REASON`")
    if audit:
        violations, notes = history.audit(FOLDER)
        found.failures += violations
        found.warnings += notes
    return found


def accept(reason: str) -> None:
    """Write the reason into the rows of the steps that lost."""
    for op in OPS.values():
        lost = {(case.slug, name) for case, name, *_ in Results(op, FOLDER, None).losses()}
        table = store.read_table(FOLDER, op.name, "previous")
        if lost:
            table["reason"] = [
                reason if (row.case, Name(row.backend, row.step)) in lost else row.reason for row in table.itertuples()
            ]
            store.write(store.path(FOLDER, op.name, "previous"), table)
