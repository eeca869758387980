"""Finds writes to registers that a wgmma may still be reading, in a kernel's SASS.

A wgmma runs asynchronously. Its left operand may be in registers, which must keep their values until a wait covers the
group in which the wgmma was committed. ptxas before CUDA 13.3 may reuse such registers too early. The release notes of
13.3 name it as fixed, triton-lang/triton#9433 and #11781 have wrong results on an H100, and
fla-org/flash-linear-attention#1262 has one PTX whose result depends on the assembler. These kernels are compiled by
older versions, ptxas of CUDA 13.0 and of Triton's wheel, and a test of results finds a race only if it is lost. In SASS
only waits protect the registers, so they can be checked.

In SASS, wgmma is HGMMA (IGMMA, BGMMA and QGMMA for other types). With the operands ``R24, R120, gdesc[UR28]`` the left
operand, four registers of a thread, begins at R120. ``gsb0`` at its end commits it and all before it as a group.
``WARPGROUP.DEPBAR.LE gsb0, n`` waits until at most the last n committed groups are unfinished.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_twins.compiler import disassembly

Listing = Sequence[tuple[int, str]]  # address and text of each instruction, as disassembly.sass has them

_OPERAND_REGISTERS = 4
_MNEMONIC = re.compile(r"(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*)")
_WGMMA = re.compile(r"R(\d+|Z), R(\d+)(?:\.reuse)?, gdesc")
_WAIT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_DESTINATION = re.compile(r"(?:!?U?PT?\d?, )*R(\d+)\b")
_TARGET = re.compile(r"0x([0-9a-f]+)$")
# Opcodes in bits 0 to 11 of an instruction of 16 bytes; bits 12 to 15 are its predicate.
_WGMMA_OF_REGISTERS = re.compile(rb"[\xf0-\xf3][" + re.escape(bytes(range(0x0D, 0x100, 0x10))) + rb"]")

# Instructions that write no register, though their first operand may be one that they read; those that write only
# predicates; and those that write two registers without a suffix that says so.
_READS = ("BAR", "BRX", "BRXU", "CALL", "JMX", "JMXU", "NANOSLEEP", "R2B", "R2P", "RET", "WARPSYNC")
_SETS = ("FCHK", "R2P")
_PAIRS = re.compile(r"\.WIDE|^D(?:ADD|MUL|FMA|MNMX)\b|^CS2R(?!\.32)|^LEPC|^(?:F2F|I2F)\.F64|^F2I\b.*\.[US]64")
_MATRICES = re.compile(r"\.MT?88\.(\d)")


@dataclass(frozen=True, slots=True, order=True)
class Overwrite:
    """A write to a register that a wgmma may be reading; both by their addresses."""

    wgmma: int
    write: int
    register: int


def overwrites(listing: Listing) -> list[Overwrite]:
    """All hazards in a kernel, over every path through it; predicates are not evaluated.

    ValueError if a wgmma may be running at a jump whose target the listing does not name.
    """
    at = {address: i for i, (address, _) in enumerate(listing)}
    returns = [i + 1 for i, (_, text) in enumerate(listing) if _parts(text)[1].startswith("CALL")]
    operands = {address: set(range(first, first + _OPERAND_REGISTERS)) for address, first in _of_registers(listing)}
    # For each wgmma the least number of groups committed since it was issued, its own included.
    running: dict[int, dict[int, int]] = {0: {}}
    todo = [0] if listing else []
    found = set()
    while todo:
        i = todo.pop()
        address, text = listing[i]
        before = running[i]
        for register in _written(text):
            found |= {Overwrite(wgmma, address, register) for wgmma in before if register in operands[wgmma]}
        after = _after(before, address, text, address in operands)
        for successor in _successors(listing, at, returns, i, bool(after)):
            known = running.get(successor)
            merged = dict(after) if known is None else dict(known)
            for wgmma, commits in after.items():
                merged[wgmma] = min(commits, merged.get(wgmma, commits))
            if merged != known:
                running[successor] = merged
                todo.append(successor)
    return sorted(found)


def reads_registers(listing: Listing) -> bool:
    """Whether a kernel has a wgmma whose left operand is in registers."""
    return any(True for _ in _of_registers(listing))


def kernels(binary: Path) -> dict[str, Listing]:
    """The kernels with such a wgmma in a cubin or the extension, built for 9.0a; only these are disassembled."""
    found: dict[str, Listing] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, cubin in enumerate(disassembly.cubins(binary)):
            if symbols := [symbol for symbol, code in _code(cubin) if _has_wgmma_of_registers(code)]:
                path = Path(folder) / f"{i}.cubin"
                path.write_bytes(cubin)
                found |= disassembly.sass(path, symbols)
    return found


def _of_registers(listing: Listing) -> Iterator[tuple[int, int]]:
    """Address and first register of each left operand."""
    for address, text in listing:
        _, mnemonic, rest = _parts(text)
        if _is_wgmma(mnemonic) and (match := _WGMMA.match(rest)):
            yield address, int(match[2])


def _parts(text: str) -> tuple[str, str, str]:
    """Predicate (or an empty string), mnemonic with its suffixes, operands."""
    match = _MNEMONIC.match(text)
    assert match is not None, text
    return match[1] or "", match[2], match[3].strip()


def _is_wgmma(mnemonic: str) -> bool:
    return mnemonic[1:5] == "GMMA"


def _after(running: dict[int, int], address: int, text: str, is_of_registers: bool) -> dict[int, int]:
    """The wgmmas that may run after an instruction. A predicated one may be skipped: it can start one, but end none."""
    predicate, mnemonic, rest = _parts(text)
    after = running
    if is_of_registers:
        after = {**after, address: 0}
    if _is_wgmma(mnemonic) and rest.endswith("gsb0") and not predicate:
        after = {wgmma: commits + 1 for wgmma, commits in after.items()}
    if mnemonic.startswith("WARPGROUP.DEPBAR") and not predicate and (match := _WAIT.match(rest)):
        after = {wgmma: commits for wgmma, commits in after.items() if commits <= int(match[1], 16)}
    return after


def _successors(
    listing: Listing, at: dict[int, int], returns: Sequence[int], i: int, is_running: bool
) -> Iterator[int]:
    predicate, mnemonic, rest = _parts(listing[i][1])
    name = mnemonic.partition(".")[0]
    target = _TARGET.search(rest) if name in ("BRA", "CALL", "JMP", "WARPSYNC") else None
    if target and (to := int(target[1], 16)) in at:
        yield at[to]
    elif name in ("BRA", "BRX", "BRXU", "CALL", "JMP", "JMX", "JMXU") and is_running:
        raise ValueError(
            f"{listing[i][1]!r} at {listing[i][0]:#x} goes nobody knows where while a wgmma may be running"
        )
    if name == "RET":
        yield from returns
    # A branch may have further conditions before its target: another predicate, or diverging threads.
    ends = name in ("EXIT", "RET", "BRX", "BRXU", "JMX", "JMXU") or (name in ("BRA", "JMP") and rest.startswith("0x"))
    if (predicate or not ends) and i + 1 < len(listing):
        yield i + 1


def _written(text: str) -> range:
    """The registers that an instruction writes if it is executed."""
    _, mnemonic, rest = _parts(text)
    name = mnemonic.partition(".")[0]
    if name in _READS or name in _SETS or name.endswith("SETP") or (match := _DESTINATION.match(rest)) is None:
        return range(0)
    first = int(match[1])
    return range(first, first + _width(mnemonic))


def _width(mnemonic: str) -> int:
    """The number of registers of a destination; for an unknown mnemonic, what its suffixes say."""
    if _is_wgmma(mnemonic):
        shape = re.search(r"\.64x(\d+)x", mnemonic)
        assert shape is not None, mnemonic
        return int(shape[1]) // (4 if re.search(r"x\d+\.F16", mnemonic) else 2)
    if match := _MATRICES.search(mnemonic):
        return int(match[1])
    if mnemonic[1:4] == "MMA":
        return 2 if ".F16" in mnemonic and ".F32" not in mnemonic else 4
    if ".128" in mnemonic:
        return 4
    return 2 if ".64" in mnemonic or _PAIRS.search(mnemonic) else 1


def _has_wgmma_of_registers(code: bytes) -> bool:
    return any(match.start() % 16 == 0 for match in _WGMMA_OF_REGISTERS.finditer(code))


def _code(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and instructions of each kernel, from the sections of an ELF file."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<I20xQQ", cubin, headers + i * size) for i in range(count)]
    _, strings, _ = sections[names]
    for name, offset, length in sections:
        label = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        if label.startswith(".text."):
            yield label.removeprefix(".text."), cubin[offset : offset + length]
