"""Which calls of the public functions are timed at cases that we chose, told where there is no GPU.

The families declare them with their operands, which are made here as tensors without data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import torch
import torch._inductor  # which annotates with the class of generators, and so must find the real one
from torch.overrides import TorchFunctionMode

from kernel_twins.report.calls.functions import contests


def declared() -> list[tuple[str, str, str, str]]:
    """Kind, function, case and backend of every call, in their order."""
    with mock.patch.object(torch, "Generator", _Anywhere), _WithoutData():
        return [(each.kind, each.function, each.case.slug, backend) for each in contests() for backend in each.calls]


class _Anywhere(torch.Generator):
    """A source of random numbers that needs no device, since nothing is drawn from it."""

    def __new__(cls, device: object = None) -> _Anywhere:
        return super().__new__(cls)


class _WithoutData(TorchFunctionMode):
    """Tensors are made with a shape and a dtype alone, whatever device is asked for."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        return function(*args, **(given | {"device": "meta"} if "device" in given else given))
