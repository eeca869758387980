"""Short names of kernels: what a report calls them, without namespaces, template arguments and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kernel_twins.compiler.disassembly import short_name as demangled

_UNNAMED = ("(anonymous namespace)::", "<unnamed>::")


def short_name(kernel: str) -> str:
    """``reduce_kernel`` of ``void at::native::reduce_kernel<512, 1, …>(T3)``; the name itself where nothing is left."""
    name = demangled(kernel)
    for unnamed in _UNNAMED:
        name = name.replace(unnamed, "")
    head = name.removeprefix("void ").partition("<")[0].partition("(")[0]
    return head.rpartition("::")[2].strip() or kernel


def numbered(kernels: Sequence[str]) -> list[str]:
    """The short name of each launch, in order; those that occur more than once are counted: ``reduce_kernel #2``."""
    names = [short_name(kernel) for kernel in kernels]
    several, seen = Counter(names), Counter[str]()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(f"{name} #{seen[name]}" if several[name] > 1 else name)
    return unique
