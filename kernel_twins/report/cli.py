"""The command line of ncu_report.py: its verbs, their options, and the exit codes."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path

from kernel_twins import OPS
from kernel_twins.errors import UnavailableError
from kernel_twins.report.rows.base import (
    CANNOT_RUN,
    INTERRUPTED,
    INVALID_DATA,
    OK,
    REFERENCE_GPU,
    ROOT,
    USAGE,
    CannotRunError,
    InvalidDataError,
    shown,
)
from kernel_twins.report.rows.metrics import TIERS
from kernel_twins.spec import BACKENDS

_CODES = """Without a verb the options of `all` are taken: see `ncu_report.py all --help`.

exit codes:
  0 fine   1 a check failed, or a step got slower or wrong   2 usage   3 cannot run here   4 invalid data
  130 interrupted
"""
_EXAMPLES = """examples:
  ncu_report.py                                        all that this machine can do
  ncu_report.py doctor                                 what is missing here, and the command that mends it
  ncu_report.py plan --tier T1                         what a run would measure, and how long it would take
  ncu_report.py predict                                freeze the specs' predictions, before measuring
  ncu_report.py retire OP STEP --why "Its kernel is behind the last step's routing table."
  ncu_report.py collect --op reduction --resume        go on with an interrupted run
  ncu_report.py collect --op matmul_bf16 --step v05_grouped --shape 4096x4096x4096-fp16
  ncu_report.py functions                              the public functions alone, in a minute
  ncu_report.py sampled --compile && ncu_report.py sampled
                                                       the same at cases that nobody chose, in ten
  ncu_report.py sweeps stages matmul_bf16/v04_pipelined
                                                       what the compilers make of it, stage by stage; needs no GPU
  ncu_report.py extract kernel.ncu-rep                 anybody's report: its counters, and what limits each launch
  ncu_report.py extract --all kernel.ncu-rep > all.csv
  ncu_report.py diff matmul_bf16/v04_pipelined/cuda matmul_bf16/v05_grouped/cuda
  ncu_report.py diff before.ncu-rep after.ncu-rep      anybody's reports; before.csv after.csv are taken as well
  ncu_report.py check --release --audit

"""


_OPTIONAL = ("matplotlib", "numpy", "pandas", "rich")


def main(argv: list[str], description: str) -> int:
    """Parse and obey; returns the exit code."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["all", *argv]
    parser = _parser(description)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # which the verb is to tell, whose usage helps
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return _obey(arguments)
    except (CannotRunError, UnavailableError) as error:
        code = CANNOT_RUN
        message = str(error)
    except InvalidDataError as error:
        code = INVALID_DATA
        message = str(error)
    except ValueError as error:
        code = USAGE
        message = str(error)
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        code = CANNOT_RUN
        message = f"{error}; what was recorded before is kept"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message += ": free some space, or write elsewhere (TMPDIR, TRITON_CACHE_DIR); collect goes on by --resume"
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL:
            raise
        code = CANNOT_RUN
        message = _not_installed(error.name)
    except KeyboardInterrupt:
        code = INTERRUPTED
        resumed = "" if arguments.verb == "sampled" else " with --resume"
        message = f"interrupted; what was measured is kept: the same command{resumed} goes on from there"
    print(f"ncu_report.py: {message}", file=sys.stderr)
    return code


def _not_installed(package: str) -> str:
    """What to do where this Python lacks a package that the report needs."""
    environment = ROOT / ".venv"
    if environment.is_dir() and Path(sys.prefix).resolve() != environment.resolve():
        remedy = f"use `{shown(environment)}/bin/python profiling/ncu_report.py`, or run `make` or"
    else:
        remedy = "run `make`, which installs all that is needed in .venv, or"
    return f"{package} is not installed for {sys.executable}: {remedy} `pip install -e '.[report]'`"


def _obey(arguments: argparse.Namespace) -> int:
    if arguments.verb == "doctor":  # which is to tell that pandas or rich is missing, and so must do without
        from kernel_twins.report import doctor

        return doctor.run(arguments.json)
    from rich.console import Console

    from kernel_twins.report import commands

    console = Console(stderr=True, soft_wrap=True, force_terminal=False if os.environ.get("CI") else None)
    return int(getattr(commands, arguments.verb)(arguments, console))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return seconds


def _parser(description: str) -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="ncu_report.py", description=description, epilog=_EXAMPLES + _CODES, formatter_class=style
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    selection = argparse.ArgumentParser(add_help=False)
    selection.add_argument("--op", choices=OPS, action="append", help="this operation only (may be repeated)")
    selection.add_argument("--step", help="this step only, such as v03_vectorized")
    selection.add_argument("--backend", choices=BACKENDS, help="this language only")
    selection.add_argument("--shape", metavar="CASE", help="this timed case only, such as 4096x4096x4096-bf16-b.col")
    profiler = argparse.ArgumentParser(add_help=False)
    profiler.add_argument(
        "--tier",
        choices=TIERS,
        default="T3",
        help="how many counters: T0 time and bytes (1 pass), T1 units and accesses (6), T2 stalls (9), T3 arithmetic "
        "by kind and TMA (12; default)",
    )
    profiler.add_argument(
        "--tool", choices=("ncu", "proton"), default="ncu", help="proton needs no permission, and gives no counters"
    )
    running = argparse.ArgumentParser(add_help=False)
    running.add_argument("--resume", action="store_true", help="go on with the run that was interrupted")
    running.add_argument(
        "--timeout", type=_seconds, default=300.0, metavar="S", help="seconds for a profiled process (default: 300)"
    )
    publishing = argparse.ArgumentParser(add_help=False)
    publishing.add_argument("--publish", action="store_true", help="put a new GPU's data beside the committed ones")
    quiet = argparse.ArgumentParser(add_help=False)
    quiet.add_argument("--quiet", action="store_true", help="no progress and no warnings")
    measuring = (running, publishing, quiet)
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="what is printed to stdout as JSON")
    of_gpu = argparse.ArgumentParser(add_help=False)
    of_gpu.add_argument(
        "--gpu", default=REFERENCE_GPU, metavar="SLUG", help=f"the data of this GPU (default: {REFERENCE_GPU})"
    )

    def verb(name: str, help_: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help_, description=help_, parents=list(parents), formatter_class=style)
        made.set_defaults(parser=made)
        return made

    verb(
        "all",
        "collect, extract, functions and log with a GPU, else log (what is done without a verb)",
        selection,
        profiler,
        *measuring,
        as_json,
    )
    verb("doctor", "what is here, what is missing, and the command that mends it", as_json)
    verb("plan", "what a run would measure: cells, passes, predicted minutes", selection, profiler, as_json)
    verb("predict", "freeze the specs' predictions, with date and digest; what is measured already is post hoc", of_gpu)
    retire = verb(
        "retire", "fold a rung: its predictions keep their verdicts in the score, its rows are forgotten", of_gpu
    )
    retire.add_argument("op", choices=OPS, metavar="OP", help="the operation, such as softmax")
    retire.add_argument("step", metavar="STEP", help="the step, such as v03_vectorized, while it is in the spec")
    retire.add_argument("--backend", choices=BACKENDS, help="this language only")
    retire.add_argument("--why", required=True, metavar="REASON", help="why it is folded: a sentence for the log")
    verb("collect", "time and profile; the results wait for extract", selection, profiler, *measuring, as_json)
    told = "make rows of what collect measured, or print anybody's reports: known counters, and what limits each launch"
    extract = verb("extract", told, publishing, as_json)
    extract.add_argument("file", nargs="*", help=".ncu-rep files, or CSV that ncu printed with --page raw")
    extract.add_argument("--all", action="store_true", help="every metric, as CSV with a row for each, in base units")
    told = "time the public functions as a user calls them: the host, forward and backward"
    verb("functions", told, publishing, quiet)
    told = "time the public functions at cases that nobody chose; an interrupted one goes on"
    sampled = verb("sampled", told, publishing, quiet)
    sampled.add_argument("--compile", action="store_true", help="begin a recording, and compile what its cases need")
    sweeps = verb("sweeps", "record what belongs to no ladder's run: compilers' stages, the grid, Inductor's code")
    told = "stages and compile need no GPU; inductor does"
    sweeps.add_argument("sweep", choices=("stages", "compile", "inductor"), metavar="NAME", help=told)
    sweeps.add_argument("kernel", nargs="*", metavar="KERNEL", help="of stages these alone: OP or OP/STEP")
    static = verb("static", "record registers, shared memory, spills and instructions of every step; no GPU needed")
    static.add_argument("--reason", default="", help="why recorded rows may change")
    diff = verb("diff", "compare two steps, languages, commits, or two reports of ncu's", as_json)
    diff.add_argument(
        "a", metavar="A", help="OP/STEP/BACKEND, also with @COMMIT; @COMMIT; FILE.ncu-rep; FILE.csv, ncu's raw page"
    )
    diff.add_argument("b", metavar="B", help="what is left out here is taken from A")
    diff.add_argument("--all", action="store_true", help="of reports, metrics that the registry does not know, too")
    verb("log", "render KERNEL_LOG.md, docs/log/, README's and the pages' tables, and the plots from the rows", of_gpu)
    check = verb("check", "fail where documents, data and code disagree, or where a step got slower", as_json)
    told = "fail on steps that are not measured, stale rows and unfrozen predictions, too"
    check.add_argument("--release", action="store_true", help=told)
    check.add_argument(
        "--audit", action="store_true", help="compare predictions, measurements, recordings with git's history"
    )
    check.add_argument("--accept", metavar="REASON", default="", help="accept losses of speed that have no reason yet")
    return parser
