"""A public function, as its family's package declares it; see report/calls/functions.py.

Nothing here needs torch: what does, the calls that are timed, lies beside the declaration in ``contest.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kernel_twins import ops
from kernel_twins.spec import Case

if TYPE_CHECKING:
    from kernel_twins.functional.contests import Contest
    from kernel_twins.functional.sampled import Calls

Pass = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """What a public function stands on, and what it is timed on.

    ``ops`` are the operations whose steps its calls run, those in ``Op.behind``; the first one's chapter gives the
    function its place among the others. ``drawn`` are the operations that its sampled cases are of, in turn, and
    ``fixed`` the options of these that it has no choice of; ``passes`` are timed there. ``chooses`` tells that "auto"
    looks up the fastest backend in the timings of ``drawn``.
    """

    name: str
    ops: tuple[str, ...]
    drawn: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=dict, hash=False)
    passes: tuple[Pass, ...] = ("forward", "backward")
    chooses: bool = False

    @property
    def family(self) -> str:
        return ops.get(self.ops[0]).family

    def calls(self, case: Case) -> Calls:
        """The function at a case of one of ``drawn``."""
        calls: Calls = self._calls_module().CALLS[self.name](case)
        return calls

    def contests(self) -> Iterator[Contest]:
        """What is timed of it at cases that we chose."""
        yield from self._calls_module().CONTESTS.get(self.name, tuple)()

    def _calls_module(self) -> Any:
        return importlib.import_module(f"kernel_twins.functional.{self.family}.contest")
