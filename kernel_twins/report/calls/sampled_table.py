"""The recorded rows of the public functions at cases that nobody chose, and what is rendered of them.

``sampled/<run>.csv`` is one recording: a row is a call (function, pass and case) in a backend, with the median of its
rounds, the rounds' spread, and of "auto" the backend that it chose. ``sampled.csv`` is the ledger: every recording that
was begun, in order, with its seed, its code, and whether it was finished; no row ever leaves it. Of the last recordings
that are whole the rows stay; figures pool those of one code, machine and set of versions, so that they are of something
that can be run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_twins import ops
from kernel_twins.harness.ceilings import REFERENCE_GPU, gpu_slug
from kernel_twins.report.calls import functions_code
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.calls.sampled_cases import CASES, CONTESTS, seed_of
from kernel_twins.report.calls.sampled_figures import figures
from kernel_twins.report.meaning import write
from kernel_twins.report.rows import identity, store
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.report.rows.libraries import LIBRARIES
from kernel_twins.spec import Case

KEY = ["function", "pass", "case", "backend"]
COLUMNS = [*KEY, "status", "chosen", "us", "spread_pct", *store.SENSORS, "seed", "run"]
_CALL = ["run", *KEY[:3]]
BEGUN = ["run", "seed", "code"]
LEDGER = [*BEGUN, "finished"]

POOLED = 3  # recordings
OURS = {"cuda": "CUDA", "triton": "Triton", "auto": "auto"}
BASELINES = ("torch", "compile", *LIBRARIES)
_WORST = 5

# What is drawn, judged and timed, besides the functions themselves. fastest.json is left out, as it follows from rows:
# a row of "auto" names the backend that was chosen when it was recorded.
_SOURCES = (
    "kernel_twins/ops/**/*.py",
    "kernel_twins/functional/*.py",
    f"hardware-survey/results/{REFERENCE_GPU}.json",
    "kernel_twins/errors.py",
    "kernel_twins/spec/*.py",
    "kernel_twins/harness/*.py",
    *(f"kernel_twins/report/calls/sampled_{name}.py" for name in ("cases", "contests", "results", "timing")),
)


def file(folder: Path, run: str) -> Path:
    return folder / "sampled" / f"{run}.csv"


def ledger(folder: Path) -> pd.DataFrame:
    """Every recording that was begun, in order; InvalidDataError where a seed is not its run's."""
    table = store.read(folder / "sampled.csv", LEDGER, later=["finished"])
    told = zip(table["run"], table["finished"], strict=True)
    table["finished"] = ["yes" if file(folder, run).exists() else finished for run, finished in told]
    for row in table.itertuples():
        if row.seed != str(seed_of(row.run)):
            raise InvalidDataError(f"sampled.csv: the seed of {row.run} is {row.seed}, must be {seed_of(row.run)}")
    if table["run"].duplicated().any():
        raise InvalidDataError(f"sampled.csv: {table['run'][table['run'].duplicated()].iloc[0]} stands there twice")
    return table


def enter(folder: Path, run: str, code: str) -> None:
    """Add a recording that begins now; one that stands there already stays as it is."""
    known = ledger(folder)
    if run not in set(known["run"]):
        added = pd.DataFrame([[run, str(seed_of(run)), code, ""]], columns=LEDGER)
        store.write(folder / "sampled.csv", pd.concat([known, added], ignore_index=True))


def recorded(folder: Path) -> list[str]:
    """The last runs that are whole, as far as code, machine and versions are the last one's, in the ledger's order."""
    facts = {row["run"]: [row[name] for name in store.FACTS] for row in store.read_runs(folder).to_dict("records")}
    whole = _whole(folder)
    if strangers := {*whole} - {*facts}:
        raise InvalidDataError(f"sampled/{min(strangers)}.csv: its run is not in runs.csv")
    about = {run: (code, facts[run]) for run, code in whole.items()}
    return [run for run, told in about.items() if told == list(about.values())[-1]]


def _whole(folder: Path) -> dict[str, str]:
    """The codes of the last runs that are whole, in the ledger's order."""
    known = ledger(folder)
    if strangers := {path.stem for path in folder.glob("sampled/*.csv")} - {*known["run"]}:
        raise InvalidDataError(f"sampled/{min(strangers)}.csv is of a run that sampled.csv does not name")
    whole = [(row.run, row.code) for row in known.itertuples() if file(folder, row.run).exists()]
    return dict(whole[-POOLED:])


def forget_older(folder: Path) -> None:
    """Drop the rows of all recordings but the last ones, after the ledger says that they were finished."""
    kept = _whole(folder)
    store.write(folder / "sampled.csv", ledger(folder))
    for path in folder.glob("sampled/*.csv"):
        if path.stem not in kept:
            path.unlink()


def read(folder: Path) -> pd.DataFrame:
    """The pooled rows, in order; InvalidDataError says what is not as it should be."""
    tables = [_read(folder, run) for run in recorded(folder)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)


def _read(folder: Path, run: str) -> pd.DataFrame:
    table, name = store.read(file(folder, run), COLUMNS), f"sampled/{run}.csv"
    for row in table.itertuples():
        if problem := _problem(row, run):
            raise InvalidDataError(f"{name}: {row.function} {row.case} {row.backend}: {problem}")
    if table.duplicated(KEY).any():
        raise InvalidDataError(f"{name}: {' '.join(table[table.duplicated(KEY)].iloc[0][KEY])} stands there twice")
    counts = table.groupby(["function", "pass", "backend"]).size().to_dict()
    there = {contest[:2] for contest in counts}
    for contest in CONTESTS:
        if contest not in there and _is_stale(_gpu_of(folder, run), folder, run):  # a function that came later
            continue
        for backend in OURS:
            if (found := counts.get((*contest, backend), 0)) != CASES:
                raise InvalidDataError(f"{name}: {' '.join(contest)} has {found} cases of {backend}, must have {CASES}")
    return table


def _problem(row: Any, run: str) -> str:
    """What is wrong with a row, empty if nothing is."""
    if (row.run, row.seed) != (run, str(seed_of(run))):
        return f"its run and seed are {row.run} and {row.seed}, must be {run} and {seed_of(run)}"
    if (row.function, row[2]) not in CONTESTS or row.backend not in (*OURS, *BASELINES):
        return "there is no such function, pass or backend"
    try:
        slug, us = Case.parse(row.case).slug, float(row.us or "nan")
    except ValueError as error:
        return str(error)
    if slug != row.case:
        return "the case is not in its one spelling"
    if (row.status == "ok") != (math.isfinite(us) and us > 0):
        return f"status is {row.status!r}, with a time of {row.us!r}"
    return ""


def is_wrong(row: Mapping[str, str]) -> bool:
    """Whether one of ours gave no time."""
    return row["backend"] in OURS and row["status"] != "ok"


def runs(folder: Path) -> set[str]:
    """The runs that rows are of."""
    return set(_whole(folder))


def code(gpu: str) -> str:
    """Digest of everything that stands behind these rows, as it is now."""
    files = [path for pattern in _SOURCES for path in store.ROOT.glob(pattern)]
    return identity.digest(f"{sorted(functions_code.codes(gpu, timed=False).values())} {identity.files_digest(files)}")


def late(gpu: str, folder: Path) -> list[str]:
    """A line where nothing is recorded, or where the functions changed since; and a line for a recording without rows
    of a function. Rows must be there of the last recording that the ledger calls finished.
    """
    again = "run `ncu_report.py sampled --compile`, then `sampled`"
    whole, known, lines = recorded(folder), ledger(folder), []
    for run in dict.fromkeys([*whole, *known["run"][known["finished"] == "yes"][-1:]]):
        table = store.read(file(folder, run), COLUMNS)
        there = set(zip(table["function"], table["pass"], strict=True))
        if lacking := ", ".join(" ".join(each) for each in CONTESTS if each not in there):
            lines.append(f"sampled/{run}.csv has no rows of {lacking}: {again}")
    if not whole:
        lines.append(f"the public functions were never sampled: {again}")
    elif _is_stale(gpu, folder, whole[-1]):
        lines.append("the public functions changed since they were sampled: run `ncu_report.py sampled --compile`")
    return lines


def _is_stale(gpu: str, folder: Path, run: str) -> bool:
    """Whether a recording was made by other code."""
    known = ledger(folder)
    return list(known["code"][known["run"] == run]) != [code(gpu)]


def _gpu_of(folder: Path, run: str) -> str:
    return gpu_slug(store.read_runs(folder).set_index("run").loc[run, "gpu"])


# ----------------------------------------------------------------------------------------------------------------------
# What the rows say
# ----------------------------------------------------------------------------------------------------------------------


def compared(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each of ours at a case: its ``ratio``, how many times as fast as the best of the others it is.

    ``against`` names that one, ``chosen`` what "auto" took there, and ``compiled`` says whether torch.compile was one
    of the others. A ratio is 0 where ours gave no time. Cases that no other call has a time at count for nothing.
    """
    timed = table.assign(us=pd.to_numeric(table["us"]))
    others = timed[timed["backend"].isin(BASELINES) & timed["us"].notna()]
    best = others.loc[others.groupby(_CALL)["us"].idxmin(), [*_CALL, "backend", "us"]]
    best = best.rename(columns={"backend": "against", "us": "best_us"})
    best = best.merge(others.loc[others["backend"] == "compile", _CALL].assign(compiled=True), on=_CALL, how="left")
    best = best.merge(timed.loc[timed["backend"] == "auto", [*_CALL, "chosen"]], on=_CALL)
    ours = timed[timed["backend"].isin(list(OURS))].drop(columns="chosen").merge(best, on=_CALL)
    return ours.assign(ratio=(ours["best_us"] / ours["us"]).fillna(0.0), compiled=ours["compiled"].notna())


def _contests(cells: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The cells of each function and pass."""
    parts = {" ".join(each): cells[(cells["function"] == each[0]) & (cells["pass"] == each[1])] for each in CONTESTS}
    return {title: part for title, part in parts.items() if len(part)}


def parts(cells: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Those, all cells, and those apart whose others torch.compile is one of: it is hard to beat."""
    compiled = cells["compiled"]
    pooled = {"all": cells, "all, with torch.compile": cells[compiled], "all, without it": cells[~compiled]}
    return {**_contests(cells), **{title: part for title, part in pooled.items() if len(part)}}


def _figures(cells: pd.DataFrame, backend: str, digits: int = 3) -> list[str]:
    """The figures as documents have them, or how many are wrong in the place of the worst.

    ``digits`` are behind the point; ratios below 0.1 have three.
    """
    found = figures(cells, backend)

    def written(ratio: float) -> str:
        return f"{ratio:.{digits if ratio >= 0.1 else 3}f}"

    return [
        "–" if found.mean is None else written(found.mean),
        written(found.low),
        written(found.worst) if found.worst else f"{found.wrong} wrong" if found.wrong else "no time",
        f"{100 * found.below:.0f} %",
    ]


def _worst(cells: pd.DataFrame, backend: str) -> str:
    worst = cells[cells["backend"] == backend].sort_values(["ratio", "case"]).head(_WORST)
    return "; ".join(
        f"`{row.case}` "
        + (f"{row.ratio:.3f} × {row.against}" if row.ratio else row.status)
        + (f", auto chose {row.chosen}" if row.chosen else "")
        for row in worst.itertuples()
    )


# ----------------------------------------------------------------------------------------------------------------------
# What is rendered
# ----------------------------------------------------------------------------------------------------------------------

_NAMES = "geometric mean · 10th percentile · worst · share below 0.95"
NONE = "No recording of sampled cases is published yet."


def by_function(folder: Path) -> dict[str, list[str]]:
    """README.md's cells by function, all passes pooled, and of all functions; empty where nothing is recorded.

    The two others that were the fastest most often, then the first three figures of each of ours, in short.
    """
    cells = compared(read(folder))
    parts = {name: cells[cells["function"] == name] for name, _ in CONTESTS}
    return {title: _summed_up(part) for title, part in {**parts, "all": cells}.items() if len(part)}


def _summed_up(cells: pd.DataFrame) -> list[str]:
    others = cells["against"].value_counts().sort_index().sort_values(ascending=False, kind="stable").index
    figures = [_figures(cells, backend, digits=2) for backend in OURS]
    triples = (f"**{mean}**<br>{write.unbroken(f'{low} · {worst}')}" for mean, low, worst, _ in figures)
    return [", ".join(others[:2]), *triples]


def headline(folder: Path) -> list[str]:
    """docs/results.md's: a line a function and pass."""
    table = read(folder)
    if table.empty:
        return [f"{NONE} What follows was measured at cases that we chose."]
    rows = [
        [title, *(" · ".join(_figures(part, backend)) for backend in OURS)]
        for title, part in parts(compared(table)).items()
    ]
    return [
        *how_read(folder, table),
        "",
        f"An entry has {_NAMES}.",
        "",
        *write.table(["function", *OURS.values()], rows),
    ]


def section(folder: Path) -> list[str]:
    """The log's section; nothing where there are no rows."""
    table = read(folder)
    if table.empty:
        return []
    cells = compared(table)
    rows = [
        [part, title, *_figures(found, backend)]
        for part, found in parts(cells).items()
        for backend, title in OURS.items()
    ]
    return [
        "## Sampled cases",
        "",
        *how_read(folder, table),
        "",
        *write.table(["function", "backend", *_NAMES.split(" · ")], rows, right=2),
        "",
        'The worst of each, with the best of the others and what "auto" chose there:',
        "",
        *(
            f"- {contest}, {title}: {_worst(found, backend)}."
            for contest, found in _contests(cells).items()
            for backend, title in OURS.items()
        ),
    ]


_LAYOUT = "A line is a public function (docs/functions.md) and a pass, a column the `backend` that was asked for."


def how_read(folder: Path, table: pd.DataFrame, layout: str = _LAYOUT) -> list[str]:
    """How the figures are read, and where they are from."""
    known, whole = ledger(folder), recorded(folder)
    seeds = dict(zip(known["run"], known["seed"], strict=True))
    told = ", ".join(f"`{run}` (seed {seeds[run]})" for run in whole)
    finished = {*known["run"][known["finished"] == "yes"]}
    gone, begun = len(finished - {*whole}), len(known) - len(finished)
    more = [f"{gone} older, or of other code, machine or versions"] * (gone > 0)
    more += [f"{begun} not finished"] * (begun > 0)
    older = f" Recordings that are not shown: {', '.join(more)}." if more else ""
    others = _listed(["PyTorch", *taking_part(table)])
    return [
        f"{layout} A figure is how many times as fast it was, at {CASES} cases that a seed "
        f"drew, as the best of the others: {others}, where they serve the case, and at every third case torch.compile. "
        "It is the GPU's time. Each of our results was compared with float64 first: one that is wrong, or could not be "
        "judged, has no time, counts as the worst, and is not in the mean."
        f"{_refused(table)}",
        "",
        f"Recorded in {told}, whose id gives the seed.{older}{_absent(table)}{_changed(folder)}",
    ]


def taking_part(table: pd.DataFrame) -> list[str]:
    """The titles of the libraries that had a time somewhere."""
    timed = {*table["backend"][table["status"] == "ok"]}
    return [library.title for name, library in LIBRARIES.items() if name in timed]


def _listed(titles: list[str]) -> str:
    *first, last = titles
    return f"{', '.join(first)} and {last}" if first else last


def _refused(table: pd.DataFrame) -> str:
    """How many results of others are wrong, and so in no comparison."""
    wrong = table[table["status"].str.startswith("wrong")]["backend"]
    counts = {library.title: int((wrong == name).sum()) for name, library in LIBRARIES.items()}
    counts["torch.compile"] = int((wrong == "compile").sum())
    told = ", ".join(f"{title} {count}" for title, count in counts.items() if count)
    return f" Wrong results of others are left out: {told}." if told else ""


def _changed(folder: Path) -> str:
    last = recorded(folder)[-1]
    stale = _is_stale(_gpu_of(folder, last), folder, last)
    return " The functions, or how they are judged, changed since." if stale else ""


def _absent(table: pd.DataFrame) -> str:
    """The libraries that had a time nowhere in a recording, of those with a kernel for one of its functions."""
    told = ""
    for run, rows in table.groupby("run", sort=False):
        drawn = {op for function in {*rows["function"]} for op in FUNCTIONS[function].drawn}
        serving = {name for op in drawn for name in ops.get(op).baselines}
        titles = [each.title for name, each in LIBRARIES.items() if name in serving]
        if absent := [title for title in titles if title not in taking_part(rows)]:
            told += f" In `{run}`, {_listed(absent)} took no part."
    return told
