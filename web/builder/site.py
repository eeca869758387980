"""What every page is written through: the measurements, the templates, and the folder."""

from __future__ import annotations

import base64
import json
import posixpath
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import jinja2

from builder import marking
from kernel_twins.harness.ceilings import REFERENCE_GPU, gpu_slug
from kernel_twins.report.meaning import analysis
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import DATA

GLOSSARY = "glossary.html"
WEB = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"<table([^>]*)>(.*?)</table>", re.DOTALL)
_SOURCE = re.compile(r' data-src="([^"]*/)')

# What the head of every page leads to: title and place, in reading order.
NAVIGATION = (
    ("Ladders", "ladders/index.html"),
    ("Scoreboard", "scoreboard.html"),
    ("Compare", "compare.html"),
    ("Compiler", "compiler.html"),
    ("Survey", "survey.html"),
    ("Method", "method.html"),
    ("Interview", "interview.html"),
    ("Glossary", GLOSSARY),
    ("Docs", "docs/index.html"),
)


class Site:
    """The site as it is being written into ``folder``, with what was measured on the reference GPU.

    ``data`` has a folder of tables for each GPU, as profiling/data has.
    """

    def __init__(self, folder: Path, data: Path = DATA) -> None:
        self.folder = folder
        self.gpu = gpu_slug(REFERENCE_GPU)
        self.data = data / self.gpu
        self.measured: list[Results] = analysis.load(self.gpu, self.data)
        self._chip = str(store.read_runs(self.data)["gpu"].iloc[-1])
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(WEB / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        for asset in (*(WEB / "lib").glob("*.*"), *(WEB / "lib" / "widgets").glob("*.js")):
            self._copy(asset, asset.name)
        for library in (*(WEB / "vendor").glob("*.js"), *(WEB / "vendor").glob("*.LICENSE")):
            self._copy(library, f"vendor/{library.name}")

    def page(
        self,
        place: str,
        template: str,
        title: str,
        *,
        about: str = "",
        scripts: Sequence[str] = (),
        styles: Sequence[str] = (),
        **given: object,
    ) -> None:
        """Write a page, with links from its words to the glossary.

        ``about`` is its description; ``scripts`` load in their order, ``styles`` after kt.css.
        """
        root = "../" * place.count("/")
        page = self._environment.get_template(template).render(
            title=title,
            about=about,
            place=place,
            root=root,
            navigation=NAVIGATION,
            scripts=scripts,
            styles=styles,
            origin=f"Measured on an {self._chip}.",
            folder=f"profiling/data/{self.gpu}/",
            **given,
        )
        self._file(place).write_text(_TABLE.sub(_with_base, marking.marked(page, root) if place != GLOSSARY else page))

    def payload(self, name: str, value: object) -> None:
        """Write data that a page loads on demand, by ``KT.load(name)``.

        A script, as a page on disk cannot fetch; deflated, as the folder is to stay small.
        """
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        self._file(f"data/{name}.js").write_text(f'KT.put("{name}","{packed}");\n')

    def _copy(self, source: Path, place: str) -> None:
        shutil.copyfile(source, self._file(place))

    def _file(self, place: str) -> Path:
        path = self.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _with_base(table: re.Match[str]) -> str:
    """A table that says once what the sources of its numbers begin with, up to a slash."""
    sources = _SOURCE.findall(table[2])
    base = posixpath.commonpath(sources) if sources else ""
    if not base:
        return table[0]
    inner = table[2].replace(f' data-src="{base}/', ' data-src="/')
    return f'<table{table[1]} data-base="{base}">{inner}</table>'
