"""The figures: throughput against size, each ladder's climb, and the roofline with every step on it.

SVG with the digest of the data it was drawn from in its metadata, so that a figure older than the data is noticed
without comparing drawings, which differ between versions of matplotlib.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from kernel_twins.harness.ceilings import Ceilings
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.pages.ladder_page import TITLES
from kernel_twins.spec import BACKENDS, Case, Name, Op, SizeAxis

_VERSION = 1
"""Of how figures look: one more wherever that changes, so that they are drawn anew."""

_COLOUR = {"cuda": "#4c8c00", "triton": "#7a4fbf", "baseline": "#c2541b", "ceiling": "#777777"}
# In the order of an operation's baselines.
_BASELINE_LINES: tuple[Any, ...] = ("--", ":", "-.", (0, (4, 1, 1, 1, 1, 1)))
_BASELINE_SHADES = (0.9, 0.7, 0.5, 0.3)
_PALE = 0.35
_MARKERS = "osD^vPX*"
_STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",  # its own ground, so that it reads on a light page and on a dark one
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.hashsalt": "kernel-twins",
    "svg.fonttype": "none",
}
_DIGEST = re.compile(r"data ([0-9a-f]{16})")


def draw(folder: Path, plots: Path, results: list[Results]) -> None:
    """Draw every figure into ``plots``, but only those whose data changed since they were drawn."""
    for name, (digest, figure) in _figures(folder, results).items():
        path = plots / f"{name}.svg"
        if drawn_from(path) != digest:
            plots.mkdir(parents=True, exist_ok=True)
            with plt.rc_context(_STYLE):
                drawing = figure()
            drawing.savefig(path, metadata={"Description": f"data {digest}", "Date": None}, bbox_inches="tight")
            plt.close(drawing)


def outdated(folder: Path, plots: Path, results: list[Results]) -> list[str]:
    """Names of figures that are missing or were drawn from other data, or by other code."""
    return [n for n, (digest, _) in _figures(folder, results).items() if drawn_from(plots / f"{n}.svg") != digest]


def drawn_from(path: Path) -> str:
    """The digest in a figure, empty where there is none."""
    match = _DIGEST.search(path.read_text()) if path.exists() else None
    return match.group(1) if match else ""


def _figures(folder: Path, loaded: list[Results]) -> dict[str, tuple[str, Callable[[], Figure]]]:
    """Every figure's name, the digest of its data, and how to draw it. Unmeasured operations have none."""
    results = [each for each in loaded if each.measured]
    ceilings = results[0].ceilings if results else None
    figures: dict[str, tuple[str, Callable[[], Figure]]] = {}
    for each in results:
        digest = _data_digest(folder, [each.op], ceilings)
        axis = each.op.size_axis
        if axis and (panels := _panels(each.op, axis)):
            figures[f"{each.op.name}-sizes"] = (digest, partial(_sizes, each, axis, panels))
        else:
            figures[f"{each.op.name}-cases"] = (digest, partial(_cases, each))
        figures[f"{each.op.name}-ladder"] = (digest, partial(_ladder, each))
    if results and ceilings is not None:
        digest = _data_digest(folder, [each.op for each in results], ceilings)
        figures["roofline"] = (digest, partial(_roofline, results, ceilings))
    return figures


def _data_digest(folder: Path, ops: list[Op], ceilings: Ceilings | None) -> str:
    """Of all that a figure shows: the rows, the ceilings, and the version of the code that draws."""
    content = hashlib.sha256(f"{_VERSION} {ceilings!r}".encode())
    for op in ops:
        for kind in ("timings", "counters"):
            path = folder / f"{op.name}.{kind}.csv"
            content.update(path.read_bytes() if path.exists() else b"")
    return content.hexdigest()[:16]


def _panels(op: Op, axis: SizeAxis) -> dict[str, list[Case]]:
    """The cases that differ in size alone, by what they have in common."""
    panels: dict[str, list[Case]] = {}
    for case in sorted(op.timed_cases):
        panel = axis.panel(case)
        if panel is not None:
            title = "-".join([case.dtype, *(f"{k}.{v}" for k, v in case.variant)])
            panels.setdefault(", ".join(filter(None, (title, panel))), []).append(case)
    return {title: sorted(cases, key=axis.size) for title, cases in panels.items() if len(cases) > 1}


def _contestants(op: Op) -> list[tuple[Name, str, str, Any]]:
    """Every baseline and both languages' last steps: name, label, colour and line."""
    lines = _BASELINE_LINES[: len(op.baselines)]
    baselines = [(Name(b), b, _COLOUR["baseline"], line) for b, line in zip(op.baselines, lines, strict=True)]
    lasts = [(Name(backend, op.steps_of(backend)[-1].name), backend) for backend in BACKENDS]
    return baselines + [(name, f"{TITLES[b]} {name.step}", _COLOUR[b], "-") for name, b in lasts]


def _sizes(results: Results, by: SizeAxis, panels: dict[str, list[Case]]) -> Figure:
    """Throughput against size: every baseline and both languages' last steps, a panel for each dtype and layout."""
    op = results.op
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.2), squeeze=False, sharey=True)
    contestants = _contestants(op)
    for axis, (title, cases) in zip(axes[0], panels.items(), strict=True):
        for name, text, colour, line in contestants:
            points = [(by.size(case), rate) for case in cases if (rate := results.rate(case, name)) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), linestyle=line, marker=".", color=colour, label=text)
        if results.ceiling:
            axis.axhline(results.ceiling, color=_COLOUR["ceiling"], linewidth=0.8)
            axis.annotate("measured ceiling", (by.size(cases[0]), results.ceiling), va="bottom", fontsize=7)
        axis.set_xscale("log", base=2)
        axis.set_xlabel(by.label)
        axis.set_title(f"{op.name}, {title}")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel(results.rate_unit)
    axes[0][-1].legend(fontsize=7, loc="best")
    return figure


def _cases(results: Results) -> Figure:
    """Throughput at every case, where these have no size in common to be drawn against."""
    op = results.op
    cases, contestants = op.timed_cases, _contestants(op)
    figure, axis = plt.subplots(figsize=(7.5, 1 + 0.17 * len(cases) * len(contestants)))
    width = 0.8 / len(contestants)
    shades = iter(_BASELINE_SHADES)  # as they share a colour
    for index, (name, text, colour, _) in enumerate(contestants):
        places = [at + width * (index - (len(contestants) - 1) / 2) for at in range(len(cases))]
        rates = [results.rate(case, name) or 0 for case in cases]
        axis.barh(places, rates, width, color=colour, alpha=1 if name.step else next(shades), label=text)
    if results.ceiling:
        axis.axvline(results.ceiling, color=_COLOUR["ceiling"], linewidth=0.8, label="measured ceiling")
    axis.set_yticks(range(len(cases)), [case.slug for case in cases], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(results.rate_unit)
    axis.set_title(op.name)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _ladder(results: Results) -> Figure:
    """The climb: each step's rate at the profile case, both languages side by side, and the best baseline's.

    Where a step leaves the case to another step's kernel, its bar is pale.
    """
    op, case = results.op, results.op.profile_case
    figure, axis = plt.subplots(figsize=(1.6 + 1.3 * len(op.steps), 3.2))
    pale: list[Any] = []
    for offset, backend in zip((-0.2, 0.2), BACKENDS, strict=True):
        positions = [index + offset for index, step in enumerate(op.steps) if backend in step.backends]
        rates = [results.rate(case, Name(backend, step.name)) or 0 for step in op.steps_of(backend)]
        bars = axis.bar(positions, rates, 0.38, color=_COLOUR[backend], label=TITLES[backend])
        own = [op.profile_case_of(step, backend) == case for step in op.steps_of(backend)]
        pale += [bar for bar, its in zip(bars, own, strict=True) if not its]
        axis.bar_label(bars, [f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}" for rate in rates], fontsize=7)
    for index, bar in enumerate(pale):
        bar.set(alpha=_PALE, label="" if index else "another step's kernel")
    baseline = results.best_baseline(case)
    if baseline and (rate := results.rate(case, baseline)):
        axis.axhline(rate, color=_COLOUR["baseline"], linestyle="--", label=f"best baseline: {baseline.backend}")
    axis.set_xticks(range(len(op.steps)), [step.name for step in op.steps], fontsize=7)
    axis.set_ylabel(results.rate_unit)
    axis.set_title(f"{op.name}, {case.slug}")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _roofline(results: list[Results], ceilings: Ceilings) -> Figure:
    """FLOP per byte moved in device memory, as counted, against FLOP per second, under the measured roofs."""
    figure, axis = plt.subplots(figsize=(7.5, 4.6))
    lowest, highest = 2.0**-5, 2.0**12
    for roof, text in ((ceilings.bf16, "bf16 tensor"), (ceilings.fp32, "fp32 FMA")):
        corners = [lowest, 1e3 * roof / ceilings.dram_read, highest]
        heights = [lowest * ceilings.dram_read / 1e3, roof, roof]
        axis.plot(corners, heights, color=_COLOUR["ceiling"], linewidth=1)
        axis.annotate(text, (highest, roof), ha="right", va="bottom", fontsize=7)
    for each in results:
        for backend in BACKENDS:
            for index, step in enumerate(each.op.steps_of(backend)):
                name, case = Name(backend, step.name), each.op.profile_case_of(step, backend)
                if case is None:
                    continue
                time, moved = each.time_us(case, name), each.quantities(name, case)["dram_bytes"]
                if time and moved:
                    axis.plot(
                        each.op.flops(case) / (1e6 * moved),
                        each.op.flops(case) / time / 1e6,
                        marker=_MARKERS[each.op.chapter % len(_MARKERS)],
                        markersize=4 + index,
                        color=_COLOUR[backend],
                        alpha=0.7,
                        linestyle="none",
                        label=f"{each.op.name}, {TITLES[backend]}" if index == 0 else None,
                    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("FLOP per byte of device memory (counted)")
    axis.set_ylabel("TFLOP/s")
    axis.set_title("Roofline, measured roofs; larger marks are later steps")
    axis.legend(fontsize=7, loc="upper left")
    return figure
