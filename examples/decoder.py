"""One decoder layer, written out in PyTorch's functions and in ours: milliseconds, and how far they lie apart.

python examples/decoder.py takes a layer of 4,096 columns, 32 query heads and 8 of keys, 8 sequences of 2,048 tokens.
Rotary embeddings and the product of SwiGLU are PyTorch's on both sides.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import kernel_twins
from kernel_twins.functional.backends import BACKENDS


@dataclass(frozen=True)
class Functions:
    """``add_norm`` of x and what is added to it returns the norm of the sum, and the sum."""

    norm: Callable[[Tensor, Tensor], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    linear: Callable[[Tensor, Tensor], Tensor]
    linear_silu: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]


def torchs() -> Functions:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, 1e-5)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        added = x + residual
        return norm(added, weight), added

    def linear_silu(x: Tensor, weight: Tensor) -> Tensor:
        return functional.silu(functional.linear(x, weight))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return Functions(norm, add_norm, functional.linear, linear_silu, attention)


def ours(backend: str) -> Functions:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return kernel_twins.rms_norm(x, weight.shape, weight, 1e-5, backend=backend)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return kernel_twins.rms_norm(x, weight.shape, weight, 1e-5, residual=residual, backend=backend)

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return kernel_twins.linear(x, weight, backend=backend)

    def linear_silu(x: Tensor, weight: Tensor) -> Tensor:
        return kernel_twins.linear(x, weight, activation="silu", backend=backend)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = kernel_twins.attention(q, k, v, causal=True, backend=backend)
        return out

    return Functions(norm, add_norm, linear, linear_silu, attention)


@dataclass(frozen=True)
class Weights:
    """Of norms [C], of linear layers [out, in]; qkv holds H heads of queries and twice H_KV ones of D columns."""

    before_attention: Tensor
    qkv: Tensor
    out: Tensor
    before_mlp: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def decoder(x: Tensor, weights: Weights, angles: tuple[Tensor, Tensor], kv_heads: int, by: Functions) -> Tensor:
    """x [B, S, C] after attention and SwiGLU, each behind a norm and added to what it was given.

    ``angles`` are cosines and sines of the rotary embedding, [S, D].
    """
    d = angles[0].shape[-1]
    qkv = by.linear(by.norm(x, weights.before_attention), weights.qkv)
    heads = qkv.unflatten(-1, (-1, d)).transpose(1, 2)  # [B, H + 2 * H_KV, S, D], nothing is copied
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    attended = by.attention(rotated(q, angles), rotated(k, angles), v).transpose(1, 2).flatten(2)
    y, x = by.add_norm(by.linear(attended, weights.out), x, weights.before_mlp)
    return x + by.linear(by.linear_silu(y, weights.gate) * by.linear(y, weights.up), weights.down)


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = angles
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


def angles_of(tokens: int, d: int, like: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** -(torch.arange(0, d, 2, device=like.device) / d)
    angles = torch.outer(torch.arange(tokens, device=like.device), frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def gradients(step: Callable[[Tensor], Tensor], leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    """The result of x, the first leaf, and the gradients of all leaves."""
    result = step(leaves[0])
    return [result.detach(), *torch.autograd.grad(result, leaves, dout)]


def milliseconds(call: Callable[[], object], repeats: int, device: str) -> float:
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    sizes = {"columns": 4096, "d": 128, "kv-heads": 8, "hidden": 14336, "batch": 8, "tokens": 2048}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    given = parser.parse_args()
    c, d, kv_heads, hidden = given.columns, given.d, given.kv_heads, given.hidden

    torch.manual_seed(0)
    how = {"device": given.device, "dtype": torch.bfloat16, "requires_grad": True}
    x = torch.randn(given.batch, given.tokens, c, **how)

    def weight(n: int, k: int) -> Tensor:
        values = torch.randn(n, k, device=given.device, dtype=torch.bfloat16) / math.sqrt(k)
        return values.requires_grad_()

    weights = Weights(
        torch.ones(c, **how),
        weight(c + 2 * kv_heads * d, c),
        weight(c, c),
        torch.ones(c, **how),
        weight(hidden, c),
        weight(hidden, c),
        weight(c, hidden),
    )
    leaves, dout = [x, *vars(weights).values()], torch.randn_like(x)
    angles = angles_of(given.tokens, d, x)
    layers = {
        name: partial(decoder, weights=weights, angles=angles, kv_heads=kv_heads, by=by)
        for name, by in (("PyTorch", torchs()), ("ours", ours(given.backend)))
    }
    steps = layers | {f"{name}, compiled": torch.compile(layer) for name, layer in layers.items()}

    right = gradients(steps["PyTorch"], leaves, dout)
    print(f"{'':20}{'forward, ms':>12}{'both, ms':>12}{'off by':>12}")
    for name, step in steps.items():
        found = gradients(step, leaves, dout)
        off = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, right, strict=True))
        with torch.no_grad():
            forward = milliseconds(partial(step, x), given.repeats, given.device)
        both = milliseconds(partial(gradients, step, leaves, dout), given.repeats, given.device)
        print(f"{name:20}{forward:>12.2f}{both:>12.2f}{off:>12.1e}", flush=True)


if __name__ == "__main__":
    main()
