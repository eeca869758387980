"""The front page: four claims, one ladder to move through, three doors, and what is not good yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from builder import claims, hero, numbers, sampled
from builder.contests import Contest
from builder.rungs import TITLES
from builder.site import Site
from kernel_twins.report.rows import store
from kernel_twins.spec import BACKENDS, Backend, Case


@dataclass(frozen=True, slots=True)
class Shown:
    """A claim as the page has it; ``mark`` is where its value lies between a quarter and four times, in percent."""

    value: Markup
    low: Markup
    high: Markup
    title: str
    step: str
    stale: bool
    mark: float


def write(site: Site) -> None:
    measured = site.measured
    ladder = next(each for each in measured if each.op.name == claims.PRODUCT)
    case = ladder.op.profile_case
    best = claims.best(ladder, case)
    rungs, behind = hero.rungs(ladder), claims.runs(measured)
    runs = [each for each in store.read_runs(site.data).sort_values("date").to_dict("records") if each["run"] in behind]
    collapse, slowest = claims.collapse(measured).row, claims.slowest(measured).row
    products = {backend: claims.product(measured, backend) for backend in BACKENDS}
    site.page(
        "index.html",
        "index.html.j2",
        "The same GPU kernels in CUDA C++ and in Triton",
        about="GPU kernels, step by step, in CUDA C++ and in Triton: measured, explained, each number with its row.",
        scripts=["hero.js"],
        styles=["roofline.css", "front.css"],
        op=ladder.op,
        products=[_ratio(f"product/{backend}", each, each.rows[-1]) for backend, each in products.items()],
        shapes=[_shape(each, products) for each in _cases(products)],
        collapse=collapse,
        collapse_shown=_ratio("collapse", claims.collapse(measured), collapse),
        fallen=numbers.quantity(collapse.results, collapse.baseline, collapse.case, "rate"),
        stood=numbers.quantity(collapse.results, collapse.baseline, claims.best_case(collapse), "rate"),
        slowest=slowest,
        slowest_shown=_ratio("slowest", claims.slowest(measured), slowest),
        predictions=_share("predictions", claims.predicted(measured)),
        counts={key: _count(claims.count(measured, key), key) for key in claims.COUNTS},
        rungs=rungs,
        shown={each.backend: each.step for each in rungs[-1].sides},
        roofline=hero.roofline(ladder),
        case=case.slug,
        unit=ladder.rate_unit,
        best=best,
        best_rate=numbers.quantity(ladder, best, case, "rate"),
        best_height=ladder.quantities(best, case)["ceiling_share"],
        ceilings={key: _ceiling(site, key) for key in ("bf16", "dram_read")},
        unmeasured=claims.unmeasured(measured),
        wrong={backend: sampled.wrong(site, backend) for backend in BACKENDS},
        run=runs[-1],
        dates=[each["date"][:10] for each in runs],
    )


def _ratio(rule: str, claim: claims.Claim, row: Contest) -> Shown:
    value, low, high = (
        numbers.shown(f"{each:.3f}{unit}", each, f"rule#{rule}{end}")
        for each, unit, end in ((claim.value, " ×", ""), (claim.low, "", "/low"), (claim.high, "", "/high"))
    )
    stale = any(each.stale for each in claim.rows)
    return Shown(value, low, high, TITLES[row.backend], row.name.step, stale, claims.place(claim.value))


def _cases(products: Mapping[Backend, claims.Claim]) -> list[Case]:
    return list(dict.fromkeys(row.case for each in products.values() for row in each.rows))


def _shape(case: Case, products: Mapping[Backend, claims.Claim]) -> tuple[str, str, list[Markup]]:
    """A row of the product's table: the case, the best baseline, and each language's ratio."""
    rows = {backend: row for backend, each in products.items() for row in each.rows if row.case == case}
    against = next(row.baseline.backend for row in rows.values())
    ratios = [
        numbers.multiple(row.results, case, row.name, row.baseline, row.paired)
        if (row := rows.get(backend))
        else Markup("–")
        for backend in products
    ]
    return case.slug, against, ratios


def _share(rule: str, claim: claims.Claim) -> Shown:
    value, low, high = (
        numbers.shown(f"{each:.1f}{unit}", each, f"rule#{rule}{end}")
        for each, unit, end in ((claim.value, " %", ""), (claim.low, "", "/low"), (claim.high, "", "/high"))
    )
    return Shown(value, low, high, "", "", False, claim.value)


def _count(found: int, key: str) -> Markup:
    return numbers.shown(f"{found:,}", found, f"rule#{key}")


def _ceiling(site: Site, key: str) -> Markup:
    value = getattr(site.measured[0].ceilings, key)
    return numbers.shown(f"{value:,.0f}", value, f"ceilings#{key}")
