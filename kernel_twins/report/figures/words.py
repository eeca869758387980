"""What figures call things: baselines, cases, sizes, ratios."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import geometric_mean

from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import BACKENDS, Backend, Case, Name

_TITLES = {
    "cuda": "CUDA",
    "triton": "Triton",
    "torch": "PyTorch",
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "quack",
    "cub": "CUB",
    "cublaslt": "cuBLASLt",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "flash4": "FlashAttention-4",
    "max_autotune": "max-autotune",
}
_VALUES = {"col": "column-major", "tenth": "0.1"}
_SUFFIXES = ((2**30, "G"), (2**20, "M"), (2**10, "k"))


def title(backend: str) -> str:
    """A language's or a baseline's own name."""
    return _TITLES.get(backend, backend)


def case(of: Case) -> str:
    """A case as one would say it, such as ``65,536 x 4,096 bf16, axes 0``."""
    shape = " x ".join(f"{size:,}" for size in of.shape)
    return ", ".join([f"{shape} {of.dtype}", *facts(of.variant)])


def facts(variant: Iterable[tuple[str, str]]) -> list[str]:
    """What tells a case from others of its shape and dtype, a few words each."""
    return [key if value == "yes" else f"{key} {_value(key, value)}" for key, value in variant]


def _value(key: str, value: str) -> str:
    return f"{int(value) / 100:g}" if key == "p" else _VALUES.get(value, value.replace("_", " "))


def size(of: int) -> str:
    """A size in few letters: 4k is 4,096; what is no multiple of 1,024 is written out."""
    for unit, letter in _SUFFIXES:
        if of % unit == 0:
            return f"{of // unit}{letter}"
    return str(of)


def times(ratio: float) -> str:
    """How many times as fast."""
    return f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.0f} ×"


def together(text: str) -> str:
    """The same, never broken into two lines."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def reached(points: Collection[Mapping[str, float]]) -> str:
    """How far each language comes in many cases, as ``CUDA reaches 1.05 × the best baseline, Triton 0.98 ×``.

    From the ratios of each case, by baseline and language; empty where no language has one.
    """
    said: list[str] = []
    for backend in BACKENDS:
        if ratios := [its[backend] for its in points if backend in its]:
            mean = times(geometric_mean(ratios))
            said.append(
                together(f"{title(backend)} {mean}") if said else f"{title(backend)} reaches {mean} the best baseline"
            )
    return ", ".join(said)


def time_us(of: float | None) -> str:
    """A time with at least four digits, so that times in a column end alike."""
    return "–" if of is None else f"{of:,.{max(0, 4 - len(str(int(of))))}f}"


def against(results: Results, of: Case, name: Name, other: Name) -> float | None:
    """How many times as fast as another one, of paired rounds where there are any, else of medians."""
    if paired := results.ratio(of, name, other):
        return paired.value
    ours, theirs = results.time_us(of, name), results.time_us(of, other)
    return theirs / ours if ours and theirs else None


def multiples(results: Results, of: Case) -> dict[str, float]:
    """By baseline and language, the multiple of the best baseline's speed; empty where no baseline has a time."""
    best = results.best_baseline(of)
    if best is None:
        return {}
    names = {baseline: Name(baseline) for baseline in results.op.baselines} | dict(last(results, of))
    found = {key: against(results, of, name, best) for key, name in names.items()}
    return {key: ratio for key, ratio in found.items() if ratio is not None} | {best.backend: 1.0}


def last(results: Results, of: Case) -> dict[Backend, Name]:
    """The step of each language that stands for it at a case, as in the scoreboard."""
    return {backend: name for backend in BACKENDS if (name := results.last(backend, of))}


def gpu(slug: str) -> str:
    """As one would write it, ``H100 SXM`` of ``h100-sxm``."""
    return slug.replace("-", " ").upper()


def number(step: str) -> str:
    """A step's, ``v03`` of ``v03_vectorized``."""
    return step.partition("_")[0]
