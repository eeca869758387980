"""A public function, as its family's package declares it; see report/calls/functions.py.

Nothing here needs torch. The timed calls, which do, are in ``contest.py`` beside the declaration.
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
    """The operations behind a public function, and the cases on which it is timed.

    ``ops`` are the operations whose steps (``Op.behind``) its calls run; the first one's chapter orders the functions.
    ``drawn`` are the operations that give its sampled cases, in turn. ``fixed`` are their options that the function
    does not offer, and ``passes`` the passes timed there. If it ``expects``, "auto" takes the backend that is expected
    to be the fastest from the times of ``drawn`` and their gradients at chosen cases and its own at sampled ones. These
    stand under the name that ``expects`` is, which functions of the same kernels share.
    """

    name: str
    ops: tuple[str, ...]
    drawn: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=dict, hash=False)
    passes: tuple[Pass, ...] = ("forward", "backward")
    expects: str = ""

    @property
    def family(self) -> str:
        return ops.get(self.ops[0]).family

    def calls(self, case: Case) -> Calls:
        """The function at a case of one of ``drawn``."""
        calls: Calls = self._calls_module().CALLS[self.name](case)
        return calls

    def contests(self) -> Iterator[Contest]:
        """Its contests at chosen cases."""
        yield from self._calls_module().CONTESTS.get(self.name, tuple)()

    def _calls_module(self) -> Any:
        return importlib.import_module(f"kernel_twins.functional.{self.family}.contest")
