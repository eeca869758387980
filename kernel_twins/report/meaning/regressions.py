"""What a recorded run lost against the one before: speed, or results that are known to be right."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import NOT_JUDGED, UNPROVEN, Case, Name

_LOST = 0.95  # of the ratio before


@dataclass(frozen=True, slots=True)
class Loss:
    """A cell that got slower: what it is and was, and the reason for which that was accepted, if any."""

    case: str
    name: Name
    told: str
    reason: str


def losses(results: Results) -> list[Loss]:
    """Finished steps that lost more than 5 % against the run before, and those that have no time any more.

    A step that is as fast as before within its interval has not lost.
    """
    lost = []
    finished = {step.name for step in results.op.steps if step.finished}
    for row in results.recorded.table("previous").itertuples():
        case, name = row.case, Name(row.backend, row.step)
        if row.step not in finished or row.baseline not in results.op.baselines:
            continue
        now = results.ratio(Case.parse(case), name, Name(row.baseline))
        status = results.status(Case.parse(case), name)
        if now is None and status in ("", "ok"):
            continue  # not a case of this operation any more, or the baseline has no time any more
        if now is None or now.high < _LOST * float(row.ratio):
            told = f"{now.value:.3f} × {row.baseline}" if now else status
            lost.append(Loss(case, name, f"{told}, was {float(row.ratio):.3f} ×", row.reason))
    return lost


def unproven(results: Results) -> list[str]:
    """Finished steps that are not known to be right in the recorded run, and baselines not judged, a line each.

    A baseline that is wrong is other people's.
    """
    finished = {step.name for step in results.op.steps if step.finished}
    return [
        f"{name.step or 'baseline'}/{name.backend} at {case}: {row.status}"
        for (case, name), rows in results.recorded.rows.items()
        for row in rows.values()
        if (name.step in finished and row.status.startswith(UNPROVEN))
        or (not name.step and row.status.startswith(NOT_JUDGED))
    ]
