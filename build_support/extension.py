"""The extension for setuptools, and its build's steps before and after compiling."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from build_support import compiler, sources, step_table, toolkit
from build_support.toolkit import BuildError
from kernel_twins.ops import OPS

NAME = "kernel_twins._C"
INSTALL_TORCH = "install a CUDA build of torch, then run `python setup.py build_ext`"


def describe() -> dict[str, Any]:
    """The ext_modules and cmdclass arguments of ``setup``.

    Without a CUDA build of torch there is no extension, and the build says so. If a tool is missing, the build fails
    and names it.
    """
    # pip's isolated build hides the environment's packages, but an extension works only with the torch that it was
    # compiled against.
    sys.path.append(sysconfig.get_path("purelib"))
    toolkit.put_installed_commands_on_path()
    try:
        import torch
    except ImportError:
        return _skipped(f"torch is not installed: {INSTALL_TORCH}")
    if torch.version.cuda is None:
        return _skipped(f"torch {torch.__version__} was built without CUDA: {INSTALL_TORCH}")
    try:
        require_cxx_compiler()
        require_python_headers()
        return _cuda_extension(toolkit.find(os.environ, torch.version.cuda))
    except BuildError as error:
        return _failing(error)


def require_cxx_compiler() -> None:
    """BuildError, with the command that installs a C++ compiler, if there is none."""
    command = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(command) is None:
        raise BuildError(f"there is no C++ compiler ({command!r} is not on PATH): {_install('g++', 'gcc-c++')}")


def require_python_headers() -> None:
    """BuildError, with the command that installs this Python's headers, if they are missing."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        remedy = _install("python3-dev", "python3-devel")
        raise BuildError(f"this Python has no headers ({header} is missing): {remedy}")


def _install(debian: str, fedora: str) -> str:
    if shutil.which("apt-get"):
        return f"run `sudo apt-get install {debian}`"
    if shutil.which("dnf"):
        return f"run `sudo dnf install {fedora}`"
    return f"install it ({debian} on Debian, {fedora} on Fedora)"


def _skipped(reason: str) -> dict[str, Any]:
    class Skip(build_ext):
        def run(self) -> None:
            print(f"The CUDA side is not built, because {reason}.", file=sys.stderr)

    return {"ext_modules": [], "cmdclass": {"build_ext": Skip}}


def _failing(error: BuildError) -> dict[str, Any]:
    class Fail(build_ext):
        def run(self) -> None:
            raise SystemExit(f"error: {error}")

    return {"ext_modules": [Extension(NAME, [])], "cmdclass": {"build_ext": Fail}}


def _cuda_extension(cuda: toolkit.Toolkit) -> dict[str, Any]:
    os.environ["CUDA_HOME"] = str(cuda.home)  # read by torch when the next line imports it
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    notes: list[str] = []
    archs = sources.architectures(os.environ, _visible_capabilities(), notes.append)
    release = ".".join(map(str, cuda.version))
    sources.require_known(archs, toolkit.known_architectures(cuda), f"nvcc {release}")
    os.environ["TORCH_CUDA_ARCH_LIST"] = archs
    compiler.stand_before(cuda.nvcc)
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))

    class Build(BuildExtension):
        """Generates the step table and the module, compiles in place, then writes files for editors."""

        def initialize_options(self) -> None:
            super().initialize_options()
            self.inplace = True

        def run(self) -> None:
            if not (sources.ROOT / sources.EXTENSION).is_file():
                raise SystemExit(f"error: {sources.EXTENSION} is missing: is this a whole clone?")
            try:
                step_table.write(OPS.values(), sources.ROOT, sources.ROOT / sources.STEP_TABLE)
            except BuildError as error:
                raise SystemExit(f"error: {error}") from None
            module = step_table.render_module(sources.operator_files())
            step_table.write_changed(sources.ROOT / sources.MODULE, module)
            print(*notes, f"CUDA {release} from {cuda.home}, for {archs}", sep="\n")
            super().run()
            write_compile_commands(Path(self.build_temp))
            write_stub()

    extension = CUDAExtension(
        NAME,
        [str(path) for path in sources.all_files()],
        include_dirs=[*(str(sources.ROOT / path) for path in sources.INCLUDE_DIRS), str(cuda.include_dir)],
        library_dirs=[str(toolkit.linkable_cudart(cuda, sources.ROOT / "build" / "lib"))],
        extra_compile_args={
            "cxx": [*sources.CXX_FLAGS, f'-DKERNEL_TWINS_ARCHS="{archs}"'],
            "nvcc": [*sources.NVCC_FLAGS, *sources.PTXAS_FLAGS],
        },
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


def _visible_capabilities() -> list[tuple[int, int]]:
    import torch

    if not torch.cuda.is_available():  # no GPU, or a driver too old for this torch
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def write_compile_commands(build_temp: Path) -> None:
    """Writes compile_commands.json from ninja's record; without ninja there is none."""
    if not (build_temp / "build.ninja").is_file():
        return
    command = ["ninja", "-C", str(build_temp), "-t", "compdb", "compile", "cuda_compile"]
    entries = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (sources.ROOT / "compile_commands.json").write_text(json.dumps(entries, indent=1) + "\n")


def write_stub() -> None:
    """Writes kernel_twins/_C.pyi from the built module; without pybind11-stubgen the committed one stays."""
    if importlib.util.find_spec("pybind11_stubgen") is None:
        return
    folder = sources.ROOT / "build" / "stubs"
    script = "import sys, torch, pybind11_stubgen; pybind11_stubgen.main(sys.argv[1:])"
    command = [sys.executable, "-c", script, NAME, "--output-dir", str(folder)]
    done = subprocess.run(command, cwd=sources.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"kernel_twins/_C.pyi is left as it is, pybind11-stubgen failed: {done.stderr.strip()}", file=sys.stderr)
        return
    # Values of constants, such as the architectures, belong to this build and not to the interface.
    text = re.sub(r"^(\w+: str) = .*$", r"\1", (folder / "kernel_twins" / "_C.pyi").read_text(), flags=re.MULTILINE)
    stub = sources.ROOT / "kernel_twins" / "_C.pyi"
    if not stub.exists() or stub.read_text() != text:
        stub.write_text(text)
