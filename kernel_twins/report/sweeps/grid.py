"""R2: registers, stack, shared memory and the product's instruction over tiles, warps and stages; compiled, not run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import pandas as pd

from kernel_twins.compiler import aot, disassembly
from kernel_twins.report.rows import identity, store
from kernel_twins.report.sweeps import SWEEPS, compiling
from kernel_twins.report.sweeps.cells import Kernel, Setting

FILE = SWEEPS / "compile.csv"
KEY = ["kernel", "block_m", "block_n", "block_k", "dtype", "warps", "stages"]
FACTS = ["registers", "stack_bytes", "shared_bytes", "instruction", "refused"]
COLUMNS = [*KEY, *FACTS, "code", "compiler"]
"""``refused`` says why there is no kernel, or none that fits; sizes are empty where none was made. ``code`` is the
step's digest, empty for the bare product."""

LIMIT = 232_448  # bytes of shared memory that a block can have
REGISTERS = 256
"""Of a thread; whoever must hold more elements spills most of them, and takes minutes to compile."""
DOT = "dot"
WARPS = (1, 2, 4, 8)
STAGES = (1, 2, 3, 4, 5)
INSTRUCTIONS = {
    "wgmma": re.compile(r"wgmma\.mma_async"),
    "mma.sync": re.compile(r"\bmma\.sync"),
    "FMA": re.compile(r"\bfma\.rn\.f(?:16|32)"),
}
_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Tiled:
    """A kernel with the tiles that are tried; ``names`` are its constexprs for rows, columns and depth.

    ``beside`` columns a row are held by the block besides the tile. ``described`` are descriptors, whose types have the
    tile's sizes.
    """

    kernel: Kernel
    tiles: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    stages: tuple[int, ...] = STAGES
    beside: int = 0
    described: Callable[[int, int, int], Mapping[str, str]] | None = None

    def held(self, tile: tuple[int, ...], warps: int) -> int:
        """Elements that a thread holds."""
        return tile[0] * (tile[1] + self.beside) // (32 * warps)


def _described(m: int, n: int, k: int) -> dict[str, str]:
    sizes = {"a_desc": (m, k), "b_desc": (n, k), "out_desc": (m, n // 2)}
    return {name: f"tensordesc<bf16[{rows}, {columns}]>" for name, (rows, columns) in sizes.items()}


TILED = (
    Tiled(
        Kernel("matmul_bf16", "v06"),
        ((64, 64, 64), (128, 64, 64), (128, 128, 64), (128, 256, 64)),
        ("BLOCK_M", "BLOCK_N", "BLOCK_K"),
    ),
    Tiled(
        Kernel("linear", "v01"),
        ((64, 128, 64), (128, 128, 64), (128, 256, 64)),
        ("BLOCK_M", "BLOCK_N", "BLOCK_K"),
        described=_described,
    ),
    # Without a loop there is nothing to fetch ahead.
    Tiled(Kernel("softmax", "v03"), tuple((1, 2**k) for k in range(10, 15)), ("", "BLOCK"), (1,)),
    Tiled(Kernel("attention", "v04"), ((64, 64), (128, 64), (128, 128)), ("BLOCK_M", "BLOCK_N"), beside=128),
)
# Rows, columns and depth of the tile, type, precision.
DOTS = (
    *((m, n, 64, "bf16", "tf32") for m in (16, 32, 64, 128) for n in (8, 16, 64, 128)),
    (64, 64, 32, "fp32", "ieee"),
    (64, 64, 32, "fp32", "tf32"),
    (64, 64, 8, "fp32", "tf32"),
    (64, 64, 8, "bf16", "tf32"),
)
DOT_WARPS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Cell:
    key: tuple[str, ...]
    place: int  # in TILED; -1 for the bare product
    constants: Mapping[str, object]
    options: Mapping[str, int]
    types: Mapping[str, str] = field(default_factory=dict)
    over: str = ""  # why it is not compiled


def cells() -> Iterator[Cell]:
    for place, tiled in enumerate(TILED):
        name, dtype = f"{tiled.kernel.op.name}/{tiled.kernel.step.name}", tiled.kernel.case.dtype
        for tile, warps, stages in itertools.product(tiled.tiles, WARPS, tiled.stages):
            sizes = [*map(str, tile), *[""] * (3 - len(tile))]
            constants = {each: size for each, size in zip(tiled.names, tile, strict=True) if each}
            options = {"num_warps": warps, "num_stages": stages}
            types = tiled.described(*tile) if tiled.described else {}
            held = tiled.held(tile, warps)
            over = f"{held} elements a thread, which has {REGISTERS} registers" if held > REGISTERS else ""
            yield Cell((name, *sizes, dtype, str(warps), str(stages)), place, constants, options, types, over)
    for (m, n, k, dtype, precision), warps in itertools.product(DOTS, DOT_WARPS):
        if (dtype == "fp32" or k == 8) and warps != 4:
            continue
        given = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "PRECISION": precision}
        told = f"fp32 as {precision}" if dtype == "fp32" else dtype
        types = {"a": f"*{dtype}", "b": f"*{dtype}", "out": "*fp32"}
        key = (DOT, str(m), str(n), str(k), told, str(warps), "1")
        yield Cell(key, -1, given, {"num_warps": warps, "num_stages": 1}, types)


def record(progress: Callable[[str], None]) -> int:
    """Compile every cell in two processes, and write the table; returns the number of cells."""
    every = list(cells())
    rows = []
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn")) as pool:
        for cell, facts in zip(every, pool.map(_of_cell, every, chunksize=5), strict=True):
            progress(f"{' '.join(cell.key)}: {' '.join(filter(None, facts))}")
            rows.append([*cell.key, *facts, code(cell.key[0]), f"triton {version('triton')}"])
    FILE.parent.mkdir(parents=True, exist_ok=True)
    store.write(FILE, pd.DataFrame(rows, columns=COLUMNS))
    return len(rows)


def read() -> pd.DataFrame:
    return store.read(FILE, COLUMNS)


def code(kernel: str) -> str:
    """The digest of ``OP/STEP``, by which a row is stale where it is not the tree's."""
    op, _, step = kernel.partition("/")
    return identity.source_digest(op, step, "triton") if step else ""


_sources: dict[int, Any] = {}


def _of_cell(cell: Cell) -> list[str]:
    with compiling.anew():
        return compile_cell(cell)


def compile_cell(cell: Cell) -> list[str]:
    """The facts of ``FACTS``, as text."""
    if cell.over:
        return ["", "", "", "", cell.over]
    try:
        kernel = compiling.compile_source(_source(cell), cell.options)
    except Exception as error:  # each of the compiler's layers has its own kinds
        return ["", "", "", "", _reason(error)]
    with aot.cubin(kernel) as cubin:
        usage = disassembly.resource_usage(cubin)[kernel.name]
    shared = kernel.metadata.shared
    instruction = next((name for name, each in INSTRUCTIONS.items() if each.search(kernel.asm["ptx"])), "")
    refused = f"{shared} bytes of shared memory, of which a block has {LIMIT}" if shared > LIMIT else ""
    return [str(usage.registers), str(usage.stack_bytes), str(shared), instruction, refused]


def _source(cell: Cell) -> Any:
    if cell.place < 0:
        return _dot(cell)
    if cell.place not in _sources:
        kernel = TILED[cell.place].kernel
        _sources[cell.place] = compiling.launched(kernel.op, kernel.step, kernel.case).src
    return compiling.changed(_sources[cell.place], Setting(constants=cell.constants, types=cell.types))


def _dot(cell: Cell) -> Any:
    from triton.compiler import ASTSource

    from kernel_twins.report.sweeps.dot import dot_kernel

    attributes = {(index,): [["tt.divisibility", 16]] for index in range(len(cell.types))}
    constants = {(dot_kernel.arg_names.index(name),): value for name, value in cell.constants.items()}
    signature = {**cell.types, **dict.fromkeys(cell.constants, "constexpr")}
    return ASTSource(dot_kernel, signature, constants, attributes)


def _reason(error: BaseException) -> str:
    """The cause's last line, without what differs between compilations."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"/\S+/|0x[0-9a-f]+", "", lines[-1]).strip()
