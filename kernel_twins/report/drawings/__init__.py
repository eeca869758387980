"""The drawings of docs/, one small SVG an idea. They show where data are and how they move, and no measured number.

A drawing is a function under ``@drawn(title, height)``, in any module here; its name, with hyphens, is its file's.
"""

from __future__ import annotations

import importlib
import pkgutil

from kernel_twins.report.drawings.primitives import DRAWINGS as DRAWINGS

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
