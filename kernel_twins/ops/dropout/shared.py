"""Options, their checks, and masks for the specs of dropout_add and its backward pass.

Element i of a matrix, counted row by row, is kept if its word (see philox.py) is at least ``threshold(p)``. Strides and
launches do not change the mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kernel_twins.spec import Case

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")  # those of kernel_twins.ops.activations

P = 0.5
"""The default probability of dropping an element."""

_LARGE = {"seed": 0xFEDCBA9876543210, "offset": 0x8000000100000004}  # all 64 bits count
_CHUNK = 2**24  # elements whose words are held at a time


def options(case: Case) -> dict[str, Any]:
    """``p`` in the variant is in percent; ``act`` names the activation; ``seed.large`` has 64 bits."""
    large = case.get("seed") == "large"
    return {
        "p": int(case.get("p", "50")) / 100,
        "activation": case.get("act", "none"),
        "seed": _LARGE["seed"] if large else 0,
        "offset": _LARGE["offset"] if large else 0,
    }


def operands(inputs: Iterable[Tensor | None]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, residual and bias, or dout, x and bias: None for what is not there."""
    first, second, third, *_ = *inputs, None, None
    assert first is not None
    return first, second, third


def settled(case: Case) -> Case:
    """The same case with p = 0, which keeps all elements: baselines with other generators are judged there."""
    return case.but(p="0")


def threshold(p: float) -> int:
    """The smallest word that keeps its element; with p = 1, larger than any word."""
    return int(p * 2**32)


def scale(p: float) -> float:
    """The factor on a kept element, 1 / (1 - p)."""
    return 1 / (1 - p) if p < 1 else 0.0


def kept(shape: tuple[int, ...], part: slice, device: torch.device, *, p: float, seed: int, offset: int) -> Tensor:
    """Which elements of those rows of a matrix are kept, [rows, N]."""
    return _kept(shape, device, threshold(p), seed, offset)[part]


@functools.lru_cache(maxsize=1)  # the checks of one call read rows of one mask
def _kept(shape: tuple[int, ...], device: torch.device, least: int, seed: int, offset: int) -> Tensor:
    import torch

    from kernel_twins.ops.dropout import philox

    mask = torch.empty(math.prod(shape), dtype=torch.bool, device=device)
    for first in range(0, len(mask), _CHUNK):
        last = min(first + _CHUNK, len(mask))
        mask[first:last] = philox.words(seed, offset, first, last, device) >= least
    return mask.view(shape)


def bias(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """The bias, if the case has one. It shares x's alignment, and none of its special values."""
    from kernel_twins.ops.tensors import normal

    return (normal(case.but(values=""), case.shape[1:], generator),) if case.get("bias") == "yes" else ()


def check_options(p: float, activation: str, seed: int, offset: int) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p}, must be from 0 to 1: the share of elements that are dropped")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is '{activation}', must be none, relu, gelu, gelu_tanh or silu: apply others before"
        )
    for name, value in (("seed", seed), ("offset", offset)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name} is {value}, must be from 0 to 2**64 - 1")
    if offset % 4:
        raise ValueError(f"offset is {offset}, must be a multiple of 4: it counts words, of which a call makes four")
