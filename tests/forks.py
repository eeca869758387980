"""Runs functions of the tests in processes of their own that share the time of importing torch and Triton.

A process that has imported them and nothing of this repository waits for calls; each call runs in a fork of it, so that
what it changes, and the memory that it takes, is gone afterwards. A call that returned is kept in the user's cache with
the repository's files that it read, and not run again while they hold the same (build_support/kept.py).
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from build_support import kept

LIBRARIES = ("numpy", "torch", "triton")
_IMPORTED = (*LIBRARIES, "torch._dynamo", "triton.experimental.gluon")  # what most calls come to import
_READ = re.compile(r"(?!TRITON_CACHE_DIR$|TRITON_HOME$)(TRITON|CUDA|ONEDNN|OPENBLAS|DISABLE_PTXAS)_")
_ENVIRONMENT = dict(os.environ)  # before any test: Triton's switches stay variables when a test has put them back
_NAMED = (".py", ".json", ".cu", ".cuh", ".h", ".cpp")


def interpreted(module: str, function: str, *arguments: Any) -> Any:
    """As ``call``, with Triton's interpreter and no GPU. What a kernel's module decides there holds for a process.

    The test is skipped where Triton is not there, or interprets no loops with the numpy that is.
    """
    pytest.importorskip("triton")
    from kernel_twins.compiler.interpreter import unavailable

    if reason := unavailable():
        pytest.skip(reason)
    return call(module, function, *arguments, environment={"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})


def call(
    module: str,
    function: str,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    files: Iterable[Path] = (),
) -> Any:
    """What a function of a test module returns, as JSON has it; AssertionError with what it printed where it raises.

    ``files`` are what it reads beside Python's modules and what Python opens, as a tool that it starts does.
    """
    setting = tuple(sorted((environment or {}).items()))
    key = [module, function, json.dumps(arguments), repr(setting), *surroundings()]
    with kept.alone("verdicts", key):
        if entry := kept.find("verdicts", key):
            return entry[0]["returned"]
        began = time.time_ns()
        answer = _zygote(setting).run([module, function, *arguments])
        assert "returned" in answer, answer["output"]
        read = [*map(Path, answer["files"]), *files]
        kept.keep("verdicts", key, read, {"returned": answer["returned"]}, {}, since=began)
        return answer["returned"]


@cache
def surroundings() -> tuple[str, ...]:
    """Versions, the processor, variables that compilers and libraries read, and which files may be looked for."""
    there = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    versions = [sys.version, *(f"{name} {metadata.version(name)}" for name in there)]
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    variables = [f"{name}={value}" for name, value in sorted(_ENVIRONMENT.items()) if _READ.match(name)]
    folders = ("kernel_twins", "triton-kernels", "cuda-kernels", "profiling")
    files = [path for folder in folders for path in (kept.ROOT / folder).rglob("*.*") if path.suffix in _NAMED]
    names = "\n".join(sorted(str(path.relative_to(kept.ROOT)) for path in files))
    return (*versions, *processor[:1], *variables, hashlib.sha256(names.encode()).hexdigest())


class _Zygote:
    """The waiting process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_ENVIRONMENT | {"PYTHONPATH": str(kept.ROOT), "OMP_NUM_THREADS": "1"} | dict(environment),
            cwd=kept.ROOT,
            text=True,
        )
        atexit.register(self._process.terminate)

    def run(self, call: list[Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process that forks has ended with {self._process.poll()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@cache
def _zygote(setting: tuple[tuple[str, str], ...]) -> _Zygote:
    return _Zygote(dict(setting))


def _serve() -> None:
    for name in _IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]):  # Triton may be missing beside a torch for CPUs
            importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _patch_once()
    answers = os.dup(1)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as result:
            if (pid := os.fork()) == 0:
                _run(json.loads(line), output, result)
            _, status = os.waitpid(pid, 0)
            for file in (output, result):
                file.seek(0)
            said = result.read()
            answer = json.loads(said) if said else {}
            answer["output"] = f"exit status {os.waitstatus_to_exitcode(status)}\n{output.read()}"
        os.write(answers, (json.dumps(answer) + "\n").encode())


def _patch_once() -> None:
    """Give triton.language its interpreted functions for good: the interpreter does in every call of every helper."""
    import triton.language as tl

    interpreter = importlib.import_module("triton.runtime.interpreter")
    interpreter._patch_lang(FunctionType(_patch_once.__code__, {"tl": tl, "core": tl.core}))
    setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())  # noqa: B010


def _run(call: list[Any], output: Any, result: Any) -> None:
    """In the fork: never returns."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    opened: set[str] = set()
    sys.addaudithook(lambda event, about: opened.add(str(about[0])) if event == "open" else None)
    module, function, *arguments = call
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("kernel_twins.compiler.interpreter").round_to_nearest()
    try:
        returned = getattr(importlib.import_module(module), function)(*arguments)
        imported = {str(each.__file__) for each in list(sys.modules.values()) if getattr(each, "__file__", None)}
        files = {path for name in imported | opened if _is_source(path := Path(name).absolute())}
        result.write(json.dumps({"returned": returned, "files": sorted(map(str, files))}))
        result.flush()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _is_source(path: Path) -> bool:
    if not path.is_relative_to(kept.ROOT) or not path.is_file():
        return False
    made = {".venv", "__pycache__", ".git"} & set(path.relative_to(kept.ROOT).parts)
    return not made


if __name__ == "__main__":
    _serve()
