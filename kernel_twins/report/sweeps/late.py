"""What changed since a sweep recorded it."""

from __future__ import annotations

from kernel_twins.report.sweeps import grid, stages


def late() -> list[str]:
    """A line for each step whose recorded stages, or cells of the grid, are of other code than the tree's."""
    verb = "run `python profiling/ncu_report.py sweeps"
    recorded = (stages.read(path) for path in sorted(stages.FOLDER.glob("*.txt")))
    changed = {(each.head["op"], each.head["step"], each.head["backend"]): None for each in recorded if each.stale}
    cells = grid.read()
    kernels = [
        kernel
        for kernel, code in dict(zip(cells["kernel"], cells["code"], strict=True)).items()
        if code != grid.code(kernel)
    ]
    return [
        *(
            f"{op}/{step}/{backend} changed since its stages were recorded: {verb} stages {op}/{step}`"
            for op, step, backend in changed
        ),
        *(f"{kernel} changed since the grid was compiled: {verb} compile`" for kernel in kernels),
    ]
