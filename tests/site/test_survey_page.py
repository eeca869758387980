"""The survey's page: its numbers are the survey's and the datasheets', and roofs move to those of the chosen chip."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder import chips
from kernel_twins import OPS
from kernel_twins.report.rows.base import ROOT
from tests.site import checks, reading

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = ROOT / "hardware-survey"
SURVEY = json.loads((FOLDER / "results" / "h100-sxm.json").read_text())
MEASURED = {row["name"]: row for row in SURVEY["measurements"]}
SHEETS: dict[str, dict[str, str]] = {}
for _row in csv.DictReader((FOLDER / "datasheets.csv").open()):
    SHEETS.setdefault(_row["gpu"], {})[_row["quantity"]] = _row["value"]

_DRAWN = """() => {
  const svg = document.querySelector("kt-survey svg"), scale = svg.dataset;
  const rate = (y) => 10 ** (Number(scale.up) + (Number(scale.bottom) - y) / Number(scale.decadeUp));
  const across = (x) => 10 ** (Number(scale.across) + (x - Number(scale.left)) / Number(scale.decadeAcross));
  const memory = svg.querySelector(".memory");
  const shown = (each) => getComputedStyle(each).display !== "none";
  return {
    memory: 1e3 * rate(Number(memory.getAttribute("y1"))) / across(Number(memory.getAttribute("x1"))),
    text: svg.querySelector(".memory-name tspan").textContent,
    pipes: Object.fromEntries([...svg.querySelectorAll(".pipe")].filter(shown).map((each) => [each.dataset.pipe, [
      rate(Number(each.querySelector("line").getAttribute("y1"))), each.querySelector("tspan").textContent,
    ]])),
    floors: Object.fromEntries([...svg.querySelectorAll(".floor")].filter(shown).map((each) =>
      [each.dataset.op, rate(Number(each.getAttribute("cy")))])),
    points: shown(svg.querySelector(".points")),
    badges: [...document.querySelectorAll("kt-survey figcaption .badge")]
      .filter((each) => each.checkVisibility()).map((each) => each.textContent),
  };
}"""


def expected(key: str) -> tuple[float, dict[str, float]]:
    """Memory's rate in GB/s and the pipes' in TFLOP/s, straight from the files."""
    if key == "h100-sxm-surveyed":
        bf16 = max(row["value"] for name, row in MEASURED.items() if "bf16" in name)
        pipes = {"bf16 tensor": bf16, "fp32 FMA": MEASURED["fma_fp32"]["value"], "3 × TF32": bf16 / 6}
        return MEASURED["dram_read"]["value"], pipes
    sheet = SHEETS[key]
    named = {"bf16 tensor": ("bf16", 1), "fp32 FMA": ("fp32", 1), "3 × TF32": ("tf32", 3)}
    pipes = {name: float(sheet[of]) / parts for name, (of, parts) in named.items() if of in sheet}
    return float(sheet["memory_bandwidth"]), pipes


@pytest.mark.parametrize("key", ["h100-sxm-surveyed", *SHEETS])
def test_roofs_and_floors_of_a_chip(key: str, site: Path, browser: Browser) -> None:
    page = browser.new_page(reduced_motion="reduce")
    page.goto((site / "survey.html").as_uri())
    page.select_option("#chip", key)
    page.wait_for_selector(f'kt-survey[data-gpu="{key}"]')
    drawn = page.evaluate(_DRAWN)
    page.close()
    memory, pipes = expected(key)
    assert drawn["memory"] == pytest.approx(memory, rel=0.01)
    assert checks.shows(drawn["text"], memory)
    assert drawn["pipes"].keys() == pipes.keys()
    for name, (rate, text) in drawn["pipes"].items():
        assert rate == pytest.approx(pipes[name], rel=0.01), name
        assert checks.shows(text, pipes[name])
    for op in OPS.values():
        pipe = chips.pipe(op)
        assert (op.name in drawn["floors"]) == (pipe in pipes)
        if pipe in pipes:
            least = min(pipes[pipe], op.flops(op.profile_case) / op.bytes(op.profile_case) * memory / 1e3)
            assert drawn["floors"][op.name] == pytest.approx(least, rel=0.025), op.name  # copies run at another rate
    surveyed = key == "h100-sxm-surveyed"
    assert drawn["points"] == surveyed
    assert drawn["badges"] == (["recorded", "recorded", "model"] if surveyed else ["model"])


def test_a_link_opens_a_chip_and_arrows_choose_another(site: Path, browser: Browser) -> None:
    page = browser.new_page()
    page.goto((site / "survey.html").as_uri() + "#gpu=t4")
    page.wait_for_selector('kt-survey[data-gpu="t4"]')
    assert "It has no bf16 tensor and no 3 × TF32" in page.inner_text("kt-survey output")
    page.focus("#chip")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector('kt-survey[data-gpu="a10"]')
    assert page.url.endswith("#gpu=a10")
    page.close()


def test_every_ceiling_and_every_datasheet_figure_is_shown(site: Path) -> None:
    numbers = {each.source: each for each in reading.read(site / "survey.html").numbers}
    for name, row in MEASURED.items():
        for field in ("value", "sm_clock_mhz", "memory_clock_mhz", "power_w", "power_max_w", "temperature_c"):
            assert float(numbers[f"h100-sxm.json#{name}/{field}"].value) == pytest.approx(row[field], rel=1e-5)
        spread = float(numbers[f"h100-sxm.json#{name}/spread"].value)
        assert spread == pytest.approx(100 * row["iqr"] / row["value"], rel=1e-5)
    for gpu, sheet in SHEETS.items():
        for quantity in ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "memory_bandwidth", "memory", "l2", "power"):
            found = numbers.get(f"datasheets.csv#{gpu}/{quantity}")
            assert (found.text if found else None) == sheet.get(quantity), (gpu, quantity)


def test_floors_follow_from_bytes_and_arithmetic(site: Path) -> None:
    numbers = {each.source: float(each.value) for each in reading.read(site / "survey.html").numbers}
    for op in OPS.values():
        case = op.profile_case
        for gpu in SHEETS:
            memory, pipes = expected(gpu)
            source = f"datasheets.csv#{gpu}/floor/{op.name}"
            assert (source in numbers) == (chips.pipe(op) in pipes)
            if source in numbers:
                least = max(op.bytes(case) / memory / 1e3, op.flops(case) / pipes[chips.pipe(op)] / 1e6)
                assert numbers[source] == pytest.approx(least, rel=1e-5)
        memory = MEASURED[op.ceiling if op.ceiling.startswith("dram") else "dram_read"]["value"]
        least = max(
            op.bytes(case) / memory / 1e3, op.flops(case) / expected("h100-sxm-surveyed")[1][chips.pipe(op)] / 1e6
        )
        assert numbers[f"h100-sxm.json#floor/{op.name}"] == pytest.approx(least, rel=1e-5)


def test_numbers_of_the_survey_resolve() -> None:
    assert chips.survey_value("dram_read/value") == MEASURED["dram_read"]["value"]
    assert chips.sheet_value("h200/bf16") == 989.5
    for key in ("nothing/value", "launch/of_datasheet"):
        with pytest.raises(LookupError):
            chips.survey_value(key)
    for key in ("t4/floor/matmul_bf16", "t4/bf16", "nothing/bf16"):
        with pytest.raises(LookupError):
            chips.sheet_value(key)


def test_without_javascript_there_are_figure_and_tables(site: Path) -> None:
    page = (site / "survey.html").read_text()
    assert re.search(r'<p class="controls" hidden>', page)
    assert page.count("<table") == 6 and page.count("<svg") == 1
