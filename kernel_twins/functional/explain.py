"""``kernel_twins.explain``: what ``backend="auto"`` takes for a call, and by which measured times."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_twins.functional.backends import autocast_dtype, measured_gpu, step_behind
from kernel_twins.functional.expected import BACKENDS, estimate, host_times
from kernel_twins.functional.function import Function
from kernel_twins.functional.kept import ABSENT, ALWAYS, Heard, explained
from kernel_twins.harness.load import extension
from kernel_twins.spec import Backend

_FUNCTIONS = __package__ + "."
_CHOOSING = {"matmul": ("v19_fitted_tiles",), "linear": ("v03_fitted_tiles",)}  # steps that choose a tile by a model


@dataclass(frozen=True, slots=True)
class Explanation:
    """What "auto" takes for a call: the backend, and the step of its ladder, which is empty for PyTorch.

    ``configuration`` is the tile, and the split of K, that CUDA takes for one product in half precision on a GPU of
    9.0; it is empty for others.
    ``reason`` says why the backend is taken whatever the call takes, or is empty. ``gpu_us`` and ``host_us`` are the
    expected microseconds of each backend that was considered, on the GPU and on the host: with the backward pass, if a
    gradient is wanted. They are interpolated between the ``nearest`` cases (slug, distance in logarithms of sizes) of
    the committed measurements of ``measured_on``. All three are empty where nothing was measured.
    """

    function: str
    backend: str
    step: str
    configuration: str
    reason: str
    gpu_us: Mapping[str, float]
    host_us: Mapping[str, float]
    nearest: tuple[tuple[str, float], ...]
    measured_on: str

    @property
    def expected_us(self) -> float | None:
        """What the call is expected to take: the GPU or, where that takes longer, the host. None if unknown."""
        known = [us[self.backend] for us in (self.gpu_us, self.host_us) if self.backend in us]
        return max(known, default=None)

    def __str__(self) -> str:
        taken = "PyTorch" if self.backend == "torch" else f"{self.backend} {self.step}"
        lines = [f"{self.function}: {taken}"]
        if self.configuration:
            lines.append(f"  with {self.configuration}")
        if self.reason:
            lines.append(f"  because {self.reason}")
        elif not self.gpu_us:
            lines.append("  because nothing was measured that is like it")
        for name, times in (("GPU", self.gpu_us), ("host", self.host_us)):
            if times:
                told = (f"{backend} {us:.3g} µs" for backend, us in sorted(times.items(), key=lambda item: item[1]))
                lines.append(f"  expected on the {name}: {', '.join(told)}")
        if self.nearest:
            cases = ", ".join(f"{slug} ({distance:.2f})" for slug, distance in self.nearest)
            lines.append(f"  from cases on {self.measured_on}, with their distances: {cases}")
        return "\n".join(lines)


def explain(function: Callable[..., Any], *given: Any, **named: Any) -> Explanation:
    """What ``backend="auto"`` takes for ``function(*given, **named)``, and why; nothing is launched.

    ``function`` is a public function, such as ``kernel_twins.softmax``, and ``given`` and ``named`` are its arguments
    without ``backend``. The choice is made as for a call here: grad mode, autocast, transforms and a capture count.

    TypeError if it is another function; ValueError for a ``backend``; and what the function raises before it chooses.
    """
    declared = _declared(function)
    if declared is None:
        raise TypeError(
            f"function is {function!r}, must be a public function that has a backend, such as kernel_twins.matmul: "
            f"pass the function itself, and its arguments behind it"
        )
    arguments = inspect.signature(function).bind(*given, **named).arguments
    backend = arguments.get("backend", "auto")
    if backend != "auto":
        raise ValueError(f"backend is {backend!r}, must be left out: it is what 'auto' takes that is explained")
    with explained() as heard:
        function(*given, **named)
    name = declared.name
    step = "" if heard.backend == "torch" else _step(declared, heard)
    configuration = _configuration(name, step, arguments) if heard.backend == "cuda" else ""
    if heard.problem is None:
        reason = heard.reason or (ABSENT if heard.backend == "torch" else ALWAYS)
        return Explanation(name, heard.backend, step, configuration, reason, {}, {}, (), "")
    gpu = measured_gpu(heard.device)
    told = estimate(gpu, heard.function, heard.problem, heard.differentiated)
    passes = 1 + heard.differentiated
    host = host_times(gpu, heard.function, heard.problem.itemsize) if told.us else {}
    return Explanation(
        name,
        heard.backend,
        step,
        configuration,
        heard.reason,
        told.us,
        {backend: passes * host[backend] for backend in BACKENDS if backend in host},
        told.nearest,
        gpu if told.us else "",
    )


def _declared(function: Callable[..., Any]) -> Function | None:
    """What is declared of a public function; None if it is none, or is wrapped, as by torch.compile."""
    name, place = getattr(function, "__name__", ""), getattr(function, "__module__", "") or ""
    if not place.startswith(_FUNCTIONS) or getattr(importlib.import_module(place), name, None) is not function:
        return None
    family = importlib.import_module(_FUNCTIONS + place.removeprefix(_FUNCTIONS).partition(".")[0])
    return next((each for each in getattr(family, "FUNCTIONS", ()) if each.name == name), None)


def _step(declared: Function, heard: Heard) -> str:
    """The step that a backend runs for the call."""
    wide = declared.name == "matmul" and heard.problem is not None and heard.problem.itemsize == 4
    backend: Backend = "cuda" if heard.backend == "cuda" else "triton"
    op = "matmul_fp32" if wide else declared.ops[0]
    step = step_behind(op, backend, torch.cuda.get_device_capability(heard.device))
    return step.name if step else ""


def _configuration(function: str, step: str, arguments: Mapping[str, Any]) -> str:
    """The kernel's tile, as the operators would launch it here; empty where it is none of the steps that choose one."""
    if step not in _CHOOSING.get(function, ()):
        return ""
    x, weight = list(arguments.values())[:2]
    if not x.is_cuda or weight.dim() != 2 or x.dim() == 0:
        return ""
    dtype = autocast_dtype(x) if arguments.get("autocast", True) else None
    rows = _as_cast(x, dtype)
    try:
        rows = rows.view(math.prod(x.shape[:-1]), x.shape[-1])
    except RuntimeError:  # the operators copy it
        rows = torch.empty(math.prod(x.shape[:-1]), x.shape[-1], dtype=rows.dtype, device=x.device)
    columns = _as_cast(weight, dtype)
    wide = arguments.get("out_dtype") == torch.float32
    told: str = extension().product_configuration(
        rows, columns.t() if function == "linear" else columns, along_k=function == "linear", fp32_out=wide
    )
    return told


def _as_cast(operand: Tensor, dtype: torch.dtype | None) -> Tensor:
    """An operand, or a tensor like the one that autocast would make of it."""
    operand = operand.detach()
    return operand if dtype in (None, operand.dtype) else torch.empty_like(operand, dtype=dtype)
