"""Philox4x32-10 in torch's integers: the reference for the random words that the dropout kernels draw.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11). A counter of 128 bits and a key of
64 go in, four words of 32 bits come out. There is no state, so the same words can be drawn again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WORD = 2**32
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four random words for each counter. A counter is four words, tensors that broadcast; all int64 below 2**32."""
    c0, c1, c2, c3 = counter
    for turn in range(_ROUNDS):
        k0, k1 = ((word + turn * step) % WORD for word, step in zip(key, _KEY_STEPS, strict=True))
        (high0, low0), (high1, low1) = (_product(c, by) for c, by in zip((c0, c2), _MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _product(word: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product, from halves that leave room in 63 bits."""
    upper, lower = (word >> 16) * by, (word & 0xFFFF) * by
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & (WORD - 1)


def words(seed: int, offset: int, start: int, stop: int, device: torch.device | str) -> Tensor:
    """The words of the elements from ``start`` to ``stop``, int64: element i has word i % 4 of block i // 4.

    They are the words that cuRAND and PyTorch give thread i // 4 for this ``seed`` and ``offset``. The offset counts
    words and is a multiple of 4. The seed is the key; a fourth of the offset and the block are the counter, low words
    first.
    """
    import torch

    block = torch.arange(start // 4, (stop + 3) // 4, device=device)
    of_offset = (torch.tensor(word, device=device) for word in (offset // 4 % WORD, offset // 4 // WORD))
    drawn = philox4x32((*of_offset, block & (WORD - 1), block >> 32), (seed % WORD, seed // WORD))
    return torch.stack(torch.broadcast_tensors(*drawn), dim=1).flatten()[start % 4 :][: stop - start]
