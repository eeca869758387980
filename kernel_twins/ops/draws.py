"""Random cases for the specs: of products, and of operations along rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kernel_twins.spec import ITEMSIZE, Case, Drawn
from kernel_twins.spec.chance import Draws

VOCABULARIES = (32_000, 32_768, 50_257, 50_304, 65_024, 102_400, 128_256, 151_936, 202_048, 256_000, 262_144)
"""Vocabulary sizes of language models."""

_TOKENS, _WIDEST = 16_384, 32_768
_LAYOUTS: tuple[dict[str, str], ...] = ({}, {"b": "col"}, {}, {"b": "col"}, {"a": "col"}, {"pitch": "8"})
_MOST_ROWS, _LONG, _LONGEST = 2**24, 2**17, 2**24


def product_sizes(draws: Draws) -> tuple[int, int, int]:
    """M, N and K. In half of the cases M is a number of tokens, and N and K are widths of layers or a vocabulary."""
    source = draws.deal("source", ("layer", "any", "layer", "any", "layer", "any", "vocabulary", "any"))
    if source == "any":
        m, n, k = (draws.size(16, _WIDEST) for _ in range(3))
        return m, n, k
    n = 64 * draws.number(1, _WIDEST // 64) if source == "layer" else draws.deal("vocabulary", VOCABULARIES)
    return draws.number(1, _TOKENS), n, 64 * draws.number(1, _WIDEST // 64)


def products_of(*dtypes: str) -> Callable[[Draws], Drawn]:
    """An op's ``draw`` for ``a @ b`` of operands of one of the dtypes."""

    def draw(draws: Draws) -> Drawn:
        dtype = draws.deal("dtype", dtypes) if len(dtypes) > 1 else dtypes[0]
        layout = draws.deal("layout", _LAYOUTS)
        return Drawn(Case.of(*product_sizes(draws), dtype=dtype, **layout))

    return draw


def long_rows(draws: Draws) -> tuple[int, int]:
    """A few rows of very many elements."""
    return draws.number(1, 64), draws.size(_LONG, _LONGEST)


def rows_of(
    layout: str, options: Sequence[Mapping[str, str]] = ({},), lengths: Sequence[int] = (), a_block_each: bool = True
) -> Callable[[Draws], Drawn]:
    """An op's ``draw`` over rows. One case in six has few and very long rows, two have one of ``lengths``.

    ``layout`` names the input whose layout varies, contiguous every second time; layouts and ``options`` take turns.
    Lengths are multiples of 64, 8 or 1, as the case's sizes are; the number of rows is any. ``a_block_each``: PyTorch
    gives each row one block of threads.
    """

    def draw(draws: Draws) -> Drawn:
        variant = {**draws.deal("options", options)}
        if found := draws.deal("layout", ("", "spaced", "", "pitched")):
            variant[layout] = found
        listed = "listed" if lengths else "any"
        kind = draws.deal("rows", ("any", listed, "any", listed, "any", "long"))
        if kind == "long":
            m, n = long_rows(draws)
        else:
            n = draws.deal("length", lengths) if kind == "listed" else draws.size(16, _LONG)
            m = draws.number(1, _MOST_ROWS)
        case = Case.of(m, n, dtype=draws.deal("dtype", tuple(ITEMSIZE)), **variant)
        return Drawn(case, m if a_block_each else None)

    return draw
