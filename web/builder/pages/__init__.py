"""The pages. Each module writes its own through a ``Site``, and is named here once."""

from __future__ import annotations

from collections.abc import Callable

from builder.pages import ladders, runs, scoreboard
from builder.pages import compare, ladders, scoreboard
from builder.pages import ladders, scoreboard, sources
from builder.pages import docs, glossary, ladders, log, method, scoreboard, search, survey
from builder.pages import front, interview, ladders, scoreboard
from builder.site import Site

# By the name that ``build.py --only`` takes.
PAGES: dict[str, Callable[[Site], None]] = {
    "front": front.write,
    "ladders": ladders.write,
    "scoreboard": scoreboard.write,
    "runs": runs.write,
    "compare": compare.write,
    "sources": sources.write,
    "survey": survey.write,
    "glossary": glossary.write,
    "docs": docs.write,
    "log": log.write,
    "method": method.write,
    "search": search.write,  # reads the others, and so comes last
    "interview": interview.write,
}
