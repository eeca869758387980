"""Masks, places and activations for the kernels of dropout_add and of its backward pass.

Element i of a matrix, counted row by row, is kept if its random word is at least ``threshold``. Its word is number
i % 4 of Philox block i / 4: Philox4x32-10 makes four words from a counter (offset / 4 and the block's number) and a key
(the seed); see cuda-kernels/lib/philox.h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.matmul.linear.backward import _derivative
from kernel_twins._triton.matmul.linear.v01_fused import _activate
from kernel_twins.ops.dropout import shared as dropout

VECTOR = 8  # neighbours of which a row's number is computed once
SQRT_HALF = tl.constexpr(0.7071067811865476)

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no inline assembly
ROUNDS = tl.constexpr(10)
# Of a round: what two words of the counter are multiplied by, and what is added to the two words of the key.
FACTOR_0, FACTOR_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
STEP_0, STEP_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
# Both halves of a product.
PRODUCT_0 = tl.constexpr("{ .reg .b64 %wide; mul.wide.u32 %wide, $2, 0xD2511F53; mov.b64 {$0, $1}, %wide; }")
PRODUCT_1 = tl.constexpr("{ .reg .b64 %wide; mul.wide.u32 %wide, $2, 0xCD9E8D57; mov.b64 {$0, $1}, %wide; }")


def numbers(p: float) -> tuple[int, float, bool]:
    """The kernels' arguments for p: the threshold, the scale of kept elements, and whether all are dropped."""
    return (0, 0.0, True) if p == 1 else (dropout.threshold(p), dropout.scale(p), False)


def span(N: int, BLOCK: int) -> int:
    """How many neighbours a row of N ends among once at most, for ``places``: all of a block, a vector's, or 1."""
    return BLOCK if BLOCK <= N else VECTOR if VECTOR <= N else 1


@triton.jit
def _product(word, FACTOR: tl.constexpr, BY_ASM: tl.constexpr):
    # Low and high half, by one instruction: the compiler takes two, as tl.mul and tl.umulhi are apart. Written as a
    # product of 64 bits, it would cost so much by Triton's count that masks would be moved through shared memory.
    if COMPILED:
        low, high = tl.inline_asm_elementwise(BY_ASM, "=r,=r,r", [word], (tl.uint32, tl.uint32), is_pure=True, pack=1)
    else:
        low, high = tl.mul(word, FACTOR, sanitize_overflow=False), tl.umulhi(word, FACTOR)
    return low, high


@triton.jit
def _words(seed, offset, block):
    # The four words of every Philox block; block: int64. If offset is None, seed points to both: [2], int64.
    if offset is None:
        key, start = tl.load(seed), tl.load(seed + 1)
    else:
        key, start = seed, offset
    key, start = key.to(tl.uint64), start.to(tl.uint64) >> 2
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c2, c3 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c0, c1 = start.to(tl.uint32), (start >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        low0, high0 = _product(c0, FACTOR_0, PRODUCT_0)
        low2, high2 = _product(c2, FACTOR_1, PRODUCT_1)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = tl.add(k0, STEP_0, sanitize_overflow=False), tl.add(k1, STEP_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def keeps_each(seed, offset, threshold, ALL: tl.constexpr, i):
    # Whether elements i are kept, in any order; each draws four words, and uses one of them.
    w0, w1, w2, w3 = _words(seed, offset, i >> 2)
    of_pair = tl.where((i & 1) == 0, w0, w1), tl.where((i & 1) == 0, w2, w3)
    return (tl.where((i & 2) == 0, of_pair[0], of_pair[1]) >= threshold) & (not ALL)


@triton.jit
def _each_of_four(seed, offset, threshold, ALL: tl.constexpr, block):
    w0, w1, w2, w3 = _words(seed, offset, block)
    return (
        (w0 >= threshold) & (not ALL), (w1 >= threshold) & (not ALL), (w2 >= threshold) & (not ALL),
        (w3 >= threshold) & (not ALL),
    )  # fmt: skip


@triton.jit
def _side_by_side(k0, k1, k2, k3, BLOCK: tl.constexpr):
    # Four [..., BLOCK / 4], of every four neighbours, as [..., BLOCK]. The joined axes are word / 2, then word % 2.
    return tl.join(tl.join(k0, k2), tl.join(k1, k3)).reshape(k0.shape[:-1] + [BLOCK])


@triton.jit
def keeps(seed, offset, threshold, ALL: tl.constexpr, block, BLOCK: tl.constexpr):
    # block: [..., BLOCK / 4], int64, neighbours along the last dimension. Returns [..., BLOCK].
    k0, k1, k2, k3 = _each_of_four(seed, offset, threshold, ALL, block)
    return _side_by_side(k0, k1, k2, k3, BLOCK)


@triton.jit
def keeps_anywhere(seed, offset, threshold, ALL: tl.constexpr, i, BLOCK: tl.constexpr):
    # The same from elements i on, which need not be multiples of 4: every four may span two Philox blocks, so it takes
    # two calls.
    k0, k1, k2, k3 = _each_of_four(seed, offset, threshold, ALL, i >> 2)
    k4, k5, k6, _ = _each_of_four(seed, offset, threshold, ALL, (i >> 2) + 1)
    by_two = (i & 2) != 0
    k0, k1, k2 = tl.where(by_two, k2, k0), tl.where(by_two, k3, k1), tl.where(by_two, k4, k2)
    k3, k4 = tl.where(by_two, k5, k3), tl.where(by_two, k6, k4)
    by_one = (i & 1) != 0
    k0, k1 = tl.where(by_one, k1, k0), tl.where(by_one, k2, k1)
    k2, k3 = tl.where(by_one, k3, k2), tl.where(by_one, k4, k3)
    return _side_by_side(k0, k1, k2, k3, BLOCK)


@triton.jit
def places(first, N, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    # Rows and columns of BLOCK elements from first on. A row ends once at most among SPAN neighbours, so that these
    # take one division together, and a whole block none but one of 64 bits. Several rows of N within BLOCK of 2^31 are
    # none that 32 bits count.
    row = first // N
    along = tl.arange(0, BLOCK)
    start = (first - row * N).to((along + N).dtype)  # of 64 bits where N is
    if SPAN == 1:
        along += start
        rows, cols = row + along // N, along % N
    else:
        if SPAN == BLOCK:
            along += start
        else:  # written so that a thread's neighbours have the same dividend
            begin = start + along // SPAN * SPAN
            passed = begin // N
            row += passed
            along = begin - passed * N + along % SPAN
        ends = along >= N
        rows, cols = row + ends.to(tl.int32), tl.where(ends, along - N, along)
    return rows, cols


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    # fp32 would show what gelu's short form errs by.
    if ACTIVATION == "gelu" and EXACT:  # noqa: SIM108
        x = 0.5 * x * (1.0 + tl.erf(SQRT_HALF * x))
    else:
        x = _activate(x, ACTIVATION)
    return x


@triton.jit
def gradient(dout, z, scale, ACTIVATION: tl.constexpr):
    # The gradient of a kept element, back through the scale and through the activation, whose argument was z.
    result = dout * scale
    if ACTIVATION != "none":
        slope = _derivative(z, ACTIVATION)
        result *= slope
        if ACTIVATION == "relu":  # 0 even for an infinite gradient, where the product would be NaN
            result = tl.where(slope == 0.0, 0.0, result)
    return result
