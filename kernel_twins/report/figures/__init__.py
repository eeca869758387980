"""The figures: each ladder's climb, speed against size and case by case, the roofline, the sampled cases.

Importing this needs matplotlib, which is installed for developers.
"""

from kernel_twins.report.figures.render import draw, drawn_from, outdated, strays

__all__ = ["draw", "drawn_from", "outdated", "strays"]
