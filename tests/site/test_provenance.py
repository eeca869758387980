"""Numbers of pages are those of the committed rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder import provenance
from builder.pages import PAGES
from builder.site import Site
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import DATA
from tests.site import checks, reading

if TYPE_CHECKING:
    from tests.site.reading import Number

PARTS = 4  # so that processes share the pages


def numbers(folder: Path) -> list[Number]:
    return [number for page in reading.pages(folder) for number in reading.read(page).numbers]


@pytest.mark.parametrize("part", range(PARTS))
def test_a_number_is_that_of_its_row(part: int, site: Path, committed: Site) -> None:
    """``pytest -rP`` shows how many there are."""
    found = sorted({number for page in reading.pages(site)[part::PARTS] for number in reading.read(page).numbers})
    print(f"{len(found)} numbers of rows")
    faults = checks.wrong(committed, found)
    assert not faults, "\n".join(faults)


def test_pages_have_numbers(site: Path) -> None:
    assert len(numbers(site)) > 1000


def test_another_row_makes_another_page(site: Path, tmp_path: Path) -> None:
    """The times of one call are doubled, and its ratios on the scoreboard halve."""
    shutil.copytree(DATA, tmp_path / "data")
    source = next(each.source for each in reading.read(site / "scoreboard.html").numbers if "|" in each.source)
    table, _, key = source.partition("#")
    case, backend, step = key.partition("|")[0].split("/")
    (file,) = (tmp_path / "data").rglob(table)
    rows = store.read(file, store.TABLES["timings"])
    ours = (rows["case"] == case) & (rows["backend"] == backend) & (rows["step"] == step)
    rows.loc[ours, "times_us"] = rows.loc[ours, "times_us"].map(doubled)
    store.write(file, rows)
    changed = Site(tmp_path / "site", tmp_path / "data")
    PAGES["scoreboard"](changed)
    before, after = (
        next(float(each.value) for each in reading.read(folder / "scoreboard.html").numbers if each.source == source)
        for folder in (site, changed.folder)
    )
    assert after == pytest.approx(before / 2, rel=1e-4)
    assert provenance.value(changed, source) == pytest.approx(after, rel=1e-5)


def doubled(times: str) -> str:
    return " ".join(str(2 * float(time)) for time in times.split())
