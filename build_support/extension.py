"""The two extensions as setuptools wants them, and what their build does before and after compiling.

python setup.py build_ext [--op OPERATION]
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from build_support import compiler, parts, progress, sources, step_table, toolkit
from build_support.parts import LADDER, PUBLIC
from build_support.toolkit import BuildError
from kernel_twins import remedies
from kernel_twins.ops import OPS

BUILT = sources.ROOT / "build" / ".built"
"""By which make knows that all is built."""


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
        return _skipped("torch is not installed")
    if torch.version.cuda is None:
        return _skipped(f"torch {torch.__version__} was built without CUDA")
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
            print(f"The CUDA side is not built, because {reason}: run `{remedies.build()}`.", file=sys.stderr)

    return {"ext_modules": [], "cmdclass": {"build_ext": Skip}}


def _failing(error: BuildError) -> dict[str, Any]:
    class Fail(build_ext):
        def run(self) -> None:
            raise SystemExit(f"error: {error}")

    return {"ext_modules": [Extension(PUBLIC, [])], "cmdclass": {"build_ext": Fail}}


def _cuda_extension(cuda: toolkit.Toolkit) -> dict[str, Any]:
    os.environ["CUDA_HOME"] = str(cuda.home)  # read by torch when it is imported below
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no GPU to build on
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    notes: list[str] = []
    archs = sources.architectures(os.environ, _visible_capabilities(), notes.append)
    release = ".".join(map(str, cuda.version))
    sources.require_known(archs, toolkit.known_architectures(cuda), f"nvcc {release}")
    os.environ["TORCH_CUDA_ARCH_LIST"] = archs
    compiler.stand_before(cuda.nvcc)
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))

    targets = " ".join(f"sm_{arch.replace('.', '')}" for arch in archs.split(";"))

    class Build(BuildExtension):
        """Generates tables and modules, compiles in place, then tells editors about all. A wheel gets ``_C`` alone."""

        extensions: list[Extension]
        user_options: ClassVar = [
            *BuildExtension.user_options,
            ("op=", None, "compile one operation alone, such as softmax"),
        ]

        def initialize_options(self) -> None:
            super().initialize_options()
            self.inplace = True
            self.op = ""

        def finalize_options(self) -> None:
            super().finalize_options()
            if self.op and self.op not in OPS:
                raise SystemExit(f"error: --op is {self.op!r}, must be one of {', '.join(OPS)}")

        def run(self) -> None:
            if not (sources.ROOT / sources.EXTENSION).is_file():
                raise SystemExit(f"error: {sources.EXTENSION} is missing: is this a whole clone?")
            divided = _generate(self.op)
            if "bdist_wheel" in self.distribution.command_obj and not self.editable_mode:
                self.extensions = [each for each in self.extensions if each.name != LADDER]
            if self.op:
                BUILT.unlink(missing_ok=True)
                wanted = {*divided.public_files, *divided.ladder_files}
                for each in self.extensions:
                    each.sources = [source for source in each.sources if _in_clone(source) in wanted]
            print(*notes, f"CUDA {release} from {cuda.home}, for {archs}", sep="\n", flush=True)
            self.commands: list[dict[str, str]] = []
            logging.disable(logging.INFO)  # setuptools' account of each command
            try:
                super().run()
            finally:
                logging.disable(logging.NOTSET)
            (sources.ROOT / "compile_commands.json").write_text(json.dumps(self.commands, indent=1) + "\n")
            if self.op:
                print(f"built for {self.op} alone: `{remedies.BUILD}` builds the other operations, too")
            else:
                write_stub()

        def build_extension(self, ext: Extension) -> None:
            if ext.name == LADDER:  # its steps call some of the other's, and enter that one's tables
                public = Path(self.get_ext_fullpath(PUBLIC))
                ext.extra_link_args = [f"-L{public.parent}", f"-l:{public.name}", "-Wl,-rpath,$ORIGIN"]
            os.environ["NINJA_STATUS"] = progress.NINJA_STATUS
            try:
                with progress.shown(ext.name, targets):
                    super().build_extension(ext)
            except RuntimeError as error:  # torch's, of a source that does not compile
                raise SystemExit(f"error: {ext.name} is not built: {error}") from None
            self.commands += compile_commands(Path(self.build_temp))
            size = Path(self.get_ext_fullpath(ext.name)).stat().st_size
            print(f"{ext.name}: linked, {size / 1e6:.1f} MB", flush=True)

    def described(name: str, files: Iterable[Path]) -> Extension:
        return CUDAExtension(
            name,
            [str(path) for path in files],
            include_dirs=[*(str(sources.ROOT / path) for path in sources.INCLUDE_DIRS), str(cuda.include_dir)],
            library_dirs=[str(toolkit.linkable_cudart(cuda, sources.ROOT / "build" / "lib"))],
            extra_compile_args={
                "cxx": [*sources.CXX_FLAGS, f'-DKERNEL_TWINS_ARCHS="{archs}"'],
                "nvcc": [*sources.NVCC_FLAGS, *sources.PTXAS_FLAGS],
            },
        )

    divided = parts.divide(OPS.values())
    return {
        "ext_modules": [described(PUBLIC, divided.public_files), described(LADDER, divided.ladder_files)],
        "cmdclass": {"build_ext": Build},
    }


def _generate(only: str) -> parts.Parts:
    """Write the files that are compiled and not committed; all operations are listed, ``only`` one has launchers."""
    ops = [*OPS.values()]
    try:
        step_table.require_agreement(ops, sources.ROOT)
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
    divided = parts.divide(ops, only=only)
    operators = [file for file in sources.operator_files() if file in divided.public_files]
    texts = {
        sources.STEP_TABLE: step_table.render(ops, divided.public),
        sources.MODULE: step_table.render_module(operators),
        sources.LADDER: step_table.render_ladder(ops, divided.ladder),
    }
    for file, text in texts.items():
        step_table.write_changed(sources.ROOT / file, text)
    return divided


def _in_clone(source: str) -> Path:
    path = Path(source)
    return path.relative_to(sources.ROOT) if path.is_absolute() else path


def _visible_capabilities() -> list[tuple[int, int]]:
    import torch

    if not torch.cuda.is_available():  # no GPU, or a driver too old for this torch
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def compile_commands(build_temp: Path) -> list[dict[str, str]]:
    """How the sources of the extension built last are compiled, by ninja's own record; without ninja there is none."""
    if not (build_temp / "build.ninja").is_file():
        return []
    command = ["ninja", "-C", str(build_temp), "-t", "compdb", "compile", "cuda_compile"]
    entries: list[dict[str, str]] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    return entries


def write_stub() -> None:
    """Writes kernel_twins/_C.pyi from the built module; without pybind11-stubgen the committed one stays."""
    if importlib.util.find_spec("pybind11_stubgen") is None:
        return
    folder = sources.ROOT / "build" / "stubs"
    script = "import sys, torch, pybind11_stubgen; pybind11_stubgen.main(sys.argv[1:])"
    command = [sys.executable, "-c", script, PUBLIC, "--output-dir", str(folder)]
    done = subprocess.run(command, cwd=sources.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"kernel_twins/_C.pyi is left as it is, pybind11-stubgen failed: {done.stderr.strip()}", file=sys.stderr)
        return
    # Values of constants, such as the architectures, belong to this build and not to the interface.
    text = re.sub(r"^(\w+: str) = .*$", r"\1", (folder / "kernel_twins" / "_C.pyi").read_text(), flags=re.MULTILINE)
    stub = sources.ROOT / "kernel_twins" / "_C.pyi"
    if not stub.exists() or stub.read_text() != text:
        stub.write_text(text)
