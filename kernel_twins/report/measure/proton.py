"""Triton's own profiler, Proton, for machines that forbid counters: time of every kernel, by activity tracing alone.

As a process, ``python -m kernel_twins.report.measure.proton OP OUT.hatchet LABEL...``, it calls each labelled cell
ten times and leaves Proton's tree. Calls run back to back on the same inputs, warm, so that a time
is neither the bench's nor ncu's; it is told as Proton's.

A scope is entered once for every call and given the operation's minimum bytes and FLOP; Proton adds them up, as it
adds up time and count, so that rates come out right in its own viewer too.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_twins import ops
from kernel_twins.report.rows import base
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.report.rows.store import TABLES
from kernel_twins.spec import Case, Name, Op

CALLS = 10
_TIME, _COUNT = "time (ns)", "count"
_AGAIN = "measure the operation again with `python profiling/ncu_report.py collect --tool proton`"


def main(op: str, out: str, *chosen: str) -> None:
    """Call every labelled cell under Proton; OSError where no tree was written."""
    import torch
    import triton.profiler

    from kernel_twins.report.measure.worker import prepared

    spec = ops.get(op)
    calls = list(prepared(spec, [base.labelled(spec, label) for label in chosen]))
    for _, _, call in calls:
        call()  # compiles and tunes
    torch.cuda.synchronize()

    triton.profiler.start(out.removesuffix(".hatchet"), context="shadow", data="tree")  # which adds .hatchet
    for case, name, call in calls:
        minimum = {"bytes": float(spec.bytes(case)), "flops": float(spec.flops(case))}
        for _ in range(CALLS):
            with triton.profiler.scope(base.label(spec, case, name), minimum):
                call()
        torch.cuda.synchronize()
    triton.profiler.finalize()
    if not Path(out).exists():
        raise OSError(f"Proton wrote no {out}")


def rows(hatchet: Path, op: Op, run: str, codes: Mapping[str, str]) -> pd.DataFrame:
    """Proton's tree as rows: one for every kernel below a label of ``op``, in the tree's order.

    ``count`` and ``time_ns`` are the kernel's totals over a cell's ten calls; ``bytes`` and ``flops`` the operation's
    minimum of the same ten calls, the same in every row of a cell. ``codes`` are by label, one for every label that
    must be there. InvalidDataError where the tree is cut short, lacks a label, or has another number of calls or
    launches below one than there must be.
    """
    try:
        tree = json.loads(hatchet.read_text())
        scopes = {
            node["frame"]["name"]: node
            for root in tree
            for node in _below(root)
            if node["frame"]["name"].startswith(f"kl.{op.name}.")
        }
        if not isinstance(tree, list) or not scopes:
            raise TypeError(f"there is no kl.{op.name}")
        if missing := sorted(codes.keys() - scopes):
            raise InvalidDataError(f"{hatchet.name} holds no {', '.join(missing)}: {_AGAIN}")
        return pd.DataFrame(
            [
                (case.slug, name.backend, name.step, *row, codes.get(label, ""), run)
                for label, scope in scopes.items()
                for case, name in [base.labelled(op, label)]
                for row in _kernels(label, scope, op, case, name)
            ],
            columns=TABLES["proton"],
        )
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InvalidDataError(f"{hatchet.name} is not a tree of Proton's ({error!r}): {_AGAIN}") from None


def _below(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All nodes of a tree that are frames, parents first; the file's last element describes the devices instead."""
    if "frame" not in node:
        return
    yield node
    for child in node["children"]:
        yield from _below(child)


def _kernels(label: str, scope: dict[str, Any], op: Op, case: Case, name: Name) -> list[tuple[str, str, str, str, str]]:
    minimum = {"bytes": op.bytes(case), "flops": op.flops(case)}
    for metric, value in minimum.items():
        if round(scope["metrics"][metric]) != CALLS * value:
            raise InvalidDataError(
                f"{label}: Proton counted {scope['metrics'][metric]:,.0f} {metric}, {CALLS} calls have "
                f"{CALLS * value:,}: {_AGAIN}"
            )
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for node in _below(scope):
        if _TIME in node["metrics"]:
            total = totals[kernel_name(node["frame"]["name"])]
            total[0] += node["metrics"][_COUNT]
            total[1] += node["metrics"][_TIME]
    launches = sum(count for count, _ in totals.values())
    expected = CALLS * op.step(name.step).launches if name.step else 0
    if not launches or (expected and launches != expected) or not all(time > 0 for _, time in totals.values()):
        raise InvalidDataError(
            f"{label}: Proton saw {launches} kernels, {expected or 'some'} expected, in {CALLS} calls: {_AGAIN}"
        )
    sums = [str(CALLS * value) for value in minimum.values()]
    return [(kernel, str(count), str(time), sums[0], sums[1]) for kernel, (count, time) in totals.items()]


def kernel_name(name: str) -> str:
    """The bare function name of a kernel, as ncu's tables have it, from what CUDA calls it, mangled or not.

    ``_ZN2at6native13reduce_kernelILi512E...`` and ``void at::native::reduce_kernel<512, ...>(...)`` are both
    ``reduce_kernel``; a Triton kernel is called what it is called.
    """
    if name.startswith("_Z"):
        rest, found = name[2:].lstrip("NKL"), name
        while match := re.match(r"L?(\d+)", rest):  # identifiers are written with their length before them
            start, length = match.end(), int(match[1])
            found, rest = rest[start : start + length], rest[start + length :]
        return found
    bare = re.split(r"[<(]", name.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    return bare.split("::")[-1].split()[-1] if bare.strip() else name


def told(rows: pd.DataFrame, op: Op, case: Case, name: Name) -> list[str]:
    """What the log says of a step or a baseline where only Proton could be had; nothing where it was not."""
    from kernel_twins.report.meaning.write import number  # here, because a profiled process must not load it

    ours = rows[(rows["case"] == case.slug) & (rows["backend"] == name.backend) & (rows["step"] == name.step)]
    if not len(ours):
        return []
    times = {row.kernel: int(row.time_ns) for row in ours.itertuples()}
    total = sum(times.values())
    shares = [f"{kernel} {number(time / CALLS / 1e3)} µs" for kernel, time in times.items()]
    parts = f" ({', '.join(shares)})" if len(shares) > 1 else ""
    who = next(iter(times)) if len(times) == 1 else f"{len(times)} kernels"
    if op.ceiling.startswith("dram"):
        rate = f"{number(int(ours['bytes'].iloc[0]) / total)} GB/s of the minimum bytes"
    else:
        rate = f"{number(int(ours['flops'].iloc[0]) / total / 1e3)} TFLOP/s of the minimum FLOP"
    return [f"Proton: {who} {number(total / CALLS / 1e3)} µs a call{parts}, {rate}; counters were not collected"]


if __name__ == "__main__":
    main(*sys.argv[1:])
