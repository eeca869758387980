"""The documents that are made from data, and whether they still agree with it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.console import Console

from kernel_twins import OPS
from kernel_twins.report.calls import functions_table, sampled_table
from kernel_twins.report.drawings import DRAWINGS
from kernel_twins.report.meaning import static, write
from kernel_twins.report.meaning.analysis import Results, load
from kernel_twins.report.pages import entries, failures, ladder_page, log, places, score, scoreboard
from kernel_twins.report.pages.places import DOCS, PROFILER, Places
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import shown
from kernel_twins.report.rows.metrics import STALLS

_README = store.ROOT / "README.md"
_PLOTS = store.ROOT / "profiling" / "plots"


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
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    written = ", ".join(shown(path) for path in texts if path.suffix == ".md")
    try:
        from kernel_twins.report.pages import plots
    except ImportError as error:
        console.print(f"wrote {written}; no figures: {error} (pip install matplotlib)", style="yellow")
        return
    plots.draw(folder, plots_path, results)
    console.print(f"wrote {written} and {shown(plots_path)}/")


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
        from kernel_twins.report.pages import plots
    except ImportError:  # without matplotlib nobody here can have drawn any
        return []
    old = plots.outdated(folder, _PLOTS, results)
    return [f"{shown(_PLOTS)}/{name}.svg is not drawn from the data" for name in old]


def _texts(folder: Path, results: list[Results]) -> dict[Path, str]:
    """The reference GPU's documents, the drawings among them, as they should read."""
    texts = logs(folder, results, store.read(static.FILE, static.STATIC), places.REFERENCE)
    texts[_README] = readme(_README.read_text(), folder, results)
    for each in results:
        if (page := DOCS / f"{each.op.name}.md").exists():
            texts[page] = ladder_page.render(page.read_text(), each)
    stalls = write.table(["stall", "a warp waited for"], [[f"`{name}`", waits] for name, waits in STALLS.items()])
    texts[PROFILER] = ladder_page.renewed(PROFILER.read_text(), {"stalls": stalls})
    return texts | {DOCS / "drawings" / f"{name}.svg": draw().svg() for name, draw in DRAWINGS.items()}


def logs(folder: Path, results: list[Results], static_rows: pd.DataFrame, where: Places) -> dict[Path, str]:
    """The log of one GPU: the short page, the full ones that it leads to, and what did not work."""
    texts = {where.log: log.render(folder, results, where), where.failures: failures.render(results, where)}
    texts |= {where.entries(each.op): entries.render(each, static_rows, where) for each in results}
    cells = ((each, case) for each in results for case in each.op.bench_cases)
    sections = {
        "scoreboard.md": ["# Scoreboard", "", entries.READING, "", *scoreboard.scoreboard(cells)],
        "predictions.md": ["# Predictions", "", *score.section(results, score.of_all(results))],
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


def readme(text: str, folder: Path, results: list[Results]) -> str:
    """README.md with its tables renewed, of cases by chance and of chosen ones; ValueError where their markers lack."""
    for name in ("sampled", "results", "conditions"):
        if ladder_page.marks(text)[name] != 1:
            raise ValueError(f"README.md must hold one pair of markers: <!-- {name}:begin --> and <!-- {name}:end -->")
    measured = [each for each in results if each.measured]
    rows = scoreboard.scoreboard((each, case) for each in measured for case in each.op.headline_cases)
    others = scoreboard.by_condition(measured) or ["Rested and in a chain, nothing has been recorded yet."]
    return ladder_page.renewed(text, {"sampled": sampled_table.headline(folder), "results": rows, "conditions": others})
