"""Which figures there are, which of them are older than their data, and how they are written.

SVG with the digest of the data it was drawn from in its metadata, so that a figure older than the data is noticed
without comparing drawings, which differ between versions of matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from kernel_twins.harness.ceilings import Ceilings
from kernel_twins.report.figures import cases, ladder, roofline, sampled, sizes, style
from kernel_twins.report.figures.groups import groups
from kernel_twins.report.figures.roofs import paths
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import Op

_VERSION = 5
"""Of how figures look: one more wherever that changes, so that they are drawn anew."""

_FEW = 3  # cases off the axis of sizes, from which on they have a figure of their own
_DIGEST = re.compile(r"data ([0-9a-f]{16})")
_COORDINATES = re.compile(r'\b(?:d|x|y)="[^"]*"')
_DECIMALS = re.compile(r"(\.\d\d)\d+")
_DOT = re.compile(r"M (\S+ \S+) \nL \1 \n")  # a stroke without length
_UNTURNED = re.compile(r' transform="rotate\(-0 [^)]*\)"')


def draw(folder: Path, plots: Path, results: list[Results]) -> None:
    """Draw every figure into ``plots``, but only those whose data changed since they were drawn."""
    for name, (digest, figure) in _figures(folder, results).items():
        path = plots / f"{name}.svg"
        if drawn_from(path) != digest:
            plots.mkdir(parents=True, exist_ok=True)
            path.write_text(svg(figure, digest))


def outdated(folder: Path, plots: Path, results: list[Results]) -> list[str]:
    """Names of figures that are missing or were drawn from other data, or by other code."""
    return [n for n, (digest, _) in _figures(folder, results).items() if drawn_from(plots / f"{n}.svg") != digest]


def strays(folder: Path, plots: Path, results: list[Results]) -> list[str]:
    """Names of figures in ``plots`` that nothing draws any more."""
    return sorted({path.stem for path in plots.glob("*.svg")} - _figures(folder, results).keys())


def drawn_from(path: Path) -> str:
    """The digest in a figure, empty where there is none."""
    match = _DIGEST.search(path.read_text()) if path.exists() else None
    return match.group(1) if match else ""


def svg(figure: Callable[[], Figure], digest: str) -> str:
    """A figure's file: the same bytes whenever it is drawn, and half as many as matplotlib writes.

    Coordinates are of a hundredth of a point.
    """
    written = io.StringIO()
    with style.in_force():
        drawing = figure()
        metadata = {"Title": str(drawing.get_label()), "Description": f"data {digest}", "Date": None}
        drawing.savefig(written, format="svg", metadata=metadata)
    text = _COORDINATES.sub(lambda match: _DECIMALS.sub(r"\1", match[0]), written.getvalue())
    return _UNTURNED.sub("", _DOT.sub(r"M \1 z\n", text))


def _figures(folder: Path, loaded: list[Results]) -> dict[str, tuple[str, Callable[[], Figure]]]:
    """Every figure's name, the digest of its data, and how to draw it. Unmeasured operations have none."""
    results = [each for each in loaded if each.measured]
    figures: dict[str, tuple[str, Callable[[], Figure]]] = {}
    for each in results:
        digest = _digest(_rows(folder, each.op), each.ceilings)
        op, axis = each.op, each.op.size_axis
        grouped = groups(op, axis) if axis else []
        others = [case for case in op.timed_cases if axis is None or axis.panel(case) is None]
        if axis and grouped:
            figures[f"{op.name}-sizes"] = (digest, partial(sizes.draw, each, axis, grouped))
        if len(others) >= _FEW or not grouped:
            figures[f"{op.name}-cases"] = (digest, partial(cases.draw, each, others))
        figures[f"{op.name}-ladder"] = (digest, partial(ladder.draw, each))
    ceilings = results[0].ceilings if results else None
    if ceilings is not None and any(paths(each) for each in results):
        digest = _digest((path for each in results for path in _rows(folder, each.op)), ceilings)
        figures["roofline"] = (digest, partial(roofline.draw, results, ceilings))
    cells = sampled.read(folder)
    if not cells.empty:
        digest = _digest([folder / "sampled.csv", *sorted(folder.glob("sampled/*.csv"))], None)
        figures["sampled"] = (digest, partial(sampled.draw, cells))
    return figures


def _rows(folder: Path, op: Op) -> list[Path]:
    return [folder / f"{op.name}.{kind}.csv" for kind in ("timings", "counters")]


def _digest(files: Iterable[Path], ceilings: Ceilings | None) -> str:
    """Of all that a figure shows: the rows, the ceilings, and the version of the code that draws."""
    content = hashlib.sha256(f"{_VERSION} {ceilings!r}".encode())
    for path in files:
        content.update(path.read_bytes() if path.exists() else b"")
    return content.hexdigest()[:16]
