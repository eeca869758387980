"""Documents in part by hand: what stands between markers is rendered, everything around it is left alone.

A part is ``<!-- name:begin -->``, the lines, ``<!-- name:end -->``, each marker at the end of its line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

_MARKED = re.compile(r"(<!-- ([\w:]+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def names(text: str) -> Counter[str]:
    """How often each part is marked."""
    return Counter(match[2] for match in _MARKED.finditer(text))


def renew(text: str, parts: Mapping[str, Sequence[str]]) -> str:
    """``text`` with the lines of the given parts in place of the old ones; other parts stay as they are."""
    return _MARKED.sub(
        lambda match: match[1] + "\n".join(parts[match[2]]) + "\n" + match[3] if match[2] in parts else match[0], text
    )
