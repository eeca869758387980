"""The pages. Each module writes its own through a ``Site``, and is named here once."""

from __future__ import annotations

from collections.abc import Callable

from builder.pages import (
    compare,
    compiler,
    docs,
    front,
    glossary,
    interview,
    ladders,
    log,
    method,
    runs,
    scoreboard,
    search,
    sources,
    survey,
)
from builder.site import Site

# By the name that ``build.py --only`` takes.
PAGES: dict[str, Callable[[Site], None]] = {
    "front": front.write,
    "ladders": ladders.write,
    "sources": sources.write,
    "scoreboard": scoreboard.write,
    "compare": compare.write,
    "compiler": compiler.write,
    "survey": survey.write,
    "method": method.write,
    "interview": interview.write,
    "glossary": glossary.write,
    "docs": docs.write,
    "log": log.write,
    "runs": runs.write,
    "search": search.write,  # reads the others, and so comes last
}
