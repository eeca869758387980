#!/usr/bin/env python3
"""Measure both sets of kernels and write them up.

With an NVIDIA GPU: check, time and profile every step of every ladder, then render KERNEL_LOG.md, README's tables,
the tables in docs/ and the plots. Without one: render them from the committed measurements of the reference GPU, and
say so.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# NVIDIA's reader is a module called ncu_report too; with our folder on the path, importing it would find this file.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
sys.path.insert(0, str(_HERE.parent))

from kernel_twins.report.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__ or ""))
