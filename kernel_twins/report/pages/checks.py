"""What `check` looks at: documents against data, data against code, speed against the run before."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_twins import OPS
from kernel_twins.functional import expected
from kernel_twins.report.calls import fastest, functions_table, sampled_table
from kernel_twins.report.compare import history
from kernel_twins.report.meaning import predictions, retired, static
from kernel_twins.report.meaning.analysis import Results, load
from kernel_twins.report.meaning.regressions import losses, unproven
from kernel_twins.report.pages import documents, ladder_page
from kernel_twins.report.rows import store
from kernel_twins.report.sweeps import late as sweeps
from kernel_twins.spec import BACKENDS, Name

FOLDER = store.DATA / store.REFERENCE_GPU


@dataclass(slots=True)
class Findings:
    """What fails a check, and what is only told."""

    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run(release: bool, audit: bool) -> Findings:
    """All checks that need no GPU.

    A release may hold neither stale rows or recorded stages, nor steps that were not measured, nor predictions that are
    not frozen. Where a spec and the files of its steps differ, nothing else is asked: whatever was recorded of the
    operation hangs on it.
    """
    if differing := _files_without_steps():
        return Findings(failures=differing)
    results = load(store.REFERENCE_GPU, FOLDER)
    found = Findings()
    wrong = documents.disagreements(FOLDER, results)
    if wrong:
        wrong.append("run `python profiling/ncu_report.py log` and commit what it writes")
    found.failures += wrong + static.differences(thorough=release)
    late = found.failures if release else found.warnings
    if reason := static.not_compared():
        late.append(f"the static data was not compared with a build: {reason}")
    for each in results:
        found.failures += _foreign(each)
        late += _late(each)
    late += [f"{'/'.join(cell)} has no static rows: {remedy}" for cell, remedy in static.unrecorded().items()]
    late += functions_table.stale(store.REFERENCE_GPU, FOLDER) + sampled_table.late(store.REFERENCE_GPU, FOLDER)
    late += sweeps.late()
    found.failures += stale_choices()
    if release:
        late += functions_table.unrecorded(FOLDER)
    slower = _regressions(results)
    found.failures += slower.failures + predictions.violations(FOLDER) + retired.violations(FOLDER, OPS.values())
    found.warnings += slower.warnings
    if audit:
        violations, notes = history.audit(FOLDER)
        found.failures += violations
        found.warnings += notes
    return found


def stale_choices() -> list[str]:
    """A line if what "auto" reads is not what the timings and the sampled rows say."""
    if fastest.render() == expected.FILE.read_text():
        return []
    told = "is not what the timings and the sampled rows say"
    return [f"kernel_twins/functional/{expected.FILE.name} {told}: run python -m {fastest.__name__}"]


def _files_without_steps() -> list[str]:
    """Files of steps that the specs do not have, and steps without a file, a line each."""
    from build_support.step_table import disagreements

    return [line for op in OPS.values() for backend in BACKENDS for line in disagreements(op, backend, store.ROOT)]


def _foreign(results: Results) -> list[str]:
    """The recorded cells that show another step's kernel, a line each."""
    return [
        f"{results.op.name}/{name.step}/{name.backend} at {case}: {reason}: give the step a profile_case that its own "
        f"kernel serves, and {ladder_page.remedy(results.op)}"
        for (case, name), reason in results.recorded.foreign.items()
    ]


def _late(results: Results) -> list[str]:
    """What was not measured or profiled yet, what changed since, and predictions that are not frozen, a line each."""
    op, lines = results.op, []
    measure = ladder_page.remedy(op)
    if results.measured:
        lines += [
            f"{op.name}/{name.step}/{name.backend} was not measured yet: {measure}" for name in results.unmeasured
        ]
    else:
        lines.append(f"{op.name} was never measured: {measure}")
    lines += [
        f"{op.name}/{name.step}/{name.backend} was not timed at {case.slug} yet: {measure}"
        for case, name in results.untimed
    ]
    lines += [
        f"{op.name}/{name.step}/{name.backend} was not profiled at {case.slug}: {measure}"
        for case, name in results.unprofiled()
    ]
    lines += [f"{op.name}/{name} was never timed: {measure}" for name in results.new]
    for step in op.steps:
        for backend in step.backends:
            cell = f"{op.name}/{step.name}/{backend}"
            if results.stale(Name(backend, step.name)):
                lines.append(f"{cell} changed since it was measured: {measure}")
            if any(results.mark(step, backend, each) == "not frozen" for each in results.judge(step, backend)):
                lines.append(f"{cell} has predictions that are not frozen: run `ncu_report.py predict`")
    return lines


def regressions() -> list[str]:
    """Finished steps that give wrong results, or that lost speed without an accepted reason, a line each."""
    return _regressions(load(store.REFERENCE_GPU, FOLDER)).failures


def _regressions(results: list[Results]) -> Findings:
    found = Findings()
    accepted: dict[str, list[str]] = {}
    for each in results:
        found.failures += [f"{each.op.name}/{line}" for line in unproven(each)]
        for loss in losses(each):
            line = f"{each.op.name}/{loss.name.step}/{loss.name.backend} at {loss.case}: {loss.told}"
            if loss.reason:
                accepted.setdefault(loss.reason, []).append(line)
            else:
                found.failures.append(f"{line}; mend it, or `check --accept REASON`")
    for reason, (first, *others) in accepted.items():
        found.warnings.append(f"{first}{f', and {len(others)} more' if others else ''} (accepted: {reason})")
    return found


def accept(reason: str) -> None:
    """Write the reason into the rows of the steps that lost, but for those that were accepted for another before."""
    for each in load(store.REFERENCE_GPU, FOLDER):
        lost = {(loss.case, loss.name) for loss in losses(each) if not loss.reason}
        if lost:
            table = each.recorded.table("previous")
            table["reason"] = [
                reason if (row.case, Name(row.backend, row.step)) in lost else row.reason for row in table.itertuples()
            ]
            store.write(store.path(FOLDER, each.op.name, "previous"), table)
