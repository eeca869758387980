"""The pages: which there are, what each shows, and where it lies."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import jinja2

from builder import board, ladders, prose
from kernel_twins.harness.ceilings import REFERENCE_GPU, gpu_slug
from kernel_twins.report.meaning import analysis
from kernel_twins.report.rows.base import DATA

WEB = Path(__file__).resolve().parents[1]


def build(folder: Path) -> list[Path]:
    """All pages, in a folder that is made anew; returns them."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "ladders").mkdir(parents=True)
    for asset in (*(WEB / "lib").glob("*.*"), *(WEB / "lib" / "widgets").glob("*.js")):
        shutil.copyfile(asset, folder / asset.name)
    gpu = gpu_slug(REFERENCE_GPU)
    measured = analysis.load(gpu, DATA / gpu)
    render = _Renderer(folder, f"Measured on an {REFERENCE_GPU}.")
    families = [(key, list(group)) for key, group in itertools.groupby(measured, key=lambda each: each.op.family)]
    render("ladders/index.html", "ladders.html.j2", "Ladders", families=[(f, [(r.op, r) for r in g]) for f, g in families])
    for results in measured:
        op = results.op
        render(
            f"ladders/{op.name}.html", "ladder.html.j2", op.title, scripts=["ladder.js"], op=op,
            summary=prose.inline(op.summary), rungs=ladders.rungs(results),
        )  # fmt: skip
    contests = list(board.contests(measured))
    render("scoreboard.html", "scoreboard.html.j2", "Scoreboard", scripts=["scoreboard.js"], contests=contests)
    return sorted(folder.rglob("*.html"))


class _Renderer:
    def __init__(self, folder: Path, origin: str) -> None:
        self.folder, self.origin = folder, origin
        loader = jinja2.FileSystemLoader(WEB / "templates")
        self.environment = jinja2.Environment(
            loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )

    def __call__(self, place: str, template: str, title: str, scripts: list[str] | None = None, **given: object) -> None:
        root = "../" * place.count("/")
        page = self.environment.get_template(template).render(
            title=title, root=root, scripts=scripts or [], origin=self.origin, **given
        )
        (self.folder / place).write_text(page)

