"""The static view: what the compilers made of every step, for compute capability 9.0a, read without a GPU.

One row for every kernel that the profile case may launch: of a CUDA step all instantiations of the case's dtype (which
of them is launched depends on sizes and alignment), of a Triton step what the launcher compiles for the case, with the
configuration of the reference GPU. ``code`` digests all that a step is compiled to, of CUDA in every dtype, in the form
that measurements carry it: what was measured with other headers or another configuration is told by it on machines that
compile nothing. The rows are committed; a change of them is accepted by committing new ones with the reason. Sizes are
in bytes, registers and stack those of a thread, shared memory that of a block: of CUDA the static part (what a launch
adds stands in no binary), of Triton all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_twins import OPS, remedies
from kernel_twins.compiler import aot, disassembly
from kernel_twins.compiler.disassembly import ARCH, CLASSES, RESERVED_SHARED, Usage
from kernel_twins.errors import UnavailableError
from kernel_twins.report.rows import identity, store
from kernel_twins.report.rows.base import CannotRunError
from kernel_twins.spec import Backend

FILE = store.DATA / f"static-{ARCH}.csv"
KEY = ["op", "step", "backend", "kernel"]
GATED = ["registers", "stack_bytes", "shared_bytes"]  # what is spilled lies on the stack
STATIC = [*KEY, *GATED, "spill_bytes", "threads", "instructions", *CLASSES, "toolchain", "code", "reason"]
"""``spill_bytes``: what the STL instructions store. ``threads``: the bound on a block's that the binary states."""

Key = tuple[str, str, str, str]
Cell = tuple[str, str, str]  # operation, step, backend
Progress = Callable[[str], None]

COMPILERS: dict[Backend, str] = {"cuda": "nvcc", "triton": "triton"}
_COMMAND = 'python profiling/ncu_report.py static --reason "..."'


def measure(progress: Progress) -> pd.DataFrame:
    """The rows of all steps in both languages, as text; compiles every Triton step and takes about a minute.

    CannotRunError names the command that is missing: the build, or an installation.
    """
    try:
        rows = [*_cuda_rows(progress), *_triton_rows(progress)]
    except UnavailableError as error:
        raise CannotRunError(str(error)) from error
    return pd.DataFrame(rows, columns=STATIC)


def record(reason: str, progress: Progress) -> int:
    """Measure, and write what changed with the reason; return the number of rows that changed, came or went.

    Rows that did not change keep their reason. ValueError where a recorded row changed or went and no reason is given.
    """
    before, rows = _by_key(store.read(FILE, STATIC)), _by_key(measure(progress))
    unlike = [
        key for key, row in rows.items() if key not in before or row | {"reason": before[key]["reason"]} != before[key]
    ]
    gone = [key for key in before if key not in rows]
    if not reason.strip() and (unexplained := [key for key in [*unlike, *gone] if key in before]):
        names = ", ".join(map(_spell, unexplained))
        raise ValueError(f'{len(unexplained)} recorded rows changed ({names}): say why with --reason "..."')
    for key, row in rows.items():
        row["reason"] = reason.strip() if key in unlike else before[key]["reason"]
    store.write(FILE, pd.DataFrame(rows.values(), columns=STATIC))
    return len(unlike) + len(gone)


def toolchain(backend: Backend, version: str) -> str:
    """The compiler as the rows spell it, such as ``nvcc 13.0.88``."""
    return f"{COMPILERS[backend]} {version}"


def codes() -> dict[Cell, tuple[str, str]]:
    """The recorded toolchain and code of every step in both languages; imports neither torch nor Triton."""
    rows = store.read(FILE, STATIC).to_dict("records")
    return {(row["op"], row["step"], row["backend"]): (row["toolchain"], row["code"]) for row in rows}


def unrecorded() -> dict[Cell, str]:
    """The steps that have no row, and what makes one; no GPU is needed for it."""
    recorded = codes()
    cells = ((op.name, step.name, backend) for op in OPS.values() for step in op.steps for backend in step.backends)
    return {cell: f"run `{remedies.BUILD}`, then `{_COMMAND}`" for cell in cells if cell not in recorded}


def differences(thorough: bool = False) -> list[str]:
    """Where what is compiled here is not what is recorded, a line each.

    Only the extension's resources are looked at, in 0.1 s and without torch or Triton. ``thorough`` adds the code of
    every CUDA step, and compiles the Triton steps for their resources and code; it takes 30 s, and refuses an
    extension that is older than its sources.

    [] where nothing can be compared. For CUDA: no rows, no extension, no cuobjdump, an extension for another
    architecture, or one that another nvcc compiled, by the notes that ptxas leaves in its cubins. For Triton: no
    cuobjdump, or another version of Triton than the recorded one.
    """
    return _cuda_differences(thorough) + (_triton_differences() if thorough else [])


def not_compared() -> str:
    """Why the built extension cannot be held against the recorded rows; empty where it can."""
    libraries = disassembly.find_extensions()
    if not libraries:
        return f"there is no built extension: run `{remedies.BUILD}`"
    if disassembly.find_cuobjdump() is None:
        return "there is no cuobjdump: it comes with the CUDA toolkit and with Triton"
    built, recorded = disassembly.compiler_version(libraries), {row["toolchain"] for row in _recorded("cuda").values()}
    if not built or recorded != {toolchain("cuda", built)}:
        return f"the extension was built by nvcc {built or 'of unknown version'}, recorded is {', '.join(recorded)}"
    usages = _usages(libraries)
    if not usages:
        return f"the extension was not built for {ARCH}"
    first = {op.name: f"{op.name}_{steps[0].name}_" for op in OPS.values() if (steps := op.steps_of("cuda"))}
    if lacking := [op for op, name in first.items() if not any(name in symbol for symbol in usages)]:
        return f"the build lacks steps of {', '.join(lacking)}: run `{remedies.BUILD}`"
    return ""


def _cuda_differences(thorough: bool) -> list[str]:
    recorded, libraries = _recorded("cuda"), disassembly.find_extensions()
    if not libraries or not_compared():
        return []
    usages = _usages(libraries)
    newer = disassembly.newer_sources(libraries, store.ROOT)
    rebuild = f"{newer[0]} is newer than the build: run `{remedies.BUILD}`" if newer else ""
    if thorough and rebuild:
        return [rebuild]
    digests = identity.sass_digests(libraries) if thorough else {}
    found: dict[Key, Mapping[str, str]] = {}
    for op, step, symbols in _built(usages):
        code = {"code": identity.cuda_digest(op, step, digests)} if thorough else {}
        found |= {(op, step, "cuda", name): _gated(usages[symbol]) | code for symbol, name in symbols.items()}
    return _compare(recorded, found, rebuild)


def _triton_differences() -> list[str]:
    recorded = _recorded("triton")
    try:
        import triton

        if {row["toolchain"] for row in recorded.values()} != {toolchain("triton", triton.__version__)}:
            return []
        return _compare(recorded, _by_key(pd.DataFrame(_triton_rows(lambda step: None), columns=STATIC)), "")
    except (ImportError, UnavailableError):
        return []


def told(rows: pd.DataFrame, op: str, step: str, backend: str, launched: Mapping[str, float]) -> str:
    """One line on a step's SASS for the log, with ranges where it has several kernels; empty where there is no row.

    ``launched`` are the counters of the profiled call's longest kernel: they tell the block's size, and the shared
    memory that CUDA's launches add, without which nothing is said of how many blocks an SM holds.
    """
    mine = rows[(rows["op"] == op) & (rows["step"] == step) & (rows["backend"] == backend)]
    if mine.empty:
        return ""
    spilled = span(mine["spill_bytes"])
    mix = [f"{span(mine[name])} {name}" for name in CLASSES if mine[name].astype(int).any()]
    return (
        f"{f'{len(mine)} kernels: ' if len(mine) > 1 else ''}{span(mine['registers'])} registers, "
        f"{'no spills' if spilled == '0' else f'{spilled} bytes spilled'}, {span(mine['instructions'])} instructions"
        + (f" ({', '.join(mix)})" if mix else "")
        + _resident(launched)
    )


def _resident(launched: Mapping[str, float]) -> str:
    keys = ("registers_per_thread", "shared_mem_per_block_static", "shared_mem_per_block_dynamic", "block_size")
    if any(f"launch__{key}" not in launched for key in keys):
        return ""
    registers, static, dynamic, threads = (int(launched[f"launch__{key}"]) for key in keys)
    blocks, limit = occupancy(registers, static + dynamic, threads)
    return f", {blocks} blocks an SM by {limit}" if blocks != 1 else f", 1 block an SM by {limit}"


def span(column: pd.Series) -> str:
    """The least and the greatest number of a column, one of them where they are the same."""
    numbers = column.astype(int)
    low, high = numbers.min(), numbers.max()
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _cuda_rows(progress: Progress) -> Iterator[dict[str, str]]:
    libraries = disassembly.require_extensions()
    if newer := disassembly.newer_sources(libraries, store.ROOT):
        raise CannotRunError(f"{newer[0]} is newer than the built extension: run `{remedies.BUILD}`")
    usages = _usages(libraries)
    limits = disassembly.of_all(libraries, lambda library: disassembly.block_limits(library, ARCH))
    compiler = toolchain("cuda", disassembly.compiler_version(libraries) or "of an unknown version")
    bodies = disassembly.of_all(libraries, lambda library: disassembly.sass(library, arch=ARCH))
    digests = identity.kernel_digests(bodies)
    for op, step, symbols in _built(usages):
        progress(f"{op} {step} cuda")
        if not symbols:
            raise disassembly.not_built(op, step)
        code = identity.cuda_digest(op, step, digests)
        for symbol, name in symbols.items():
            about = (usages[symbol], limits.get(symbol), [text for _, text in bodies[symbol]])
            yield _row((op, step, "cuda", name), *about, compiler, code)


def _usages(libraries: Iterable[Path]) -> dict[str, Usage]:
    return disassembly.of_all(libraries, lambda library: disassembly.resource_usage(library, ARCH))


def _built(usages: Mapping[str, Usage]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Every CUDA step with its kernels for the profile case's dtype: names by symbol."""
    for op in OPS.values():
        for step in op.steps_of("cuda"):
            dtype = (op.profile_case_of(step, "cuda") or op.profile_case).dtype
            yield op.name, step.name, disassembly.step_kernels(usages, op.name, step.name, dtype)


def _triton_rows(progress: Progress) -> Iterator[dict[str, str]]:
    for op in OPS.values():
        for step in op.steps_of("triton"):
            progress(f"{op.name} {step.name} triton")
            kernels = aot.compiled(op, step, op.profile_case_of(step, "triton") or op.profile_case)
            code = identity.ptx_digest(kernel.asm["ptx"] for kernel in kernels)
            for index, kernel in enumerate(kernels, 1):
                # One call may launch a kernel twice, compiled apart because another argument is a multiple of 16.
                name = kernel.name if index == 1 else f"{kernel.name} #{index}"
                yield _triton_row((op.name, step.name, "triton", name), kernel, code)


def _triton_row(key: Key, kernel: Any, code: str) -> dict[str, str]:
    import triton

    with aot.cubin(kernel) as cubin:
        usage = disassembly.resource_usage(cubin)[kernel.name]
        limit = disassembly.block_limits(cubin).get(kernel.name)
        body = [text for _, text in disassembly.sass(cubin)[kernel.name]]
    usage = Usage(usage.registers, kernel.metadata.shared, usage.stack_bytes)
    return _row(key, usage, limit, body, toolchain("triton", triton.__version__), code)


def _row(key: Key, usage: Usage, limit: int | None, body: list[str], compiler: str, code: str) -> dict[str, str]:
    return {
        **dict(zip(KEY, key, strict=True)),
        **_gated(usage),
        "spill_bytes": str(disassembly.spilled_bytes(body)),
        "threads": "" if limit is None else str(limit),
        "instructions": str(disassembly.length(body)),
        **{name: str(count) for name, count in disassembly.mix(body).items()},
        "toolchain": compiler,
        "code": code,
        "reason": "",
    }


def _gated(usage: Usage) -> dict[str, str]:
    return {name: str(getattr(usage, name)) for name in GATED}


def _recorded(backend: Backend) -> dict[Key, dict[str, str]]:
    return {key: row for key, row in _by_key(store.read(FILE, STATIC)).items() if row["backend"] == backend}


def _by_key(table: pd.DataFrame) -> dict[Key, dict[str, str]]:
    return {(row["op"], row["step"], row["backend"], row["kernel"]): row for row in table.to_dict("records")}


def _compare(
    recorded: Mapping[Key, Mapping[str, str]], found: Mapping[Key, Mapping[str, str]], instead: str
) -> list[str]:
    """A line for every gated number that differs, and for every step whose code does, where ``found`` has that.

    ``instead`` is a remedy that comes before accepting them.
    """
    remedy = instead or f"if it is meant, run `{_COMMAND}`"
    lines = []
    for key in sorted({*recorded, *found}):
        if key not in found:
            lines.append(f"{_spell(key)} is recorded and no longer compiled: {remedy}")
        elif key not in recorded:
            lines.append(f"{_spell(key)} is compiled and not recorded: {remedy}")
        else:
            for name in (*GATED, "code"):
                old, new = recorded[key][name], found[key].get(name)
                if new is not None and new != old:
                    where = key[:3] if name == "code" else key
                    lines.append(f"{_spell(where)}: {name} {old} → {new}: {remedy}")
    return list(dict.fromkeys(lines))  # the kernels of a step share its code


def _spell(key: Key | Cell) -> str:
    return " ".join(key)


def occupancy(registers: int, shared_bytes: int, threads: int) -> tuple[int, str]:
    """Blocks that an SM of compute capability 9.0 holds at once, and what limits them (all of them, where several do).

    Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Units of allocation:
    cuda_occupancy.h of the toolkit: a warp gets registers by 256, from one of the SM's four parts; a block gets shared
    memory by 128 bytes, CUDA's own 1 KiB included. ``shared_bytes`` is static and dynamic together. 0: none fits.
    """
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads is {threads}; a block has 1 to 1024")
    warps = -(-threads // 32)
    warps_by_registers = 4 * (65536 // 4 // (256 * -(-max(1, registers) // 8)))
    shared = 128 * -(-(shared_bytes + RESERVED_SHARED) // 128)
    limits = {
        "registers": warps_by_registers // warps,
        "shared memory": 233_472 // shared,
        "warps": 64 // warps,
        "blocks": 32,
    }
    blocks = min(limits.values())
    return blocks, " and ".join(name for name, limit in limits.items() if limit == blocks)
