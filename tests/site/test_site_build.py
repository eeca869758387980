"""The build: the same bytes everywhere, nothing from elsewhere, links that lead somewhere, and its budgets."""

from __future__ import annotations

import filecmp
import sys
from pathlib import Path

import pytest

from tests.site import checks, reading
from tests.site.conftest import ROOT

PARTS = 4  # so that processes share the pages


def test_it_is_built_without_torch_triton_or_network_and_to_the_same_bytes(site: Path, site_anew: Path) -> None:
    files, anew = ({path.relative_to(each) for path in each.rglob("*")} for each in (site, site_anew))
    assert files == anew
    differing = [
        str(file)
        for file in sorted(files)
        if (site / file).is_file() and not filecmp.cmp(site / file, site_anew / file, shallow=False)
    ]
    assert not differing


@pytest.mark.parametrize("part", range(PARTS))
def test_pages_are_valid(part: int, site: Path) -> None:
    pytest.importorskip("html5lib")
    assert not checks.unparsed(reading.pages(site)[part::PARTS])


def test_names_are_unique_in_a_page(site: Path) -> None:
    assert not checks.repeated(site)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert not checks.foreign(site)


def test_no_file_names_a_place_of_this_machine(site: Path) -> None:
    assert not checks.placed(site, [str(ROOT), str(site.parent), f"{Path.home()}/", sys.prefix])


def test_links_lead_somewhere(site: Path) -> None:
    assert not checks.broken(site)


def test_nothing_is_over_its_budget(site: Path) -> None:
    assert not checks.over_budget(site)
