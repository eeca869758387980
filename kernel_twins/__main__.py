"""``python -m kernel_twins``: list the ladders, run one step under a tool of your choice, time a case, show code."""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys

from kernel_twins import named, remedies
from kernel_twins.built import load
from kernel_twins.compiler.interpreter import SWITCH, is_interpreted, round_to_nearest, small_case
from kernel_twins.compiler.show import STAGES
from kernel_twins.errors import UnavailableError
from kernel_twins.harness.ceilings import gpu_slug
from kernel_twins.harness.load import why_no_gpu
from kernel_twins.ops import OPS, get
from kernel_twins.report.pages import headers
from kernel_twins.spec import BACKENDS, UNPROVEN, Case, Name, Op, Step


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernel_twins", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list | run | bench | show")

    verbs.add_parser("list", help="every operation, its steps and the languages they exist in")

    run = verbs.add_parser(
        "run",
        help="one checked launch, for ncu, compute-sanitizer or cuda-gdb",
        description="Launches a step once and checks its result. Without a GPU, "
        f"`{SWITCH} python -m kernel_twins run OP STEP triton` has Triton's interpreter run a small case on the CPU.",
    )
    run.add_argument("op")
    run.add_argument("step")
    run.add_argument("backend", choices=BACKENDS)
    run.add_argument(
        "--case",
        help="such as 1000003-bf16 or 128x64x32-bf16-b.col (default: the profiled case; a small one on the CPU)",
    )

    bench = verbs.add_parser("bench", help="time one case, baselines interleaved")
    bench.add_argument("op")
    bench.add_argument("step", nargs="?", help="this step only (default: the whole ladder)")
    bench.add_argument("--case", help="such as 16777216-fp32 (default: the profiled case)")

    show = verbs.add_parser(
        "show",
        help="what the compilers make of a step; needs no GPU",
        description="Prints one stage of compilation, or what differs there between two steps.",
    )
    show.add_argument("op")
    show.add_argument("step")
    show.add_argument("backend", choices=BACKENDS)
    show.add_argument(
        "--stage",
        choices=STAGES["triton"],
        default="sass",
        help="CUDA has ptx and sass (default: sass)",
    )
    show.add_argument(
        "--diff",
        metavar="STEP | twin",
        help="print what differs from this step, or from the same step in the other language (ptx, sass); registers, "
        "labels and comments are left out",
    )
    show.add_argument(
        "--summary", action="store_true", help="count instructions by opcode instead, with --diff of both (ptx, sass)"
    )
    show.add_argument(
        "--kernel", default="", metavar="NAME", help="of several kernels, those whose name is or holds this"
    )
    show.add_argument("--case", help="such as 1000003-bf16 (default: the profiled case)")

    arguments, unknown = parser.parse_known_args(argv)
    usage = verbs.choices[arguments.verb]  # the verb's own, which says what it takes
    if unknown:
        usage.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        _name_steps(arguments)
        code = {"list": _list, "run": _run, "bench": _bench, "show": _show}[arguments.verb](arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        usage.error(str(error))
    except (UnavailableError, RuntimeError) as error:
        print(f"kernel_twins: {error}", file=sys.stderr)
        return 3


def _name_steps(arguments: argparse.Namespace) -> None:
    """Put steps' whole names in the place of beginnings; ValueError where there is no such operation or step."""
    if not hasattr(arguments, "op"):
        return
    op = get(arguments.op)
    if arguments.step:
        arguments.step = named.step(op, arguments.step).name
    if getattr(arguments, "diff", None) not in (None, "twin"):
        arguments.diff = named.step(op, arguments.diff, "--diff").name


def _list(arguments: argparse.Namespace) -> int:
    for op in OPS.values():
        print(f"{op.name}: {op.title}")
        for step in op.steps:
            # A wheel does not bring the files.
            title = headers.told(op, step)[0] if headers.file_of(op, step).is_file() else ""
            print(f"  {step.name:<20} {' '.join(step.backends):<12} {step.arch:<8} {title}".rstrip())
    return 0


def _run(arguments: argparse.Namespace) -> int:
    op, case = _op_and_case(arguments)
    on_cpu = arguments.backend == "triton" and is_interpreted()
    if not on_cpu:
        _require_gpu("run", f"with {SWITCH} a small case runs on the CPU" if arguments.backend == "triton" else "")
    from kernel_twins.harness.check import check

    call = load(op.name, arguments.step, arguments.backend)
    if on_cpu:
        round_to_nearest()
        case = case if arguments.case else small_case(op, op.step(arguments.step))
    verdict = check(op, call, case, device="cpu" if on_cpu else "cuda")
    print(f"{case.slug}: " + (f"right, error {verdict.error:.3g}" if verdict.ok else f"WRONG, {verdict.reason}"))
    return 0 if verdict.ok else 1


def _require_gpu(verb: str, *more: str) -> None:
    if reason := why_no_gpu():
        doctor = "`python profiling/ncu_report.py doctor` says what is missing"
        remedy = doctor if remedies.is_clone() else "see what `nvidia-smi` says, and which torch is installed"
        raise UnavailableError(f"cannot {verb} here: {'; '.join(filter(None, (reason, remedy, *more)))}")


def _bench(arguments: argparse.Namespace) -> int:
    from kernel_twins.harness.bench import bench

    op = get(arguments.op)
    case = Case.parse(arguments.case) if arguments.case else op.profile_case
    if reason := op.accepts(case):
        raise ValueError(f"--case {case.slug}: {reason}")
    _require_gpu("bench")
    steps = (op.step(arguments.step),) if arguments.step else tuple(s for s in op.steps if op.times(s, case))
    _note(op, steps)
    print(f"{op.name} {case.slug}")
    unproven = False
    for timing in bench(op, case, steps):
        unproven |= timing.status.startswith(UNPROVEN)
        what = f"{statistics.median(timing.times_us):12.2f} µs" if timing.times_us else timing.status
        print(f"  {timing.name.backend:<12} {timing.name.step:<20} {timing.contest:<6} {what}")
    return 1 if unproven else 0


def _show(arguments: argparse.Namespace) -> int:
    from kernel_twins.compiler.show import diff, show

    op, case = _op_and_case(arguments)
    step, backend, stage = op.step(arguments.step), arguments.backend, arguments.stage
    if arguments.summary:
        try:
            from kernel_twins.report.compare import opcodes_table
        except ModuleNotFoundError as error:
            raise UnavailableError(f"--summary needs {error.name}: pip install {error.name}") from error

        opcodes_table.show(op, step, backend, stage, case, arguments.diff or "", arguments.kernel)
        return 0
    if arguments.diff:
        text = diff(op, step, backend, stage, case, arguments.diff, arguments.kernel)
    else:
        text = show(op, step, backend, stage, case, arguments.kernel)
    if text:
        print(text.rstrip("\n"))
    else:
        print("nothing differs that matters", file=sys.stderr)
    return 0


def _op_and_case(arguments: argparse.Namespace) -> tuple[Op, Case]:
    """The operation, and the case that is asked for or profiled; ValueError where the step does not take it."""
    op = get(arguments.op)
    case = Case.parse(arguments.case) if arguments.case else op.profile_case
    if reason := op.refusal(op.step(arguments.step), case):
        raise ValueError(f"--case {case.slug}: {reason}")
    return op, case


def _note(op: Op, steps: tuple[Step, ...]) -> None:
    """A trial is a measurement, too: what is predicted after it counts as post hoc."""
    import torch

    from kernel_twins.report.meaning.predictions import note_measured
    from kernel_twins.report.rows.store import DATA, ledger

    if not DATA.is_dir():
        return  # an installed package, where nobody predicts
    names = [Name(backend, step.name) for step in steps for backend in step.backends]
    folder = ledger(gpu_slug(torch.cuda.get_device_name()))
    note_measured(folder, op.name, names, datetime.datetime.now(datetime.UTC), "bench")


if __name__ == "__main__":
    sys.exit(main())
