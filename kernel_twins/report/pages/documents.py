"""The documents that are made from data, and whether they still agree with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from kernel_twins import OPS
from kernel_twins.report.calls import functions_table, sampled_table
from kernel_twins.report.drawings import DRAWINGS
from kernel_twins.report.meaning import static, write
from kernel_twins.report.meaning.analysis import Results, load
from kernel_twins.report.meaning.judged import of_all
from kernel_twins.report.pages import (
    entries,
    failures,
    front,
    functions_page,
    ladder_page,
    log,
    places,
    score,
    scoreboard,
    worked_example,
)
from kernel_twins.report.pages.places import DOCS, PROFILER, Places
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import shown
from kernel_twins.report.rows.metrics import STALLS

_README = store.ROOT / "README.md"
_PLOTS = store.ROOT / "profiling" / "plots"
_RESULTS = DOCS / "results.md"
_FUNCTIONS = DOCS / "functions.md"
_INDEX = DOCS / "README.md"
_EXAMPLE = DOCS / "how-to-read-a-counter.md"


def render(gpu: str, folder: Path, console: Console) -> None:
    """Write the reference GPU's documents in place, another GPU's log and plots beside its data."""
    results = load(gpu, folder)
    if gpu == store.REFERENCE_GPU:
        texts, plots_path = _texts(folder, results), _PLOTS
        for line in _gaps():
            console.print(f"[yellow]{line}")
    else:
        no_static = pd.DataFrame(columns=static.STATIC)
        texts, plots_path = logs(folder, results, no_static, places.beside(folder)), folder / "plots"
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])
    told = f"{len(texts)} pages and drawings rendered; changed: {', '.join(map(shown, changed)) or 'none'}"
    try:
        from kernel_twins.report.figures import render
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        console.print(f"{told}; no figures: {error} (pip install matplotlib)", style="yellow")
        return
    render.draw(folder, plots_path, results)
    console.print(f"{told}; figures are in {shown(plots_path)}/")


def disagreements(folder: Path, results: list[Results]) -> list[str]:
    """What the reference GPU's documents say other than its data in ``folder`` does, a line each."""
    texts = _texts(folder, results)
    lines = [
        f"{shown(path)} is not what the data and the code make it"
        for path, text in texts.items()
        if not path.exists() or path.read_text() != text
    ]
    lines += [f"{shown(path)} is drawn by no code" for path in DOCS.glob("drawings/*") if path not in texts]
    strays = sorted(path for path in places.REFERENCE.full.glob("*") if path not in texts)
    lines += [f"{shown(path)} is made of no data: delete it" for path in strays]
    return lines + _gaps() + _outdated_figures(folder, results)


def _outdated_figures(folder: Path, results: list[Results]) -> list[str]:
    try:
        from kernel_twins.report.figures import render
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return []  # figures cannot have been drawn here
    old = render.outdated(folder, _PLOTS, results)
    lines = [f"{shown(_PLOTS)}/{name}.svg is not drawn from the data" for name in old]
    strays = render.strays(folder, _PLOTS, results)
    return lines + [f"{shown(_PLOTS)}/{name}.svg is drawn by nothing any more: delete it" for name in strays]


def _texts(folder: Path, results: list[Results]) -> dict[Path, str]:
    """The reference GPU's documents, the drawings among them, as they should read."""
    texts = logs(folder, results, store.read(static.FILE, static.STATIC), places.REFERENCE)
    texts |= {
        _README: front_page(_README.read_text(), folder, results),
        _RESULTS: results_page(_RESULTS.read_text(), folder, results),
        _FUNCTIONS: _renewed(_FUNCTIONS, _FUNCTIONS.read_text(), functions_page.parts(folder)),
        _INDEX: _INDEX.read_text(),
    }
    for each in results:
        if each.op.name == worked_example.OP:
            texts[_EXAMPLE] = _renewed(_EXAMPLE, _EXAMPLE.read_text(), worked_example.parts(folder, each))
        if (page := DOCS / f"{each.op.name}.md").exists():
            texts[page] = ladder_page.render(page.read_text(), each)
    stalls = write.table(["stall", "a warp waited for"], [[f"`{name}`", waits] for name, waits in STALLS.items()])
    texts[PROFILER] = ladder_page.renewed(PROFILER.read_text(), {"stalls": stalls})
    texts = {path: ladder_page.relinked(text, DOCS) for path, text in texts.items()}
    return texts | {DOCS / "drawings" / f"{name}.svg": draw().svg() for name, draw in DRAWINGS.items()}


def logs(folder: Path, results: list[Results], static_rows: pd.DataFrame, where: Places) -> dict[Path, str]:
    """The log of one GPU: the short page, the full ones that it leads to, and what did not work."""
    texts = {where.log: log.render(folder, results, where), where.failures: failures.render(results, where)}
    texts |= {where.entries(each.op): entries.render(each, static_rows, where) for each in results}
    cells = ((each, case) for each in results for case in each.op.bench_cases)
    sections = {
        "scoreboard.md": ["# Scoreboard", "", entries.READING, "", *scoreboard.scoreboard(cells)],
        "predictions.md": ["# Predictions", "", *score.section(results, of_all(results))],
        "functions.md": functions_table.section(folder),
        "sampled.md": sampled_table.section(folder),
    }
    for name, lines in sections.items():
        if lines:
            page, title = where.full / name, f"# {lines[0].lstrip('# ')}"
            texts[page] = "\n".join(places.from_page(page, [title, *lines[1:]])) + "\n"
    return texts


def _gaps() -> list[str]:
    """What the pages do not tell of the ladders, a line each."""
    lines: list[str] = []
    for op in OPS.values():
        page = DOCS / f"{op.name}.md"
        lines += ladder_page.gaps(page.read_text(), op) if page.exists() else [f"{shown(page)} is missing"]
    return lines


def front_page(text: str, folder: Path, results: list[Results]) -> str:
    """README.md with its tables renewed; ValueError where their markers lack."""
    return _renewed(_README, text, front.parts(folder, [each for each in results if each.measured]))


def results_page(text: str, folder: Path, results: list[Results]) -> str:
    """docs/results.md with its tables renewed, of cases by chance and of chosen ones; ValueError as `front_page`."""
    measured = [each for each in results if each.measured]
    cells = [(each, case) for each in measured for case in each.op.headline_cases]
    others = scoreboard.by_condition(measured) or ["Rested and in a chain, nothing has been recorded yet."]
    parts = {
        "sampled": sampled_table.headline(folder),
        "results": scoreboard.scoreboard(cells),
        "twins": scoreboard.slowest_twins(cells),
        "conditions": others,
    }
    return _renewed(_RESULTS, text, parts)


def _renewed(page: Path, text: str, parts: Mapping[str, Sequence[str]]) -> str:
    marks = ladder_page.marks(text)
    for name in parts:
        if marks[name] != 1:
            markers = f"<!-- {name}:begin --> and <!-- {name}:end -->"
            raise ValueError(f"{shown(page)} has {marks[name]} pairs of markers {name}, must have 1: {markers}")
    return ladder_page.renewed(text, parts)
