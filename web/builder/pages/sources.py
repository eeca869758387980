"""The steps' files: an index, in which each opens by its path, and their lines as payloads.

``data/code-OP.js`` has an operation's files: lines of HTML, each once, and of each file which they are.
"""

from __future__ import annotations

from typing import Any

from builder import code
from builder.site import Site
from kernel_twins import OPS
from kernel_twins.report.rows.base import ROOT
from kernel_twins.spec import Op


def write(site: Site) -> None:
    for op in OPS.values():
        site.payload(f"code-{op.name}", _payload(op))
    groups = [
        (op, [(path, step, len(code.lines(ROOT / path))) for path, step in _files(op).items()]) for op in OPS.values()
    ]
    site.page("source.html", "source.html.j2", "Source", scripts=["source.js"], styles=["source.css"], groups=groups)


def _files(op: Op) -> dict[str, str]:
    """A step for each path."""
    return {op.file(step.name, backend): step.name for step in op.steps for backend in step.backends}


def _payload(op: Op) -> dict[str, Any]:
    lines: dict[str, int] = {}
    files = {path: [lines.setdefault(str(line), len(lines)) for line in code.lines(ROOT / path)] for path in _files(op)}
    return {"lines": list(lines), "files": files}
