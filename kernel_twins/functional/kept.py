"""What ``backend="auto"`` chose, kept by the signature of the call, and what an explanation hears of a choice.

A choice asks rules and tables in Python, which takes longer than a small kernel. cuda-kernels/torch/choices.cpp keeps
it by the arguments' dtypes, sizes, strides and alignment and by PyTorch's settings; a call under a transform or a mode
is chosen anew. Without the extension every call is.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ParamSpec

import torch

from kernel_twins.errors import UnavailableError
from kernel_twins.harness.load import extension

if TYPE_CHECKING:
    from kernel_twins.functional.expected import Problem

_Asked = ParamSpec("_Asked")


@dataclass
class Heard:
    """What a choice told of itself: why it left the call to PyTorch, or by which measured problem it went."""

    backend: str = ""
    reason: str = ""
    function: str = ""
    problem: Problem | None = None
    device: int = 0
    differentiated: bool = False


class Chosen(Exception):  # no error: it ends a call that is explained
    """Raised in place of a launch where a call is explained."""


NO_PLAIN = "operands are not all plain tensors on one GPU, of the dtypes that kernels take and of fitting shapes"
TRANSFORMED = "the call is inside torch.func's transforms or forward-mode derivatives"
EMPTY = "there are no elements"
COPIED = "rows would be copied to be contiguous, and PyTorch reads them in place"
CAST = "autocast casts operands, of which PyTorch keeps the parameters' casts"
WIDENED = "the result is wider than what is read, and PyTorch widens as it reads"
ABSENT = "what else it could take is not installed, has no kernel for this GPU, or may not be compiled in a capture"
ALWAYS = "such calls take it whatever was measured"

_hearing: dict[int, Heard] = {}  # by thread: other threads' calls go on


def left(reason: str) -> str:
    """PyTorch, to which a call is left, with the reason as an explanation words it."""
    if (hears := heard()) is not None:
        hears.reason = reason
    return "torch"


def heard() -> Heard | None:
    """What an explanation wants to be told; None for every other call."""
    if torch.compiler.is_compiling() or not _hearing:
        return None
    return _hearing.get(threading.get_ident())


def kept(choose: Callable[_Asked, str]) -> Callable[_Asked, str]:
    """A choice of a backend that is made once for each signature. Its arguments are positional."""

    @functools.wraps(choose)
    def anew(*given: _Asked.args, **named: _Asked.kwargs) -> str:
        backend = choose(*given, **named)
        if (hears := heard()) is not None:
            hears.backend = backend
            raise Chosen
        return backend

    built = _extension()
    if built is None:
        return anew
    keeping: Callable[_Asked, str] = built.kept(anew)
    torch.compiler.substitute_in_graph(keeping, skip_signature_check=True)(choose)  # what torch.compile traces instead
    return keeping


@contextlib.contextmanager
def explained() -> Iterator[Heard]:
    """Hears what the next choice tells, and ends the call that asks for it, with ``Chosen``."""
    thread, hears = threading.get_ident(), Heard()
    before = _hearing.get(thread)
    _hearing[thread] = hears
    built = _extension()
    anew = built is not None and built.ask_anew(True)
    try:
        with contextlib.suppress(Chosen):
            yield hears
    finally:
        if before is None:
            del _hearing[thread]
        else:
            _hearing[thread] = before
        if built is not None:
            built.ask_anew(anew)


def _extension() -> ModuleType | None:
    """The extension, if it is there and keeps choices."""
    try:
        built = extension()
    except UnavailableError:
        return None
    return built if hasattr(built, "kept") else None
