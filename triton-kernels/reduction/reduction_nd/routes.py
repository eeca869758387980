"""Which reductions leave v05_split's own kernel, and with which tiles: by bytes, alignment and lanes, on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime import KernelInterface

from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.reduction.reduction_nd.axes import Axes, along_reduced, count, least_padded
from kernel_twins._triton.reduction.reduction_nd.packed_columns import reduction_nd_packed_columns_kernel
from kernel_twins._triton.reduction.reduction_nd.packed_rows import reduction_nd_packed_rows_kernel
from kernel_twins._triton.reduction.reduction_nd.whole_columns import reduction_nd_whole_columns_kernel

PACK = 16  # bytes
SEEN = 16  # elements of which all sizes and distances must be multiples for the compiler to see packs by itself
WARPS = 4
# Registers of a thread, at most: without a limit ptxas saves them, and waits for each load before the next one. With
# more, an SM has fewer programs.
ROW_REGISTERS, COLUMN_REGISTERS = 96, 80
TILE, TILE_OF_PLACES = 4096, 2048  # elements, half as many if a lane keeps positions
LARGEST = 2**31 - 2**20  # numbers of 32 bits, with room for tiles beyond the end
PROGRAMS = 16  # of an SM, where parts are short enough: more than run at once, so that slow SMs take fewer
FEWEST_PROGRAMS = 4  # of an SM, for which parts may be as short as a tile
CHUNKS = 4  # a part's tiles, at least, if programs are more than that

LANES = 384  # of an SM, from which on lanes with whole outputs keep the memory busy
MOST_ROWS, LONGEST = 128, 4096  # elements of such an output, if columns are many in a line, and if they are few
SHORT_LINE = 256  # columns of a line that is a tile's
SHORT_RUN = 32  # bytes of a run that a lane reads element by element, while its neighbours read theirs
IN_FLIGHT, LOADS = 128, 32  # a lane's bytes and loads

NARROW = 2  # bytes of an element; neighbouring lanes with one of four bytes each fill a sector as well as packs do
LEAST_BYTES = 50 * 2**20  # of x, whose columns packs pay for with a second launch: less stays in L2
FEWEST_ROWS = 64  # of a class, from which on a plane of totals for it is small beside them
ARGMAX_ROW = 8192  # elements, up to which v05's three reductions of a tile cost more than the tile's elements
ARGMAX_LANES = 32  # of a row, at most, if outputs are many: merging positions is dear, and more so between warps
FEWEST_PACKS = 8  # of a row or a line of columns: v05 has several shorter ones in a tile, padded to a power of two
ARGMAX_LINE = 4  # packs of a line, from which on its columns' positions are dearer than what the first and last waste
COLUMN_PACKS = (32, 16, 8)  # of a tile, from wide to narrow
FEWEST_TURNS = 16  # rows of a class of whole matrices, from which on the indices of a tile's totals are few
FOLDED_PACKS = (32, 64, 128)  # of a tile of several rows
FOLDED_ELEMENTS = 2**20  # from which on few columns are worth a second launch


class Route(NamedTuple):
    """A launch: the kernel's grid, its arguments behind the tensors, its constants, and what it leaves to merge."""

    kernel: KernelInterface
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    planes: int = 0  # of totals; none if the kernel writes the results
    scratch: int = 0  # elements of the workspace behind the planes


def route_of(x: Tensor, kept: Axes, reduced: Axes, kind: str) -> Route | None:
    """The launch of another kernel than v05_split's; None where that one serves best, or is the only one."""
    if count(kept) * count(reduced) == 0:
        return None
    along = along_reduced(kept, reduced)
    if kind == "argmax" and len(reduced) > 1:
        return _packed_matrices(x, kept, reduced) if along and len(reduced) == 2 else None
    if _fill_lanes(x, kept, reduced, along):
        return _whole_columns(x, kept, reduced, kind)
    inner = (reduced if along else kept)[-1]
    pack = PACK // x.element_size()
    distances = [axis.stride for axis in (*kept, *reduced) if axis is not inner]
    if x.data_ptr() % PACK or inner.stride != 1 or not _are_apart(kept, reduced):
        return None
    if all(size % SEEN == 0 for size in (*distances, inner.size)):
        is_short = kind == "argmax" and along and inner.size <= ARGMAX_ROW
        return _packed_rows(x, kept, reduced, kind) if is_short else None
    if along:
        return _packed_rows(x, kept, reduced, kind) if inner.size >= pack else None
    if len(reduced) > 1 or max(reduced[0].size, kept[-1].size) >= LARGEST:
        return None
    return _folded_columns(x, kept, reduced, kind) or _packed_columns(x, kept, reduced, kind)


def _are_apart(kept: Axes, reduced: Axes) -> bool:
    """Whether axes nest in memory: then x's last elements are those of the last run of the last output, and no others.

    Expanded axes do not, nor do views whose rows overlap.
    """
    end = 1
    for axis in sorted((*kept, *reduced), key=lambda axis: axis.stride):
        if axis.size > 1:
            if axis.stride < end:
                return False
            end += (axis.size - 1) * axis.stride
    return True


def _extent(kept: Axes, reduced: Axes) -> int:
    return 1 + sum((axis.size - 1) * axis.stride for axis in (*kept, *reduced))


def _constants(kind: str, pack: int) -> dict[str, Any]:
    return {"KIND": "sum" if kind == "mean" else kind, "VECTOR": pack, "num_warps": WARPS}


def _of_columns(kind: str, pack: int) -> dict[str, Any]:
    return _constants(kind, pack) | {"maxnreg": COLUMN_REGISTERS}


def _unroll(kind: str) -> int:
    """Tiles whose loads are in flight together: argmax's have half as many elements."""
    return TILE // TILE_OF_PLACES if kind == "argmax" else 1


def _divisor(reduced: Axes, kind: str) -> float:
    return float(count(reduced)) if kind == "mean" else 1.0


def _parts(x: Tensor, tiles: int, chunks: int) -> int:
    """The parts of a tile's chunks: as many as make several programs for each place on the GPU."""
    sms = sm_count(x.device)
    return max(1, min(PROGRAMS * sms // tiles, max(chunks // CHUNKS, min(chunks, FEWEST_PROGRAMS * sms // tiles))))


def _power_below(number: int) -> int:
    return 2 ** (max(number, 1).bit_length() - 1)


# ----------------------------------------------------------------------------------------------------------------------
# Lanes with whole outputs
# ----------------------------------------------------------------------------------------------------------------------


def _width(x: Tensor, kept: Axes, reduced: Axes) -> int:
    """Neighbouring outputs that a lane reads at once: as many as all distances and the line allow."""
    if x.data_ptr() % PACK or kept[-1].stride != 1:
        return 1
    distances = [axis.stride for axis in (*kept[:-1], *reduced)]
    return math.gcd(PACK // x.element_size(), kept[-1].size, *distances)


def _fill_lanes(x: Tensor, kept: Axes, reduced: Axes, along: bool) -> bool:
    outputs, elements = count(kept), count(reduced)
    if len(reduced) > 2 or elements > LONGEST or outputs >= LARGEST:
        return False
    if outputs // _width(x, kept, reduced) < LANES * sm_count(x.device):
        return False
    if along:
        run = reduced[-1].size
        return run * x.element_size() <= SHORT_RUN and 0 < kept[-1].stride <= 2 * run
    return kept[-1].stride > 0 and (elements <= MOST_ROWS or kept[-1].size < SHORT_LINE)


def _whole_columns(x: Tensor, kept: Axes, reduced: Axes, kind: str) -> Route:
    outputs, elements, width = count(kept), count(reduced), _width(x, kept, reduced)
    block, turns = tile_of_lanes(x, outputs, elements, width)
    kept_axes, (sizes, strides, _) = tuple(zip(*kept, strict=True)), zip(*reduced, strict=True)
    is_ordered = are_ordered(kept_axes[0], kept_axes[2])
    constants = {"BLOCK": block, "TURNS": turns, "ORDERED": is_ordered} | _constants(kind, width)
    arguments = *kept_axes, sizes, strides, outputs, elements, _divisor(reduced, kind)
    return Route(reduction_nd_whole_columns_kernel, (triton.cdiv(outputs, block),), arguments, constants)


def tile_of_lanes(x: Tensor, outputs: int, elements: int, width: int) -> tuple[int, int]:
    """The outputs of a program, and the elements of each that a lane asks for at once."""
    programs = outputs // width // (32 * WARPS * sm_count(x.device))  # of an SM, if each lane has one place
    several = min(4, _power_below(programs // 8))
    turns = max(1, min(LOADS // several, IN_FLIGHT // (several * width * x.element_size())))
    turns = triton.cdiv(elements, triton.cdiv(elements, turns))  # of all turns the same number
    return 32 * WARPS * several * width, turns


def are_ordered(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether out's elements lie in the order of the outputs of these kept axes."""
    return all(step == math.prod(sizes[at + 1 :]) for at, step in enumerate(steps))


# ----------------------------------------------------------------------------------------------------------------------
# Packs
# ----------------------------------------------------------------------------------------------------------------------


def _packed_rows(x: Tensor, kept: Axes, reduced: Axes, kind: str) -> Route | None:
    pack, run, outputs = PACK // x.element_size(), reduced[-1].size, count(kept)
    runs = count(reduced) // run
    is_skewed = any(size % pack for size in (run, *(axis.stride for axis in (*kept, *reduced[:-1]))))
    packs = triton.cdiv(run + (pack - 1 if is_skewed else 0), pack)
    tile = (TILE_OF_PLACES if kind == "argmax" else TILE) // pack
    if max(runs * packs * pack, outputs) >= LARGEST or (runs == 1 and packs < FEWEST_PACKS):
        return None
    if runs == 1:
        lanes = least_padded(packs, min(tile, ARGMAX_LANES) if kind == "argmax" else tile)
        most = _power_below(outputs // (FEWEST_PROGRAMS * sm_count(x.device)))
        rows = min(tile // lanes, most)
        if rows == most:  # few outputs: a tile has more of each
            lanes = min(tile // rows, triton.next_power_of_2(packs))
    else:  # lanes go on with the next run
        rows = least_padded(outputs, max(tile // triton.next_power_of_2(max(packs, 2 * 32)), 1))
        lanes = min(tile // rows, triton.next_power_of_2(runs * packs))
    tiles = triton.cdiv(outputs, rows)
    parts = _parts(x, tiles, triton.cdiv(runs * packs, lanes))
    kept_axes, (sizes, strides, _) = tuple(zip(*kept, strict=True)), zip(*reduced, strict=True)
    constants = {"K": rows, "P": lanes, "SKEWED": is_skewed, "SPLIT": parts > 1, "UNROLL": _unroll(kind)}
    constants |= _constants(kind, pack) | {"maxnreg": ROW_REGISTERS}
    arguments = *kept_axes, sizes, strides, outputs, runs, packs, _extent(kept, reduced), _divisor(reduced, kind)
    planes = parts if parts > 1 else 0
    return Route(reduction_nd_packed_rows_kernel, (tiles, parts), arguments, constants, planes)


def _packed_columns(x: Tensor, kept: Axes, reduced: Axes, kind: str) -> Route | None:
    pack, line, outputs, (rows, stride, _) = PACK // x.element_size(), kept[-1].size, count(kept), reduced[0]
    classes = pack // math.gcd(pack, stride)
    fewest = ARGMAX_LINE if kind == "argmax" else FEWEST_PACKS
    if x.element_size() > NARROW or line < fewest * pack or rows < FEWEST_ROWS * classes:
        return None
    if outputs * rows * x.element_size() < LEAST_BYTES:
        return None
    packs = triton.cdiv(line + pack - 1, pack)  # that a row touches, at most
    padded = {lanes: triton.cdiv(packs, lanes) * lanes for lanes in COLUMN_PACKS}
    # A narrower tile only if it leaves clearly fewer lanes idle.
    lanes = next(each for each in COLUMN_PACKS if 8 * padded[each] <= 9 * min(padded.values()))
    tiles = triton.cdiv(packs, lanes)
    block = (TILE_OF_PLACES if kind == "argmax" else TILE) // (pack * lanes)
    programs = outputs // line * tiles * classes
    parts = _parts(x, programs, triton.cdiv(rows // classes, block))
    planes = parts * classes if parts * classes > 1 else 0
    kept_axes = tuple(zip(*kept, strict=True))
    constants = {"BLOCK_R": block, "PACKS": lanes, "SPLIT": planes > 0, "FOLDED": 0, "LINE": 0, "WHOLE": False}
    numbers = line, stride, rows, tiles, classes, outputs, _extent(kept, reduced), _divisor(reduced, kind), 1
    arguments, constants = (*kept_axes, *numbers), constants | {"UNROLL": _unroll(kind)} | _of_columns(kind, pack)
    return Route(reduction_nd_packed_columns_kernel, (programs, parts), arguments, constants, planes)


def _packed_matrices(x: Tensor, kept: Axes, reduced: Axes) -> Route | None:
    """Argmax along rows and columns, by the kernel of columns: tiles are wide, as each leaves one total."""
    pack, outputs, (rows, stride, row_step), columns = PACK // x.element_size(), count(kept), *reduced
    classes = pack // math.gcd(pack, stride)
    if x.data_ptr() % PACK or columns.stride != 1 or not _are_apart(kept, reduced):
        return None
    if columns.size < ARGMAX_LINE * pack or rows < FEWEST_TURNS * classes or max(rows, columns.size) >= LARGEST:
        return None
    if outputs * count(reduced) * x.element_size() < LEAST_BYTES:
        return None
    packs = triton.cdiv(columns.size + pack - 1, pack)
    lanes = least_padded(packs, TILE_OF_PLACES // pack)
    tiles, block = triton.cdiv(packs, lanes), TILE_OF_PLACES // (pack * lanes)
    programs = outputs * tiles * classes
    parts = _parts(x, programs, triton.cdiv(rows // classes, block))
    axes = tuple(zip(*kept, columns, strict=True))
    constants = {"BLOCK_R": block, "PACKS": lanes, "SPLIT": True, "FOLDED": 0, "LINE": 0, "WHOLE": True}
    numbers = columns.size, stride, rows, tiles, classes, outputs, _extent(kept, reduced), 1.0, row_step
    arguments, constants = (*axes, *numbers), constants | {"UNROLL": _unroll("argmax")} | _of_columns("argmax", pack)
    planes = parts * classes * tiles
    return Route(reduction_nd_packed_columns_kernel, (programs, parts), arguments, constants, planes)


def _folded_columns(x: Tensor, kept: Axes, reduced: Axes, kind: str) -> Route | None:
    """Few columns whose rows continue in memory: as many rows are one as fill a tile's packs best."""
    pack, line, (rows, stride, _) = PACK // x.element_size(), kept[-1].size, reduced[0]
    unit = pack // math.gcd(pack, line)  # rows that are whole packs together
    packs = unit * line // pack
    if kind == "argmax" or len(kept) > 1 or stride != line or line >= FEWEST_PACKS * pack:
        return None
    if line * rows < FOLDED_ELEMENTS:
        return None
    lanes = max(
        (each for each in FOLDED_PACKS if each >= packs),
        key=lambda each: (each // packs * packs / each, -each),
    )
    folded = lanes // packs * unit
    lines = triton.cdiv(rows, folded)
    block = TILE // (pack * lanes)
    parts = _parts(x, 2, triton.cdiv(lines, block))  # few, as one program merges them
    kept_axes = tuple(zip(*kept, strict=True))
    constants = {
        "BLOCK_R": block, "PACKS": lanes, "SPLIT": True, "FOLDED": triton.next_power_of_2(folded),
        "LINE": triton.next_power_of_2(line), "WHOLE": False, "UNROLL": 1,
    } | _of_columns(kind, pack)  # fmt: skip
    numbers = folded * line, folded * line, lines, 1, 1, line, _extent(kept, reduced), _divisor(reduced, kind), 1
    arguments, scratch = (*kept_axes, *numbers), parts * folded * line
    return Route(reduction_nd_packed_columns_kernel, (1, parts), arguments, constants, parts, scratch)
