"""The interview's questions: prose that names a step, and numbers that are filled in from rows.

A file of ``pages/interview/`` has a head in TOML between lines of ``+++``, then Markdown. In the prose
``{CALL QUANTITY}`` is a number of a call, ``{CALL|CALL}`` how many times as fast the first is, and ``{exact KEY}`` what
the spec gives. A call is written as sources have it, such as ``cuda/v03_swizzled``; ``best`` is the best baseline at
the case.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from builder import numbers, prose
from builder.rungs import TITLES
from builder.site import WEB
from kernel_twins.report.meaning import judged, write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.spec import Case, Name

FOLDER = WEB / "pages" / "interview"
_HEAD = re.compile(r"\A\+\+\+\n(.*?)\n\+\+\+\n(.*)\Z", re.DOTALL)
_NUMBER = re.compile(r"\{([^{}]+)\}")
_BF16 = 2  # bytes
_GIGA = 1e9
_MEASURED = "ridge"  # among what follows from the spec: it follows from the survey


@dataclass(frozen=True, slots=True)
class Row:
    """A quantity of each call of the table; with a badge of its own where it differs from the table's."""

    heading: str
    cells: tuple[Markup, ...]
    badge: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its answer, its table, and the step that it leads to."""

    slug: str
    question: str
    prose: Markup
    op: str
    case: str
    badge: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    claims: tuple[judged.Judged, ...]
    step: str
    link: str
    roofline: bool


def load(measured: Sequence[Results]) -> list[Answer]:
    """All of them, in the order of the files."""
    ops = {each.op.name: each for each in measured}
    return [_answer(file, ops) for file in sorted(FOLDER.glob("*.md"))]


def _answer(file: Path, ops: Mapping[str, Results]) -> Answer:
    found = _HEAD.match(file.read_text())
    if found is None:
        raise InvalidDataError(f"{file.name} has no head: begin it with TOML between two lines of +++")
    head, text = tomllib.loads(found[1]), found[2]
    results = ops[head["op"]]
    case = _case(results, head["case"]) if "case" in head else results.op.profile_case
    calls = [_call(each, results, case) for each in head.get("calls", [])]
    rows = [_row(results, case, calls, key) for key in head.get("quantities", [])]
    rows += [
        Row(_EXACT[key][0], (exact(results, case, key),), "recorded" if key == _MEASURED else "")
        for key in head.get("exact", [])
    ]
    backend, step = head["step"].split("/")
    claims = [
        each
        for each in judged.of_step(results, results.op.step(step), backend)
        if each.judgement.prediction.quantity in head.get("predicted", [])
    ]
    return Answer(
        slug=file.stem,
        question=head["question"],
        prose=Markup(_NUMBER.sub(lambda number: _number(number[1], results, case), str(prose.inline(text.strip())))),
        op=results.op.name,
        case=case.slug,
        badge="exact" if "exact" in head and not calls else "recorded",
        columns=tuple(_title(each) for each in calls) or ("",),
        rows=tuple(rows),
        claims=tuple(claims),
        step=f"{results.op.title}, {step}",
        link=f"ladders/{results.op.name}.html#{step}",
        roofline=head.get("roofline", False),
    )


def _case(results: Results, slug: str) -> Case:
    return next(each for each in results.op.timed_cases if each.slug == slug)


def _call(text: str, results: Results, case: Case) -> Name:
    if text == "best":
        return results.best_baseline(case) or Name(text)
    backend, step = text.split("/")
    return Name(backend, "" if step == "-" else step)


def _title(name: Name) -> str:
    titles = dict[str, str](TITLES.items())
    return f"{titles[name.backend]} {name.step[:3]}" if name.step else name.backend


def _row(results: Results, case: Case, calls: Sequence[Name], key: str) -> Row:
    """Of a quantity; ``ratio``, ``low``, ``high`` and ``verdict`` are of each call against the last one."""
    *ours, against = calls
    match key:
        case "ratio":
            cells = [numbers.ratio(results, case, each, against) for each in ours]
            return Row(f"times as fast as {_title(against)}", (*cells, Markup("1")))
        case "verdict":
            told = [Markup.escape(results.standing(case, each, against) or "–") for each in ours]
            return Row("verdict", (*told, Markup("")))
    heading = f"rate, {results.rate_unit}" if key == "rate" else QUANTITIES[key].heading
    return Row(heading, tuple(numbers.quantity(results, each, case, key) for each in calls))


def _number(text: str, results: Results, case: Case) -> Markup:
    what, _, key = text.partition(" ")
    if what == "exact":
        return exact(results, case, key)
    if "|" in what:
        ours, against = (_call(each, results, case) for each in what.split("|"))
        return numbers.ratio(results, case, ours, against)
    return numbers.quantity(results, _call(what, results, case), case, key)


def exact(results: Results, case: Case, key: str) -> Markup:
    """What follows from the spec alone."""
    value = exactly(results, case, key)
    return numbers.shown(write.number(value), value, f"exact#{results.op.name}/{case.slug}/{key}")


def exactly(results: Results, case: Case, key: str) -> float:
    """The value itself; KeyError where no formula has that name."""
    return _EXACT[key][1](results, case)


def _score_bytes(results: Results, case: Case) -> float:
    """Of attention's scores in 16 bits, written once and read once: there are 4 D operations for each."""
    return 2 * _BF16 * results.op.flops(case) / (4 * case.shape[3])


def _ridge(results: Results, _: Case) -> float:
    if results.ceilings is None:
        raise InvalidDataError("the ridge is the survey's, and this GPU was not surveyed")
    return results.ceilings.balance_points()["bf16_dram"]


_EXACT: Mapping[str, tuple[str, Callable[[Results, Case], float]]] = {
    "flops": ("operations, GFLOP", lambda results, case: results.op.flops(case) / _GIGA),
    "bytes": ("bytes that must move, GB", lambda results, case: results.op.bytes(case) / _GIGA),
    "intensity": ("FLOP a byte", lambda results, case: results.op.flops(case) / results.op.bytes(case)),
    "ridge": ("FLOP a byte at the ridge", _ridge),
    "score_bytes": (
        "bytes of the scores, written and read once, GB",
        lambda results, case: _score_bytes(results, case) / _GIGA,
    ),
    "stored_intensity": (
        "FLOP a byte with stored scores",
        lambda results, case: results.op.flops(case) / (results.op.bytes(case) + _score_bytes(results, case)),
    ),
}
