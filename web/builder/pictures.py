"""Drawings and plots inside a page, in colours that follow the theme.

The committed pictures are dark on a white card. Each of their colours becomes the CSS variable of its part, which
pictures.css gives a value for light and for dark.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from markupsafe import Markup

_PREAMBLE = re.compile(r"\A.*?(?=<svg)|<metadata>.*?</metadata>\s*|<title>.*?</title>\s*", re.DOTALL)
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_ID = re.compile(r'\s+id="([^"]*)"')
_USED = re.compile(r'(?:url\(#|href="#)([^)"]+)')
_SIZE = re.compile(r'(<svg[^>]*?) width="([\d.]+)(pt)?" height="[\d.]+(?:pt)?"')
_UNTIDY = re.compile(r"\s*\n\s*")

# By the part that a colour plays in drawings/primitives.py and in figures/style.py.
PARTS = {
    "ink": ("#1a1a1a", "#1f2328"),
    "faint": ("#555555", "#59636e", "#6c737b"),
    "card": ("#ffffff",),
    "border": ("#d0d0d0", "#d0d7de"),
    "grid": ("#e4e7eb",),
    "shade": ("#f6f8fa",),
    "idle": ("#f0f0f0",),
    "idle-edge": ("#9a9a9a", "#8c959f"),
    "device": ("#cfe2f3",),
    "device-edge": ("#3d6fa5",),
    "l2": ("#cdeae2",),
    "l2-edge": ("#2b7d6c",),
    "shared": ("#fde0bd",),
    "shared-edge": ("#b96a0f",),
    "registers": ("#d9efcb",),
    "registers-edge": ("#4c8c00",),
    "tensor": ("#e3d7f6",),
    "tensor-edge": ("#7a4fbf",),
    "alarm": ("#b3261e",),
    "cuda": ("#009e73", "#00815e"),
    "triton": ("#0072b2",),
    "torch": ("#d55e00", "#c05500"),
    "compile": ("#e69f00", "#996900"),
    "liger": ("#56b4e9", "#39779b"),
    "quack": ("#cc79a7", "#9e5e81"),
    "library": ("#4d4d4d",),
    "flash4": ("#882255",),
}
_VARIABLES = {colour: f"var(--p-{part})" for part, colours in PARTS.items() for colour in colours}


def figure(path: Path, told: str) -> Markup:
    """A picture of the repository on one line, with ``told`` for those who cannot see it."""
    return Markup(
        '<figure class="picture"><div class="wide" tabindex="0" role="group" aria-label="{told}">{svg}</div></figure>'
    ).format(told=told, svg=svg(path, told))


@functools.cache
def svg(path: Path, told: str) -> Markup:
    """A picture as an element. Names inside of it are those that it refers to, and begin with the picture's own."""
    text = _PREAMBLE.sub("", path.read_text())
    used = set(_USED.findall(text))
    text = _ID.sub(lambda found: f' id="{path.stem}-{found[1]}"' if found[1] in used else "", text)
    text = _USED.sub(lambda found: found[0][: -len(found[1])] + f"{path.stem}-{found[1]}", text)
    text = _COLOUR.sub(lambda found: _VARIABLES.get(found[0], found[0]), text)
    text = _SIZE.sub(
        lambda found: f'{found[1]} style="width: {float(found[2]) * (4 / 3 if found[3] else 1):g}px"', text
    )
    label = Markup(' role="img" aria-label="{}">').format(told)
    return Markup(_UNTIDY.sub(" ", text.replace(">", str(label), 1)).strip())
