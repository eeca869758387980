"""What a user would call instead of our kernels, where the specs of several operations need it in the same form."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def compiled(function: Callable[..., Tensor]) -> Callable[..., None]:
    """``call(*inputs, **options, out=tensor)`` of what torch.compile makes of a function; it writes ``out`` itself."""

    @functools.cache
    def build() -> Callable[..., None]:
        import torch

        def into(*inputs: Tensor, out: Tensor, **options: Any) -> None:
            out.copy_(function(*inputs, **options))

        return torch.compile(into, dynamic=False)

    def call(*inputs: Tensor, out: Tensor, **options: Any) -> None:
        import torch

        from kernel_twins import environment

        # By default it gives up after eight shapes, and runs the rest as it finds it.
        with torch._dynamo.config.patch(recompile_limit=256), environment.kept():
            build()(*inputs, out=out, **options)

    return call


@functools.cache
def liger(op: str, n: int) -> tuple[Any, dict[str, int]]:
    """Liger's module of kernels, and the settings that it launches them with for rows of n elements.

    UnavailableError where liger-kernel is not installed, or does not take such rows.
    """
    from kernel_twins._load import UnavailableError

    if n == 0:
        raise UnavailableError("liger-kernel takes no rows without elements")
    try:
        module = importlib.import_module(f"liger_kernel.ops.{op}")
        utils = importlib.import_module("liger_kernel.ops.utils")
    except ImportError as error:
        raise UnavailableError("liger-kernel is not installed: pip install liger-kernel") from error
    try:
        block_size, num_warps = utils.calculate_settings(n)
    except RuntimeError as error:
        raise UnavailableError(f"liger-kernel takes no rows of {n} elements") from error
    return module, {"BLOCK_SIZE": block_size, "num_warps": num_warps}
