"""The interview: twelve questions about GPU kernels, each with a few lines, numbers from rows, and a step."""

from __future__ import annotations

from builder import answers, claims, hero
from builder.site import Site


def write(site: Site) -> None:
    product = next(each for each in site.measured if each.op.name == claims.PRODUCT)
    site.page(
        "interview.html",
        "interview.html.j2",
        "Interview",
        about="Twelve questions that are asked about GPU kernels, answered with measured numbers.",
        styles=["roofline.css", "interview.css"],
        answers=answers.load(site.measured),
        roofline=hero.roofline(product),
        unit=product.rate_unit,
        shown={each.backend: each.step for each in hero.rungs(product)[-1].sides},
    )
