"""attention v08_overlapped takes its exponentials under its own products: in machine code, not only in the source.

In Gluon, v10, v11 and v13 go on from it; in CUDA, v13 and v14 do so in whole tiles.
"""

from __future__ import annotations

import re

import pytest

from kernel_twins import ops
from kernel_twins.compiler import aot, disassembly
from kernel_twins.compiler.wgmma_hazards import Listing
from kernel_twins.spec import Case
from tests import forks

BACKWARD = ("v06_overlapped", "v07_register_reduction")
OP, STEP, LATE = "attention", "v08_overlapped", "v13_late_search"
GLUON = (STEP, "v10_persistent", "v11_skip_rescale", LATE)
TILE = 64  # exponentials that a thread takes of a tile of 64 queries and 128 keys
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([01])")


def between_waits(listing: Listing) -> list[int]:
    """Exponentials behind each wait for all products but the last ones, and before the next wait, for these."""
    found: list[int] = []
    counts = False
    for _, text in listing:
        if match := _WAIT.search(text):
            counts = match[1] == "1"
            found += [0] if counts else []
        elif counts and "MUFU.EX2" in text:
            found[-1] += 1
    return found


def of_gluon(step: str, d: int, op: str = OP) -> Listing:
    kernels = aot.compiled(ops.get(op), ops.get(op).step(step), Case.of(2, 16, 8_192, d, dtype="bf16"))
    (kernel,) = (each for each in kernels if each.name == f"{op}_{step}_kernel")
    with aot.cubin(kernel) as cubin:
        return disassembly.sass(cubin)[kernel.name]


def test_only_what_stands_between_the_two_waits_counts() -> None:
    exp, but_one, all_ = "MUFU.EX2 R1, R1", "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    listing = list(enumerate((exp, but_one, exp, "FADD R2, R1, R2", exp, all_, exp, but_one, all_, exp)))
    assert between_waits(listing) == [2, 0]


def of_cuda(step: str) -> dict[str, Listing]:
    """The step's kernels by name."""
    if not (libraries := disassembly.find_extensions()):
        pytest.skip("the extension is not built")
    usage = disassembly.of_all(libraries, lambda each: disassembly.resource_usage(each, disassembly.ARCH))
    kernels = [*filter(disassembly.is_of(OP, step), usage)]
    if not kernels:
        pytest.skip("the extension was not built for 9.0a")
    return disassembly.of_all(libraries, lambda each: disassembly.sass(each, kernels, disassembly.ARCH))


def test_cuda_takes_exponentials_under_its_own_products() -> None:
    listings = of_cuda(STEP)
    assert len(listings) == 4  # of two dtypes and two widths
    for listing in listings.values():
        assert min(between_waits(listing), default=0) >= TILE


@pytest.mark.parametrize("step", [LATE, "v14_dispatch"])
def test_a_late_search_leaves_exponentials_under_products(step: str) -> None:
    """Of visits to whole tiles, two in a turn; those at an edge search first, and D 256 does in all.

    A tile has 64 keys, and its exponentials stand there twice, since a large sum has them taken again.
    """
    listings = {name: listing for name, listing in of_cuda(step).items() if "Li256E" not in name}
    assert len(listings) == 4
    for name, listing in listings.items():
        overlapped = [each for each in between_waits(listing) if each >= TILE]
        assert len(overlapped) == 2, name


@pytest.mark.parametrize("step", GLUON)
@pytest.mark.parametrize("d", [64, 128])
def test_gluon_takes_exponentials_under_its_own_products(step: str, d: int) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    listing = forks.call("tests.compiler.test_overlap", "of_gluon", step, d)
    assert min(between_waits(listing), default=0) >= TILE


@pytest.mark.parametrize("step", BACKWARD)
@pytest.mark.parametrize("d", [64, 128])
def test_gluon_takes_exponentials_under_the_products_of_dout(step: str, d: int) -> None:
    """A thread has half as many as in the forward pass, and later waits, for dq's products, have none behind them."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    listing = forks.call("tests.compiler.test_overlap", "of_gluon", step, d, "attention_backward")
    assert between_waits(listing) == [TILE // 2, 0]
