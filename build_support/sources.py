"""The CUDA sources, and nvcc's flags and architectures for them."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from build_support.toolkit import BuildError

ROOT = Path(__file__).resolve().parent.parent
GENERATED = Path("build/generated")
STEP_TABLE = GENERATED / "step_table.cpp"
MODULE = GENERATED / "module.cpp"
LADDER = GENERATED / "ladder.cpp"
EXTENSION = Path("cuda-kernels/torch/extension.cpp")
CHOICES = Path("cuda-kernels/torch/choices.cpp")
PROBES = Path("hardware-survey/probes.cu")
INCLUDE_DIRS = (Path("cuda-kernels"), Path("hardware-survey"))

DEFAULT_ARCH = "9.0a"
OLDEST_ARCH = (8, 0)
NAMED_ARCHS = {
    "All": "8.0;8.6;8.9;9.0;10.0;12.0+PTX",
    "Kepler+Tesla": "3.7",
    "Kepler": "3.5+PTX",
    "Maxwell+Tegra": "5.3",
    "Maxwell": "5.0;5.2+PTX",
    "Pascal": "6.0;6.1+PTX",
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
"""Names of architectures that torch, or its CMake, accepts in TORCH_CUDA_ARCH_LIST."""

CXX_FLAGS = ("-std=c++20", "-g0")  # Python's own flags have -g: of torch's headers that is most of an object
# Cubins are mostly line tables and unrolled code, which zstd makes a small fraction of; the driver and cuobjdump unpack
# them.
# 128 is "loop is not reachable". It is said of templates in which `if (WHOLE) return;` stands before a loop, once for
# each instance that has no need of the loop.
NVCC_FLAGS = (
    *("-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr"),
    *("--compress-mode=size", "--diag-suppress=128"),
)
PTXAS_FLAGS = ("-Xptxas", "-v")  # what it made of every kernel, which compiler.py keeps for the ptxas gate


def object_of(source: Path, root: Path = ROOT) -> Path:
    """The path of a source's object in this Python's build; ``source`` is relative to the root."""
    folder = f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    return root / "build" / folder / source.with_suffix(".o")


def function_files(root: Path = ROOT) -> list[Path]:
    """The kernels that a public function launches and no step is, relative to the root."""
    return sorted(path.relative_to(root) for path in root.glob("cuda-kernels/*/*/function_*.cu"))


def baseline_files(root: Path = ROOT) -> list[Path]:
    """The baselines that are compiled beside the steps, relative to the root."""
    return sorted(path.relative_to(root) for path in root.glob("cuda-kernels/lib/baseline_*.cu"))


def operator_files(root: Path = ROOT) -> list[Path]:
    """The families' torch files, relative to the root: adaptors of steps, and operators of the public functions."""
    return sorted(path.relative_to(root) for path in root.glob("cuda-kernels/*/torch*.cpp"))


def architectures(
    environ: Mapping[str, str], capabilities: Iterable[tuple[int, int]], note: Callable[[str], None] = print
) -> str:
    """The architectures to compile for, spelled as TORCH_CUDA_ARCH_LIST is (``8.0;9.0a``).

    They come from that variable, else from the visible GPUs, else it is 9.0a. Compute capability 9.0 is built as 9.0a,
    because wgmma needs that. GPUs older than 8.0 run no step and are left out. ``note`` gets a line for each word of
    the variable that is changed or left out. BuildError if a word is no architecture, or if none is left.
    """
    chosen = environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if chosen and chosen != "native":
        return _listed(chosen, note)
    usable = sorted({capability for capability in capabilities if capability >= OLDEST_ARCH})
    return ";".join(arch for capability in usable for arch in _built_for(capability, ptx=False)) or DEFAULT_ARCH


def _listed(chosen: str, note: Callable[[str], None]) -> str:
    archs: dict[str, None] = {}  # an ordered set
    for word in chosen.replace(";", " ").split():
        for each in NAMED_ARCHS.get(word, word).split(";"):
            match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", each)
            if match is None:
                raise BuildError(
                    f"TORCH_CUDA_ARCH_LIST has {word!r}, must list compute capabilities, such as 8.0;9.0a;12.0+PTX, or "
                    f"{', '.join(NAMED_ARCHS)}, or be native: unset it to build for the GPUs that are visible"
                )
            capability = int(match[1]), int(match[2])
            if capability < OLDEST_ARCH:
                note(f"TORCH_CUDA_ARCH_LIST has {each}, which is passed over: no step runs on GPUs before 8.0.")
                continue
            built = _built_for(capability, ptx=bool(match[3]))
            if built != [each]:
                reason = "only 9.0a has wgmma" if capability == (9, 0) else "no step needs more"
                note(f"TORCH_CUDA_ARCH_LIST has {each}, which is built for as {' and '.join(built)}: {reason}.")
            archs |= dict.fromkeys(built)
    if not archs:
        raise BuildError(
            f"TORCH_CUDA_ARCH_LIST is {chosen!r}, must have a compute capability from 8.0 on, such as 9.0a: no step "
            "runs on GPUs before; add one, or unset the variable to build for the GPUs that are visible"
        )
    return ";".join(archs)


def _built_for(capability: tuple[int, int], *, ptx: bool) -> list[str]:
    """The architecture to build for a compute capability. Later GPUs can compile its PTX, but not that of 9.0a."""
    suffix = "+PTX" if ptx else ""
    if capability == (9, 0):
        return ["9.0a", *(["9.0+PTX"] if ptx else [])]
    return [f"{capability[0]}.{capability[1]}{suffix}"]


def require_known(archs: str, known: Iterable[str], nvcc: str) -> None:
    """BuildError if an architecture is not ``known`` to the compiler that ``nvcc`` names, such as ``nvcc 12.8``."""
    numbers = set(known)
    for arch in archs.split(";"):
        if arch.removesuffix("+PTX").removesuffix("a") not in numbers:
            listed = ", ".join(sorted(numbers, key=lambda number: tuple(map(int, number.split(".")))))
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST, or a visible GPU, asks for {arch}, which {nvcc} does not compile for: it knows "
                f"{listed}; list some of these in TORCH_CUDA_ARCH_LIST, the last with +PTX for GPUs after it, or set "
                "CUDA_HOME to a newer toolkit"
            )
