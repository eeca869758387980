"""Runs a compiler for the build, with a cache of objects; the compiler's output is kept beside the object.

    python build_support/compiler.py nvcc|c++ ... -MF FILE.d ... -c SOURCE -o OBJECT ...

An object is taken from the cache if compiler, arguments, source and all headers are the same (kept.py). The clone's own
folder is not part of the key, so line tables and places in C++ errors may name another clone. The output of ptxas and
of the front end goes to OBJECT.log, which the ptxas gate reads; its warnings and errors are printed. A step's PTX for
9.0a goes to OBJECT.ptx.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_support import kept

_INFORMATION = re.compile(r"ptxas info +: (?!\(C)|Function properties for |\s*\d+ bytes stack frame|\s*$")
_READ = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
_STEP = re.compile(r"v\d\d_\w+\.cu")


def log_of(target: Path) -> Path:
    return target.with_name(target.name + ".log")


def ptx_of(target: Path) -> Path:
    return target.with_name(target.name + ".ptx")


def stand_before(nvcc: Path) -> None:
    """Make torch's build call this file for both compilers: for nvcc by a variable of torch, for C++ by CXX.

    CXX must be a file whose name torch recognises as a compiler's.
    """
    this = [sys.executable, str(Path(__file__).resolve())]
    os.environ["PYTORCH_NVCC"] = shlex.join([*this, str(nvcc)])
    wrapper = kept.ROOT / "build" / "bin" / "c++"
    real = os.environ.get("CXX", "c++")
    if real != str(wrapper):
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join([*this, *shlex.split(real)])} "$@"\n')
        wrapper.chmod(0o755)
        os.environ["CXX"] = str(wrapper)


def main(command: list[str]) -> int:
    if "-c" not in command or "-MF" not in command:  # it links, or prints its version
        return subprocess.run(command, check=False).returncode
    target, depfile = (Path(command[command.index(option) + 1]) for option in ("-o", "-MF"))
    command = [*command, *_keeping(command)]
    key = [*_toolchain(command[0]), *(argument.replace(str(kept.ROOT), ".") for argument in command)]
    if entry := kept.find("objects", key):
        values, blobs = entry
        headers = [str(kept.ROOT / name) for name in values["headers"]]
        depfile.write_text(f"{target}: " + " ".join(header.replace(" ", "\\ ") for header in headers) + "\n")
        _put(target, values["log"], blobs)
        return 0
    began = time.time_ns()
    returncode, log, blobs = _compile(command, target)
    if returncode:
        sys.stderr.write(log)
        return returncode
    headers = _headers(depfile)
    values = {"headers": list(map(_in_clone, headers)), "log": log}
    kept.keep("objects", key, map(Path, headers), values, blobs, since=began)
    _put(target, log, blobs)
    return 0


def _toolchain(compiler: str) -> list[str]:
    """The compiler, nvcc's host compiler, and the environment variables that they read."""
    bin_folder = Path(shutil.which(compiler) or compiler).resolve().parent
    asked = dict.fromkeys((compiler, "gcc", os.environ.get("CC", "gcc"), str(bin_folder / "ptxas")))
    versions = [
        subprocess.run([each, "--version"], capture_output=True, text=True, check=False).stdout
        for each in asked
        if shutil.which(each)
    ]
    parts = sorted([*bin_folder.glob("../nvvm/bin/cicc"), *bin_folder.glob("../nvvm/libdevice/*.bc")])
    sizes = [f"{path.name} {path.stat().st_size}" for path in parts]
    return versions + sizes + [f"{name}={os.environ[name]}" for name in _READ if name in os.environ]


def _keeping(command: list[str]) -> list[str]:
    """The arguments that make nvcc keep a step's PTX."""
    return ["--keep"] if any(_STEP.fullmatch(Path(argument).name) for argument in command) else []


def _compile(command: list[str], target: Path) -> tuple[int, str, dict[str, bytes]]:
    """The exit code, the output, and the object, for a step with its PTX."""
    with tempfile.TemporaryDirectory() as folder:
        beside = [f"--keep-dir={folder}"] if _keeping(command) else []
        done = subprocess.run(
            [*command, *beside], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            return done.returncode, done.stdout, {}
        blobs = {"object": target.read_bytes()}
        for text in (path.read_bytes() for path in Path(folder).glob("*.ptx")):
            if b".target sm_90a" in text:
                blobs["ptx"] = text
    return 0, done.stdout, blobs


def _put(target: Path, log: str, blobs: dict[str, bytes]) -> None:
    target.write_bytes(blobs["object"])
    log_of(target).write_text(log)
    if "ptx" in blobs:
        ptx_of(target).write_bytes(blobs["ptx"])
    for line in log.splitlines():
        if not _INFORMATION.match(line):
            print(line, file=sys.stderr)


def _headers(depfile: Path) -> list[str]:
    """The source and its includes, from a make rule."""
    _, _, files = depfile.read_text().replace("\\\n", " ").partition(": ")
    return [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", files.strip())]


def _in_clone(header: str) -> str:
    return header.removeprefix(f"{kept.ROOT}/")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
