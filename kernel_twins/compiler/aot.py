"""Compiles a Triton step without a GPU, for a case and an architecture.

The launcher runs unchanged, on tensors without memory, so the compiler gets the same information as in a launch
(divisibility, constants, the descriptors' tiles). Only the launch itself is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from kernel_twins.errors import UnavailableError
from kernel_twins.harness.ceilings import REFERENCE_GPU
from kernel_twins.spec import Case, Op, Step

REFERENCE_ARCH = 90


def configs(op: Op, step: Step) -> list[Any]:
    """The ``triton.Config`` list of an autotuned step's search; ``[None]`` for every other step.

    A step that only sends calls on has no kernel of its own, and nothing to search.
    """
    kernel = getattr(_module(op, step), f"{op.name}_{step.name}_kernel", None)
    return list(getattr(kernel, "configs", [None]))


def compiled(op: Op, step: Step, case: Case, arch: int = REFERENCE_ARCH, config: Any = None) -> list[Any]:
    """The kernels that one call launches, each once, as Triton's ``CompiledKernel``.

    ``asm`` holds their ttir, ttgir, llir, ptx and cubin, ``metadata`` their shared bytes and warps. ``arch`` is 80 or
    90. An autotuned step is compiled for ``config``, or for the first of the list where a case has another list than
    ``configs``. Without ``config`` it is compiled for the reference GPU's committed winner at the nearest problem, or
    for the first of the list if there is none or for another architecture.
    UnavailableError without torch or Triton, and in the interpreter.
    """
    launch = getattr(_module(op, step), f"{op.name}_{step.name}")
    import torch
    import triton
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kernel_twins.ops.tensors import OUT_DTYPE

    tuning = importlib.import_module("kernel_twins._triton.lib.tuning")

    with FakeTensorMode():  # no memory is allocated, at any size
        inputs = op.inputs(case, torch.Generator())
    inputs = tuple(torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") for x in inputs)
    outs = tuple(torch.empty(each.shape, dtype=OUT_DTYPE[each.dtype], device="meta") for each in op.outputs(case))

    def choose(kernel: Any, name: str, problem: Case, device: Any) -> tuple[Any, dict[str, int]]:
        winner = tuning.nearest(name, problem, REFERENCE_GPU) if config is None and arch == REFERENCE_ARCH else None
        listed = config is not None and config in kernel.configs
        return kernel.fn, winner or (config if listed else kernel.configs[0]).all_kwargs()

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(arch)),
        mock.patch.object(tuning, "choose", choose),
        noted(compile_only=True) as kernels,
    ):
        launch(*inputs, **op.options(case), out=outs[0] if len(outs) == 1 else outs)
    return list(kernels.values())


@contextlib.contextmanager
def noted(*, compile_only: bool = False) -> Iterator[dict[str, Any]]:
    """Records the kernels that are launched or only compiled within: Triton's ``CompiledKernel`` by hash, each once.

    A launcher with a launch cache is recorded only at its first call. Kernels that are only compiled here never enter a
    launch cache.
    """
    from triton.runtime.jit import JITFunction

    kernels: dict[str, Any] = {}
    run = JITFunction.run

    def note(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=warmup or compile_only, **kwargs)
        kernels[kernel.hash] = kernel
        return None if compile_only else kernel

    with mock.patch.object(JITFunction, "run", note):
        yield kernels


@contextlib.contextmanager
def cubin(kernel: Any) -> Iterator[Path]:
    """A compiled kernel's binary as a file, for tools that read files."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        yield file


class _Driver:
    """Stands in for a GPU of that architecture while compiling."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # Triton caches kernels by device, so each architecture is a device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def _module(op: Op, step: Step) -> Any:
    try:
        import torch  # noqa: F401
        import triton
    except ImportError as error:
        raise UnavailableError(f"a Triton step cannot be compiled: pip install {error.name}") from error
    if triton.knobs.runtime.interpret:
        raise UnavailableError("a Triton step is not compiled in the interpreter: unset TRITON_INTERPRET")
    return importlib.import_module(op.module(step.name))
