"""Finds the CUDA toolkit that the extension is compiled with."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OLDEST = (12, 8)  # its PTX ISA has the relaxed waits and restricted fences of hopper.cuh, which came with 8.6
INDEX_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl")


class BuildError(Exception):
    """The extension cannot be built here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that can compile and link: ``home/bin/nvcc``, its headers, its runtime library."""

    home: Path
    version: tuple[int, int]
    include_dir: Path
    cudart: Path

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"


def find(environ: Mapping[str, str], torch_cuda: str) -> Toolkit:
    """The toolkit to build with: CUDA_HOME's, else that of nvcc on PATH, else the package index's compiler.

    ``torch_cuda`` is torch's CUDA version; the toolkit must have the same major version. An unusable CUDA_HOME is an
    error, because it was set on purpose; an unusable nvcc on PATH is passed over. BuildError says what was found in
    each place.
    """
    major = int(torch_cuda.split(".")[0])
    if named := environ.get("CUDA_HOME"):
        try:
            return inspect(Path(named), major)
        except BuildError as error:
            raise BuildError(
                f"CUDA_HOME is {named!r}, but {error}: "
                f"point it at a CUDA {major} toolkit, or unset it to have one looked for"
            ) from None

    tried = ["CUDA_HOME: not set"]
    if (nvcc := shutil.which("nvcc", path=environ.get("PATH", ""))) is None:
        tried.append("nvcc on PATH: there is none")
    else:
        try:
            return inspect(home_of(Path(nvcc)), major)
        except BuildError as error:
            tried.append(f"nvcc on PATH ({nvcc}): {error}")
    try:
        return from_index(major)
    except BuildError as error:
        tried.append(f"the package index's compiler: {error}")

    release = ".".join(map(str, max(OLDEST, tuple(map(int, torch_cuda.split(".")[:2])))))
    packages = " ".join(f"'{package}=={release}.*'" for package in INDEX_PACKAGES)
    raise BuildError(
        f"the CUDA side needs a CUDA {major} toolkit, and none was found:\n  "
        + "\n  ".join(tried)
        + f"\nInstall the compiler with `pip install {packages}`, or a toolkit, and set CUDA_HOME to it."
    )


def home_of(nvcc: Path) -> Path:
    """The toolkit to which an nvcc belongs, by its own output.

    Its path does not tell: a wrapper script in /usr/local/bin would give /usr/local. Links are resolved first, because
    nvcc looks for its profile beside the name by which it is called.
    """
    report = subprocess.run([nvcc.resolve(), "--dryrun", "nothing.cu"], capture_output=True, text=True, check=False)
    match = re.search(r"^#\$ TOP=(.+)$", report.stderr, re.MULTILINE)
    if match is None:
        raise BuildError("`nvcc --dryrun` does not say which toolkit it belongs to")
    return Path(match[1].strip()).resolve()


def from_index(major: int) -> Toolkit:
    """The compiler that the package index's nvidia-* packages put in site-packages/nvidia/cu<major>."""
    spec = importlib.util.find_spec("nvidia")
    locations = [] if spec is None else list(spec.submodule_search_locations or [])
    homes = [Path(location) / f"cu{major}" for location in locations]
    for home in homes:
        if (home / "bin" / "nvcc").is_file():
            return inspect(home, major)
    raise BuildError(f"{INDEX_PACKAGES[0]} is not installed")


def inspect(home: Path, major: int) -> Toolkit:
    """Check that a folder holds a whole toolkit of the wanted major version, 12.8 or newer.

    BuildError says what it lacks.
    """
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        raise BuildError(f"{nvcc} does not exist")
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", answer)
    if release is None:
        raise BuildError(f"`{nvcc} --version` does not name a release")
    version = (int(release[1]), int(release[2]))
    if version[0] != major:
        raise BuildError(f"{home} is CUDA {version[0]}.{version[1]}, and torch was built with CUDA {major}")
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BuildError(f"{home} is CUDA {version[0]}.{version[1]}, and the kernels take {oldest} or newer")

    # Some distributions have headers and libraries only below targets/<name>.
    roots = [home, *sorted(home.glob("targets/*-linux"))]
    include_dir = next((root / "include" for root in roots if (root / "include/cuda_runtime.h").is_file()), None)
    if include_dir is None:
        raise BuildError(f"{home} has no include/cuda_runtime.h")
    libraries = [lib for root in roots for folder in ("lib64", "lib") for lib in (root / folder).glob("libcudart.so*")]
    if not libraries:
        raise BuildError(f"{home} has no libcudart.so")
    return Toolkit(home, version, include_dir, min(libraries, key=lambda library: len(library.name)))


def known_architectures(toolkit: Toolkit) -> list[str]:
    """The compute capabilities that a toolkit compiles for, such as ``9.0``."""
    answer = subprocess.run([toolkit.nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    return [f"{major}.{minor}" for major, minor in re.findall(r"^compute_(\d+)(\d)$", answer, re.MULTILINE)]


def linkable_cudart(toolkit: Toolkit, folder: Path) -> Path:
    """The folder for -L in which the linker finds libcudart.so.

    The package index's runtime has only a versioned name, so ``folder`` gets a link to it.
    """
    if toolkit.cudart.name == "libcudart.so":
        return toolkit.cudart.parent
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcudart.so"
    if not link.exists() or link.resolve() != toolkit.cudart.resolve():
        link.unlink(missing_ok=True)
        os.symlink(toolkit.cudart, link)
    return folder


def put_installed_commands_on_path() -> None:
    """Puts the folder of this Python on PATH, so that ninja is found even if its environment is not activated."""
    scripts, path = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, path])
