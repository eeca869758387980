"""The commands that messages tell, as far as they help where they are read.

A wheel has none of the clone's files, and a build without a CUDA build of torch only says that it lacks one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

BUILD = "python setup.py build_ext"
INSTALL = "pip install -r requirements.txt"

_ROOT = Path(__file__).resolve().parents[1]


def is_clone() -> bool:
    """Whether the package lies in a clone, and not in a wheel."""
    return (_ROOT / "setup.py").is_file()


def told(command: str) -> str:
    """A command that needs the clone's files, as a message quotes it."""
    return f"`{command}`" if is_clone() else f"`{command}` in a clone of kernel-twins"


def torch() -> str:
    """What brings a torch that the extension can be built for; empty where it is there.

    pip takes a build without CUDA for the version that requirements.txt names, so that it has to go first.
    """
    if importlib.util.find_spec("torch") is None:
        return INSTALL
    again = f"pip uninstall -y torch && {INSTALL}"
    try:
        import torch
    except ImportError:
        return again
    return again if torch.version.cuda is None else ""


def build(variables: str = "") -> str:
    """What brings the CUDA side, a CUDA build of torch first where there is none."""
    return " && ".join(filter(None, [torch(), f"{variables} {BUILD}".strip()]))
