"""Which CUDA files there are, and how nvcc is asked to compile them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from build_support.toolkit import BuildError

ROOT = Path(__file__).resolve().parent.parent
GENERATED = Path("build/generated")
STEP_TABLE = GENERATED / "step_table.cpp"
BINDINGS = Path("cuda-kernels/bindings.cpp")
FUNCTIONAL = tuple(
    Path("cuda-kernels") / f"functional{family}.cpp"
    for family in ("", "_softmax", "_norm", "_cross_entropy", "_dropout", "_reduction")
)
INCLUDE_DIRS = (Path("cuda-kernels"), Path("hardware-survey"))

DEFAULT_ARCH = "9.0a"
OLDEST_ARCH = (8, 0)
CXX_FLAGS = ("-std=c++20",)
# A compressed cubin, as the largest is otherwise, hides its compiler's version, and has all disassembled by one core.
NVCC_FLAGS = ("-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "--no-compress")


def step_files(root: Path = ROOT) -> list[Path]:
    """The CUDA steps, relative to the root."""
    return sorted(path.relative_to(root) for path in root.glob("cuda-kernels/*/v*.cu"))


def cuda_files(root: Path = ROOT) -> list[Path]:
    """All .cu files of the extension, relative to the root: steps, what functions add, built-in baselines, probes."""
    others = [
        *root.glob("cuda-kernels/baselines/*.cu"),
        *root.glob("cuda-kernels/*/backward.cu"),
        *root.glob("cuda-kernels/*/bias.cu"),
        *root.glob("cuda-kernels/*/mean.cu"),
        *root.glob("cuda-kernels/*/parameters.cu"),
        *root.glob("hardware-survey/probes.cu"),
    ]
    return step_files(root) + sorted(path.relative_to(root) for path in others)


def architectures(environ: Mapping[str, str], capabilities: Iterable[tuple[int, int]]) -> str:
    """The architectures to compile for, spelled as TORCH_CUDA_ARCH_LIST is (``8.0;9.0a``).

    That variable where it is set, else those of the visible GPUs, else 9.0a. A GPU of compute capability 9.0 is
    built for as 9.0a, without which it has no wgmma; GPUs older than 8.0 run no step and are passed over. BuildError
    where the variable lists anything but compute capabilities from 8.0 on: the bindings read numbers.
    """
    chosen = environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if chosen and chosen != "native":
        words = chosen.replace(";", " ").split()
        for word in words:
            match = re.fullmatch(r"(\d+)\.(\d)a?(\+PTX)?", word)
            if match is None or (int(match[1]), int(match[2])) < OLDEST_ARCH:
                raise BuildError(
                    f"TORCH_CUDA_ARCH_LIST has {word!r}, must list compute capabilities from 8.0 on, such as 8.0;9.0a"
                )
        return ";".join(words)
    usable = sorted({capability for capability in capabilities if capability >= OLDEST_ARCH})
    return ";".join("9.0a" if pair == (9, 0) else f"{pair[0]}.{pair[1]}" for pair in usable) or DEFAULT_ARCH
