"""The files of the kernels, a page each, whose lines have names: L12 is the twelfth."""

from __future__ import annotations

from builder import code, places
from builder.site import Site
from kernel_twins import OPS
from kernel_twins.report.rows.base import ROOT


def write(site: Site) -> None:
    steps = {
        op.file(step.name, backend): (op, step) for op in OPS.values() for step in op.steps for backend in step.backends
    }
    for path in sorted(places.sources()):
        relative = path.relative_to(ROOT).as_posix()
        op, step = steps.get(relative, (None, None))
        site.page(
            places.page(path) or "",
            "source.html.j2",
            path.name,
            styles=["source.css"],
            path=relative,
            op=op,
            step=step,
            lines=code.lines(path),
        )
