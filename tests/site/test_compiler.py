"""The stage explorer: lines of one source line light up together, by pointer and by keys, and it reads without JS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel_twins.report.sweeps import inductor, stages
from kernel_twins.report.sweeps.lines import count

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

COLUMNS = ("source", "ttgir", "ptx", "sass")
DOT = 41  # the line of matmul_bf16 v04 that multiplies


@pytest.fixture
def page(site: Path, browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.goto((site / "compiler.html").as_uri())
    opened.wait_for_selector(".line.lit", state="attached")
    yield opened
    assert not errors
    opened.close()


def lit(page: Page, column: str) -> set[str]:
    """The source lines that light up in a column."""
    lines = page.locator(f".column.{column} .line.lit")
    return {str(lines.nth(i).get_attribute("data-at")) for i in range(lines.count())}


@pytest.mark.parametrize("column", COLUMNS)
def test_pointing_at_a_line_lights_the_same_source_line_everywhere(page: Page, column: str) -> None:
    page.locator(f'.column.{column} .line[data-at="{DOT}"] .at').first.hover()
    assert {each: lit(page, each) for each in COLUMNS} == {each: {str(DOT)} for each in COLUMNS}
    assert f"Line {DOT}" in page.locator(".told").inner_text()


def test_a_click_keeps_a_line_until_the_next(page: Page) -> None:
    line = page.locator(f'.column.source .line[data-at="{DOT}"] .at')
    line.click()
    page.locator('.column.ttgir .line[data-at="26"] .at').first.hover()
    assert lit(page, "source") == {str(DOT)}
    line.click()
    page.locator('.column.ttgir .line[data-at="26"] .at').first.hover()
    assert lit(page, "source") == {"26"}


def test_folded_lines_count_as_what_they_stand_for(page: Page) -> None:
    page.locator(".setting:visible select").select_option("matmul_bf16.v04_pipelined.triton.fp32")
    page.wait_for_function("document.querySelector('.column.sass')?.textContent.includes('FFMA')")
    page.locator(f'.column.source .line[data-at="{DOT}"] .at').hover()
    found = stages.read(stages.FOLDER / "matmul_bf16.v04_pipelined.triton.fp32.txt").stages["sass"]
    assert f"{count([line for line in found if line[0] == DOT])} of SASS" in page.locator(".told").inner_text()


def test_llvm_ir_is_folded_to_the_lit_lines(page: Page) -> None:
    page.get_by_role("checkbox", name="LLVM IR", exact=True).check()
    page.locator(f'.column.source .line[data-at="{DOT}"] .at').hover()
    lines = page.locator(".column.llir .line:visible")
    assert 0 < lines.count() < page.locator(".column.llir .line").count()
    assert lines.count() == page.locator(".column.llir .line.lit").count()
    page.get_by_label("all of LLVM IR").check()
    assert page.locator(".column.llir .line:visible").count() == page.locator(".column.llir .line").count()


def test_keys_move_from_line_to_line(page: Page) -> None:
    page.locator(".column.source .lines").focus()
    before = lit(page, "source")
    page.keyboard.press("ArrowDown")
    after = lit(page, "source")
    assert after != before
    assert lit(page, "ttgir") <= after
    page.keyboard.press("Home")
    assert lit(page, "source") == {"1"}


def test_between_two_and_six_columns_are_open(page: Page) -> None:
    for column in ("source", "ttgir", "ptx", "sass"):
        page.locator(f'input[name="{column}"]').click()
    assert page.locator(".column:visible").count() == 2


def test_a_setting_turns_a_pass_off_and_its_address_is_kept(page: Page, browser: Browser) -> None:
    page.locator(".setting:visible select").select_option("matmul_bf16.v04_pipelined.triton.strides")
    page.wait_for_function("document.querySelector('tr[data-pass=vectorization] .seen').textContent === 'absent'")
    again = browser.new_page()
    again.goto(page.url)
    again.wait_for_function("document.querySelector('tr[data-pass=vectorization] .seen').textContent === 'absent'")
    assert again.locator(".setting:visible select").input_value() == "matmul_bf16.v04_pipelined.triton.strides"
    again.close()


@pytest.mark.parametrize("state", ["stages=nonsense", "columns=", "columns=foo,sass", "line=9999", "line=41.5"])
def test_an_address_that_says_nothing_sensible_is_the_page_as_it_opens(page: Page, state: str) -> None:
    told, columns = page.locator(".told").inner_text(), page.locator(".column:visible").count()
    address = page.url
    page.goto("about:blank")
    page.goto(f"{address}#{state}")
    page.wait_for_selector(".line.lit", state="attached")
    assert (page.locator(".told").inner_text(), page.locator(".column:visible").count()) == (told, columns)


def test_a_place_of_the_page_leaves_the_choice_alone(page: Page) -> None:
    page.locator('select[name="kernel"]').select_option("0")
    page.wait_for_function("document.querySelector('.facts').innerText.includes('vector_add')")
    page.evaluate("location.hash = 'grid'")
    page.wait_for_timeout(100)
    assert page.locator('select[name="kernel"]').input_value() == "0"


def test_cuda_shows_columns_though_only_tritons_were_open(page: Page) -> None:
    for column in ("ttir", "source", "ptx", "sass"):
        page.locator(f'input[name="{column}"]').click()
    page.locator(".setting:visible select").select_option("matmul_bf16.v04_pipelined.cuda")
    page.wait_for_selector(".column.sass:visible")
    assert "absent" not in page.locator("table.evidence").inner_text()
    assert "static shared bytes" in page.locator(".facts").inner_text()


def test_all_five_passes_show_their_evidence(page: Page) -> None:
    seen = page.locator("table.evidence .seen")
    assert seen.count() == 5
    assert "absent" not in seen.all_inner_texts()
    told = " ".join(seen.all_inner_texts())
    for each in ("sizePerThread", "local_alloc", "swizzlingByteWidth", "cp.async", "wgmma.mma_async", "HGMMA"):
        assert each in told


def test_the_grid_shows_one_kernel_at_a_time(page: Page) -> None:
    page.locator('select[name="grid"]').select_option("softmax/v03_registers")
    kernels = page.locator("kt-compile-grid .grid:visible")
    assert {kernels.nth(i).get_attribute("data-kernel") for i in range(kernels.count())} == {"softmax/v03_registers"}


def test_inductors_kernels_stand_beside_a_step(page: Page) -> None:
    for op in inductor.OPERATIONS:
        head, _ = inductor.read(inductor.file(op))
        section = page.locator(f"#inductor-{op} ~ .twins").first
        mine, ours = section.locator(".code").all_inner_texts()
        assert all(f"def {name}(" in mine for name in head["kernels"].split(", ") if name.startswith("triton"))
        assert "@triton.jit" in ours


def test_it_reads_without_scripts(site: Path, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto((site / "compiler.html").as_uri())
    text = opened.locator("main").inner_text()
    assert "ttng.warp_group_dot" in text
    assert "wgmma.mma_async" in text
    assert opened.locator(".excerpts pre").count() > 3
    assert opened.locator("kt-compile-grid .grid:visible").count() > 5
    assert not opened.locator("select:visible").count()
    context.close()
