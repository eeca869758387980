"""Which steps can be called here, and ``load`` as users call it, which says so at once.

What public functions run is in ``kernel_twins._C``, which a wheel has. The other steps, and the baselines that are
compiled beside them, are in ``kernel_twins._ladder``: a clone builds both by one command. Importing that one adds its
steps to those of the first, which does so by itself when a first such step is launched.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from kernel_twins import ops, remedies
from kernel_twins.compiler import interpreter
from kernel_twins.errors import UnavailableError
from kernel_twins.harness import load as harness
from kernel_twins.harness.load import Call, extension
from kernel_twins.spec import Backend


def load(op: str, step: str, backend: Backend) -> Call:
    """Return ``call(*inputs, **options, out=tensor)`` for one step of an operation, or with a tuple of several tensors.

    The call checks its arguments (TypeError or ValueError names the one at fault), writes into ``out`` on the
    current stream and returns nothing. Shapes and dtypes are the op's, see ``kernel_twins.ops``. ValueError when
    there is no such op, step or backend; UnavailableError when the backend cannot be used on this machine, or the step
    is not built.
    """
    if backend == "cuda" and backend in ops.get(op).step(step).backends:
        require_built(op, step)
    call = harness.load(op, step, backend)
    if backend == "triton" and interpreter.is_interpreted():
        return interpreter.guarded(ops.get(op), ops.get(op).step(step), call)
    return call


@functools.cache
def require_built(op: str, step: str) -> None:
    """UnavailableError where a CUDA step, or a baseline that is compiled beside the steps, is in neither extension."""
    built = extension()
    if built.has(op, step):
        return
    missing, remedy = f"the CUDA side of {op} {step} is missing", f"run {remedies.told(remedies.BUILD)}"
    try:
        ladder()
    except UnavailableError as error:
        raise UnavailableError(f"{missing}, {error}: {remedy}") from error
    if not built.has(op, step):
        raise UnavailableError(f"{missing}, it was left out of this build: {remedy}")


def ladder() -> ModuleType:
    """The extension of the steps that no public function runs; UnavailableError says why it is not there."""
    try:
        return importlib.import_module("kernel_twins._ladder")
    except ModuleNotFoundError as error:
        raise UnavailableError("kernel_twins._ladder is not built, and no wheel has it") from error
    except ImportError as error:
        raise UnavailableError(f"kernel_twins._ladder does not import ({error})") from error
