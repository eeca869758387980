"""Compiles one Triton kernel anew for a setting and a GPU; none is needed."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from kernel_twins.compiler import aot
from kernel_twins.report.sweeps.cells import Kernel, Setting
from kernel_twins.spec import Case, Op, Step

AMD = "gfx942"
_HIP_SHARED = 65536  # bytes that a block of the MI300 can have
_WARPS = re.compile(r'"ttg\.num-warps" = (\d+)')
_SPACED = re.compile(r"/\S+/")


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Within, nothing comes from Triton's cache, whose line numbers may be those of an older file."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        yield


def launched(op: Op, step: Step, case: Case) -> Any:
    """The step's own kernel, as the launcher compiles it for the case: the first where it launches it several times."""
    own = f"{op.name}_{step.name}_kernel"
    return next(kernel for kernel in aot.compiled(op, step, case) if kernel.name == own)


def for_setting(kernel: Any, setting: Setting) -> Any:
    """A kernel of ``launched`` compiled otherwise; the kernel itself where the setting changes nothing."""
    if setting == Setting():
        return kernel
    return compile_source(changed(kernel.src, setting), {**options(kernel), **setting.options})


def options(kernel: Any) -> dict[str, int]:
    """What it was compiled with; its metadata count the warps that warp specialization added."""
    (warps,) = _WARPS.findall(kernel.asm["ttgir"])
    return {"num_warps": int(warps), "num_stages": kernel.metadata.num_stages}


def compile_source(source: Any, options: Mapping[str, object]) -> Any:
    """A Triton source for the reference GPU's architecture."""
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(source, target=GPUTarget("cuda", aot.REFERENCE_ARCH, 32), options=dict(options))


def changed(source: Any, setting: Setting) -> Any:
    """A copy of a source with the setting's constants and types, knowing less of its loose arguments."""
    made = copy.copy(source)
    names = made.fn.arg_names
    made.signature = {**made.signature, **setting.types}
    gone = {(names.index(name),) for name in (*setting.types, *setting.loose)}
    made.constants = {key: value for key, value in made.constants.items() if key not in gone}
    made.constants |= {(names.index(name),): value for name, value in setting.constants.items()}
    kept = {(names.index(name),) for name, kind in setting.types.items() if kind.startswith("*")} - {
        (names.index(name),) for name in setting.loose
    }
    made.attrs = {key: value for key, value in made.attrs.items() if key not in gone or key in kept}
    return made


def amdgcn(kernel: Any) -> tuple[str, str]:
    """The kernel's code for AMD's MI300, and why there is none that it can run: one of both is empty."""
    import triton
    from triton.backends.compiler import GPUTarget

    with _stderr() as said:
        try:
            made = triton.compile(kernel.src, target=GPUTarget("hip", AMD, 64), options=options(kernel))
        except Exception as error:  # each of the compiler's layers has its own kinds
            told = next((line for line in said() if "error:" in line), str(error).strip().splitlines()[0])
            return "", _SPACED.sub("", told.strip())
    if made.metadata.shared > _HIP_SHARED:
        return "", f"needs {made.metadata.shared} bytes of shared memory, of which a block has {_HIP_SHARED}"
    return made.asm["amdgcn"], ""


@contextlib.contextmanager
def _stderr() -> Iterator[Any]:
    """Catches what compilers write to the process's stderr; yields a function that returns its lines."""
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)

        def said() -> list[str]:
            file.seek(0)
            return file.read().splitlines()

        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def assemble(ptx: str, ptxas: Path) -> bytes:
    """The cubin of PTX, with line tables."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        subprocess.run(
            [str(ptxas), "-lineinfo", "--gpu-name=sm_90a", str(source), "-o", str(target)],
            check=True,
            capture_output=True,
        )
        return target.read_bytes()


def of_kernel(kernel: Kernel, setting: Setting = Setting()) -> Any:  # noqa: B008
    return for_setting(launched(kernel.op, kernel.step, kernel.case), setting)
