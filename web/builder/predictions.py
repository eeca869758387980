"""What a reader is asked of a step: which way each quantity goes that its author predicted."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from builder import numbers
from kernel_twins.report.meaning import judged
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judged import Judged
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.spec import Backend, Name, Step

_OPEN = ("not judged", "void")


@dataclass(frozen=True, slots=True)
class Claim:
    """A prediction of the author's, and what came of it; ``came`` is empty where nothing was measured."""

    text: str
    came: Markup
    verdict: str
    mark: str

    @property
    def kind(self) -> str:
        return self.verdict.replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Question:
    """A quantity at a case, and its author's claims.

    ``went`` is up, same or down, empty where that is not known. ``author`` is hit where all claims are, open where
    none was judged, else miss. ``playable`` is what can be compared with a step before.
    """

    key: str
    asked: str
    went: str
    author: str
    playable: bool
    claims: list[Claim]


def questions(results: Results, step: Step, backend: Backend) -> list[Question]:
    """In the spec's order, one a quantity and case."""
    found: dict[str, list[Judged]] = {}
    for each in judged.of_step(results, step, backend):
        prediction = each.judgement.prediction
        place = f"@{prediction.case.slug}" if prediction.case else ""
        found.setdefault(f"{prediction.quantity}{place}", []).append(each)
    return [_question(results, step, backend, key, its) for key, its in found.items()]


def _question(results: Results, step: Step, backend: Backend, key: str, its: list[Judged]) -> Question:
    prediction = its[0].judgement.prediction
    case = prediction.case or results.op.profile_case
    verdicts = {each.judgement.verdict for each in its}
    void, before = "void" in verdicts, results.previous(step, backend, case)
    judged_ones = verdicts.difference(_OPEN)
    asked = QUANTITIES[prediction.quantity].title + (f" at {prediction.case.slug}" if prediction.case else "")
    return Question(
        key=f"{backend}/{key}",
        asked=asked,
        went="" if void else results.went(prediction, step, backend) or "",
        author="open" if not judged_ones else "hit" if judged_ones == {"hit"} else "miss",
        playable=before is not None and not void,
        claims=[
            Claim(
                each.claim,
                numbers.came(results, each, case, Name(backend, before.name) if before else None),
                "open" if each.judgement.verdict == "not judged" else each.judgement.verdict,
                each.mark,
            )
            for each in its
        ],
    )
