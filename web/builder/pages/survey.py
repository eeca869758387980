"""The survey: what the reference GPU was measured to reach, what datasheets promise, and the floors that follow."""

from __future__ import annotations

from dataclasses import dataclass

import datasheets
import render
from markupsafe import Markup

from builder import chips, numbers, roof_figure
from builder.chips import SHEETS, SURVEY, Chip
from builder.rungs import TITLES
from builder.site import Site
from kernel_twins.report.figures import roofs
from kernel_twins.report.meaning import write as words
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import BACKENDS, Name, Op

_SENSORS = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "power_max_w", "temperature_c")


@dataclass(frozen=True, slots=True)
class Measured:
    """A ceiling as it was measured, with what the sensors read meanwhile."""

    label: str
    value: Markup
    unit: str
    spread: Markup
    samples: int
    of_datasheet: Markup
    sensors: list[Markup]
    throttle: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A chip as the figure's script reads it: rates for the roofs, and their texts."""

    key: str
    title: str
    memory: float
    memory_text: str
    pipes: dict[str, tuple[float, str]]
    told: str


@dataclass(frozen=True, slots=True)
class Last:
    """An operation's floor on the reference GPU, and its last steps there."""

    op: Op
    pipe: str
    intensity: str
    floor: Markup
    times: list[tuple[Markup, Markup, bool]]


def write(site: Site) -> None:
    survey, here = chips.survey(), chips.surveyed()
    others = chips.by_datasheet()
    site.page(
        "survey.html",
        "survey.html.j2",
        "Survey",
        scripts=["survey.js"],
        styles=["document.css", "survey.css"],
        survey=survey,
        identity=render.identity(survey["device"]),
        ceilings=[_measured(row) for row in survey["measurements"]],
        balance=[(kind, _surveyed(f"balance/{kind}_dram"), _surveyed(f"balance/{kind}_l2")) for kind in _BALANCE],
        columns=[title for title, _ in datasheets.COLUMNS],
        sheets=[_sheet(chip) for chip in others],
        chips=[here, *others],
        choices=[_choice(chip) for chip in (here, *others)],
        figure=roof_figure.figure(here, site.measured),
        scale=roof_figure,
        titles=[TITLES[backend] for backend in BACKENDS],
        lasts=[_last(here, results) for results in site.measured],
        floors=[(each.op, [_floor(chip, each.op) for chip in (here, *others)]) for each in site.measured],
    )


_BALANCE = ("fp32", "bf16")


def _surveyed(key: str, unit: str = "") -> Markup:
    value = chips.survey_value(key)
    text = f"{value:.1f}" if unit == "%" else render.number(value)
    return numbers.shown(f"{text} {unit}".strip(), value, f"{SURVEY}#{key}")


def _measured(row: dict[str, object]) -> Measured:
    name = str(row["name"])
    try:
        share = _surveyed(f"{name}/of_datasheet", "%")
    except LookupError:
        share = Markup("–")
    return Measured(
        label=render.label(name),
        value=_surveyed(f"{name}/value"),
        unit=str(row["unit"]).replace("us", "µs"),
        spread=_surveyed(f"{name}/spread", "%"),
        samples=int(str(row["n"])),
        of_datasheet=share,
        sensors=[Markup("–") if row[key] is None else _surveyed(f"{name}/{key}") for key in _SENSORS],
        throttle=str(row["throttle"]).replace("+", ", "),
    )


def _sheet(chip: Chip) -> tuple[str, list[Markup]]:
    cells = datasheets.load()[chip.gpu].cells
    found = []
    for _, key in datasheets.COLUMNS:
        if key not in cells:
            found.append(Markup("–"))
        elif key == "compute_capability":
            found.append(Markup("<span title='{}'>{}</span>").format(cells[key].source, cells[key].text))
        else:
            found.append(numbers.shown(cells[key].text, cells[key].value, f"{SHEETS}#{chip.gpu}/{key}"))
    return chip.name, found


def _floor(chip: Chip, op: Op) -> Markup:
    value = chip.floor_us(op)
    if value is None:
        return Markup("–")
    source = f"{SURVEY}#floor/{op.name}" if chip.source == SURVEY else f"{SHEETS}#{chip.gpu}/floor/{op.name}"
    return numbers.shown(words.number(value), value, source)


def _choice(chip: Chip) -> Choice:
    by = "as surveyed" if chip.source == SURVEY else "by its datasheet"
    slope = chip.memory["dram_read"] / 1e3
    limits = [f"{name} below {words.number(rate / slope)}" for name, rate in chip.pipes.items()]
    lacks = [name for name in chips.surveyed().pipes if name not in chip.pipes]
    told = f"{chip.name}, {by}: memory is the limit below so many FLOP a byte: {', '.join(limits)}."
    if lacks:
        told += f" It has no {' and no '.join(lacks)}; floors that need it are left out."
    return Choice(
        chip.key,
        f"{chip.name}, {by}",
        chip.memory["dram_read"],
        f"{words.number(chip.memory['dram_read'], 4)} GB/s",
        {name: (rate, words.number(rate, 4)) for name, rate in chip.pipes.items()},
        told,
    )


def _last(chip: Chip, results: Results) -> Last:
    op = results.op
    paths = {path.backend: path.steps[-1][0] for path in roofs.paths(results)}
    times = []
    for backend in BACKENDS:
        name = Name(backend, paths[backend]) if backend in paths else None
        if name is None:
            times.append((Markup("–"), Markup("–"), False))
            continue
        shown = numbers.quantity(results, name, op.profile_case, "time")
        step = Markup('<a href="ladders/{}.html#{}">{}</a>').format(op.name, paths[backend], paths[backend][:3])
        times.append((step, shown, results.stale(name)))
    return Last(op, chips.pipe(op), words.number(chips.intensity(op)), _floor(chip, op), times)
