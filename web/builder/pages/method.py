"""The method: how a number comes about, and the runs that all numbers are of."""

from __future__ import annotations

from builder import prose
from builder.site import WEB, Site
from kernel_twins.report.rows import store
from kernel_twins.report.rows.libraries import LIBRARIES

_COLUMNS = {
    "date": "date",
    "gpu": "GPU",
    "power_limit_w": "power limit, W",
    "driver": "driver",
    "cuda": "CUDA",
    "nvcc": "nvcc",
    "torch": "torch",
    "triton": "Triton",
    "ncu": "ncu",
    "python": "Python",
}


def write(site: Site) -> None:
    columns = _COLUMNS | {name: library.title for name, library in LIBRARIES.items()}
    path = WEB / "pages" / "method.md"
    site.page(
        "method.html",
        "method.html.j2",
        "Method",
        styles=["document.css"],
        prose=prose.html(path.read_text(), path, ""),
        columns=columns.values(),
        runs=[
            (run["run"], [str(run[key]) for key in columns]) for run in store.read_runs(site.data).to_dict("records")
        ],
    )
