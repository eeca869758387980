"""The build says what it does and how far it is: in place on a terminal, in a few lines in a log."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from build_support import progress, sources


def shown(lines: list[str], rewrites: bool) -> str:
    stream = io.StringIO()
    stage = progress.Progress("kernel_twins._C", "sm_90a", stream, rewrites)
    for line in lines:
        stage.take(line + "\n")
    stage.close()
    return stream.getvalue()


def of_ninja(total: int) -> list[str]:
    return [f"[{done}/{total}] nvcc -O3 -c v{done:02}.cu" for done in range(1, total + 1)]


def test_a_log_has_a_line_about_every_tenth() -> None:
    lines = shown(of_ninja(118), rewrites=False).splitlines()
    assert len(lines) == 11
    assert lines[0] == "kernel_twins._C: compiling 118 sources for sm_90a: 1/118"
    assert lines[-1] == "kernel_twins._C: compiling 118 sources for sm_90a: 118/118"


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    text = shown(of_ninja(118), rewrites=True)
    assert text.count("\n") == 1
    assert text.endswith("118/118\n")
    assert text.count("\r") == 118


@pytest.mark.parametrize("rewrites", [False, True])
def test_what_a_compiler_says_comes_through(rewrites: bool) -> None:
    said = ["v02.cu(3): warning #177-D: variable was declared but never referenced", "  int x;"]
    text = shown([*of_ninja(3)[:2], *said, of_ninja(3)[2]], rewrites)
    lines = [line.rpartition("\r\x1b[K")[2] for line in text.split("\n")]
    assert [line for line in lines if line and "compiling" not in line] == said
    assert lines[-2].endswith("3/3")


def test_a_build_that_has_all_says_so() -> None:
    assert shown(["ninja: no work to do."], rewrites=False) == "kernel_twins._C: every source is compiled\n"


def test_what_processes_print_is_taken_and_the_output_given_back() -> None:
    script = (
        "import subprocess\nfrom build_support import progress\n"
        "with progress.shown('kernel_twins._C', 'sm_90a'):\n"
        "    subprocess.run(['sh', '-c', 'echo \"[1/1] nvcc\"; echo a warning >&2; echo more'], stderr=1)\n"
        "print('after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(sources.ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    stage = "kernel_twins._C: compiling 1 source for sm_90a: 1/1"
    assert done.stdout.splitlines() == [stage, "a warning", "more", "after"]


def test_a_build_ends_though_nobody_reads_what_it_prints() -> None:
    script = (
        "import subprocess, sys\nfrom build_support import progress\n"
        "with progress.shown('kernel_twins._C', 'sm_90a'):\n"
        "    subprocess.run(['seq', '100000'], check=True)\n"
        "print('built', file=sys.stderr)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(sources.ROOT)}
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-c", script], env=environ, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, "built\n")
