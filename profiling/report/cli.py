"""The command line of ncu_report.py: what there is to do here, and where its results go."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from kernel_twins import OPS, ops
from kernel_twins._load import UnavailableError, why_no_gpu
from kernel_twins._profiling.report import documents, store
from kernel_twins.ceilings import gpu_slug
from kernel_twins.spec import Op


def main(argv: list[str], description: str) -> int:
    """Exit codes: 0 fine, 1 a check failed, 2 usage, 3 cannot run here, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="ncu_report.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "verb",
        nargs="?",
        choices=("collect", "log", "check"),
        help="collect: measure only; log: render only; check: fail if a committed document disagrees with the data "
        "(default: collect and log with a GPU, else log)",
    )
    parser.add_argument("--op", choices=OPS, action="append", help="measure this operation only (may be repeated)")
    parser.add_argument("--publish", action="store_true", help="put a new GPU's data beside the committed ones")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        if arguments.verb == "check":
            return _check(console)
        reason = why_no_gpu()
        if reason and arguments.verb == "collect":
            console.print(f"cannot measure here: {reason}")
            return 3
        gpu, folder = store.REFERENCE_GPU, store.DATA / store.REFERENCE_GPU
        problems: list[str] = []
        if reason:
            console.print(f"{reason}: rendering from the committed measurements of {gpu}")
        elif arguments.verb != "log":
            gpu, folder = _target(arguments.publish)
            problems = _collect([ops.get(name) for name in arguments.op or OPS], gpu, folder, console)
        if arguments.verb != "collect":
            documents.render(gpu, folder, console)
        for problem in problems:
            console.print(f"[red]{problem}")
        return 1 if problems else 0
    except UnavailableError as error:
        console.print(f"cannot run here: {error}")
        return 3
    except KeyboardInterrupt:
        console.print("interrupted; what was measured is kept, and the next run goes on from there")
        return 130


def _check(console: Console) -> int:
    wrong = documents.disagreements()
    for line in wrong:
        console.print(f"[red]{line}")
    if wrong:
        console.print("run `python profiling/ncu_report.py log` and commit what it writes")
        return 1
    console.print("the documents agree with the data")
    return 0


def _target(publish: bool) -> tuple[str, Path]:
    import torch

    gpu = gpu_slug(torch.cuda.get_device_name())
    published = publish or gpu == store.REFERENCE_GPU
    return gpu, (store.DATA if published else store.RUNS) / gpu


def _collect(chosen: list[Op], gpu: str, folder: Path, console: Console) -> list[str]:
    from kernel_twins._profiling.report.collect import collect

    return collect(chosen, gpu, folder, console)
