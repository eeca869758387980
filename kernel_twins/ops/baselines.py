"""Baselines that the specs of several operations share: torch.compile, PyTorch's operators, Liger and quack."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kernel_twins.errors import UnavailableError

if TYPE_CHECKING:
    from torch import Tensor


def compiled(function: Callable[..., Tensor]) -> Callable[..., None]:
    """``call(*inputs, **options, out=tensor)`` of a function that torch.compile compiles; it writes ``out`` itself."""

    def into(*inputs: Tensor, out: Tensor, **options: Any) -> None:
        out.copy_(function(*inputs, **options))

    return _compiled(into)


def compiled_results(function: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    """The same, but it returns tensors that torch.compile allocates, and does not write ``out``.

    That is for functions with several results, and for those that end in a library's kernel, whose result would be
    copied into ``out``. ``mode`` is torch.compile's; the output of its search is silenced.
    """
    return returned(_compiled(function, mode))


def returned(function: Callable[..., Any]) -> Callable[..., Any]:
    """``call(*inputs, **options, out=tensor)`` that returns a function's result, and does not write ``out``."""
    return lambda *inputs, out, **options: function(*inputs, **options)


_QUIET = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}


def _compiled(function: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    @functools.cache
    def build() -> Callable[..., Any]:
        import torch

        # A mode stands for these options; torch.compile does not take a mode and options together.
        options = torch._inductor.list_mode_options(mode, dynamic=False)
        return torch.compile(function, dynamic=False, options={**options, **_QUIET})

    def call(*inputs: Tensor, **arguments: Any) -> Any:
        import torch

        # By default torch.compile stops after eight shapes, and runs the rest uncompiled.
        with torch._dynamo.config.patch(recompile_limit=256), environment_kept():
            return build()(*inputs, **arguments)

    return call


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Restore Triton's environment variables after the code within.

    torch.compile sets TRITON_PTXAS_PATH to PyTorch's ptxas and leaves it set. From then on this process and its
    children would assemble Triton kernels with another compiler than before. torch.compile sets the variable only once,
    so its memory of that is cleared, too.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("TRITON_") and name not in before]:
            del os.environ[name]
        os.environ.update(before)
        if (tasks := sys.modules.get("torch._inductor.runtime.compile_tasks")) is not None:
            tasks._set_triton_ptxas_path.cache_clear()


def aten(name: str, x: Tensor, *arguments: Any) -> tuple[Any, ...]:
    """The results of PyTorch's own operator of that name, whose first argument is x.

    On a CPU, and for tensors without elements, it is PyTorch's decomposition of the operator, in fp32: a CPU lacks some
    operators or keeps statistics in half precision, and a kernel's mean of no elements is 0.
    """
    import torch
    from torch._decomp import decomposition_table

    operator = getattr(torch.ops.aten, name).default
    results: tuple[Any, ...]
    if x.is_cuda and x.numel() > 0:
        results = operator(x, *arguments)
    else:
        wide = (each.float() if isinstance(each, torch.Tensor) else each for each in (x, *arguments))
        results = decomposition_table[operator](*wide)
    return results


@functools.cache
def liger(op: str, n: int) -> tuple[Any, dict[str, int]]:
    """Liger's module of kernels, and its launch settings for rows of n elements.

    UnavailableError where liger-kernel is not installed, or does not take such rows.
    """
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


def imported(module: str) -> Any:
    """A library's module, whose import leaves the process as it was.

    CuTe DSL, in which quack and FlashAttention-4 are written, sets ``sys.excepthook`` and a filter of warnings for
    everybody. Calls that are timed come here, too, when it has long been imported.
    """
    if module in sys.modules:
        return importlib.import_module(module)
    hook = sys.excepthook
    try:
        with warnings.catch_warnings():
            return importlib.import_module(module)
    finally:
        sys.excepthook = hook


_CLUSTER_BYTES = 16 * 227 * 1024  # the shared memory of Hopper's largest cluster


def quack(module: str, *given: Tensor | None) -> Any:
    """quack's module of that name, if it can take these tensors; None among them is left out.

    UnavailableError if quack-kernels is not installed, if a tensor is empty or not contiguous, if a row does not start
    at a multiple of 16 bytes, or if no cluster holds a row of all tensors: quack does not check that, and its launch
    fails.
    """
    tensors = [tensor for tensor in given if tensor is not None]
    for tensor in tensors:
        if tensor.numel() == 0:
            raise UnavailableError("quack-kernels leaves results without elements alone")
        if not tensor.is_contiguous() or tensor.data_ptr() % 16 or tensor.shape[-1] * tensor.element_size() % 16:
            raise UnavailableError("quack-kernels takes contiguous rows of whole multiples of 16 bytes")
    if sum(tensor.shape[-1] * tensor.element_size() for tensor in tensors) > _CLUSTER_BYTES:
        raise UnavailableError(f"quack-kernels takes rows of up to {_CLUSTER_BYTES} bytes")
    try:
        return imported(f"quack.{module}")
    except ImportError as error:
        raise UnavailableError("quack-kernels is not installed: pip install quack-kernels") from error
