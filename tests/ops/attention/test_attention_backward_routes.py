"""The last Triton step of attention_backward: which calls v06 and v07, in Gluon, serve for it, and with what."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest

from kernel_twins.compiler import aot
from tests import forks

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.attention_reference import SUBSETS  # noqa: E402

FOLDER = "kernel_twins._triton.attention.attention_backward"
OWN = ("attention_backward_v10_dispatch_kernel", "attention_backward_v10_dispatch_dq_kernel")
NARROW, WIDE = "attention_backward_v07_register_reduction", "attention_backward_v06_overlapped"

Taken = list[dict[str, Any]]


def heads(*shape: int) -> Any:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def tokens_first(*shape: int) -> Any:
    b, h, s, d = shape
    return heads(b, s, h, d).transpose(1, 2)


def is_for_gluon(q: Any = None, out: Any = None, **options: Any) -> bool:
    """Of 129 queries in four heads and 300 keys in two."""
    q = heads(2, 4, 129, 128) if q is None else q
    of_keys = heads(*q.shape[:1], 2, 300, q.shape[3])
    step = importlib.import_module(f"{FOLDER}.routes")
    return bool(step.is_for_gluon(q, (torch.empty_like(q), of_keys, of_keys) if out is None else out, **options))


@pytest.mark.parametrize("d", [8, 40, 64, 120, 128])
@pytest.mark.parametrize("made", [heads, tokens_first])
def test_a_plain_call_is_for_gluon(d: int, made: Callable[..., Any]) -> None:
    of_keys = made(2, 2, 300, d)
    assert is_for_gluon(made(2, 4, 129, d), (made(2, 4, 129, d), of_keys, of_keys))


@pytest.mark.parametrize("d", [136, 192, 256])
def test_wide_heads_are_not(d: int) -> None:
    assert not is_for_gluon(heads(2, 4, 129, d))


@pytest.mark.parametrize(
    "option", [{"softcap": 2.0}, {"cu_seqlens_q": torch.tensor([0, 129])}, {"deterministic": True}]
)
def test_capped_packed_and_deterministic_calls_are_not(option: dict[str, Any]) -> None:
    assert not is_for_gluon(**option)


@pytest.mark.parametrize("wanted", SUBSETS[:-1])
def test_some_of_the_gradients_are_not(wanted: tuple[bool, ...]) -> None:
    all_of_them = heads(2, 4, 129, 128), heads(2, 2, 300, 128), heads(2, 2, 300, 128)
    out = tuple(each if is_wanted else None for each, is_wanted in zip(all_of_them, wanted, strict=True))
    assert is_for_gluon(out=all_of_them)
    assert not is_for_gluon(out=out)


@pytest.mark.parametrize("place", range(3))
def test_gradients_whose_rows_start_between_packs_are_not(place: int) -> None:
    out = [heads(2, 4, 129, 128), heads(2, 2, 300, 128), heads(2, 2, 300, 128)]
    out[place] = heads(*out[place].shape[:3], 132)[..., :128]
    assert not is_for_gluon(out=tuple(out))


def test_more_rows_than_32_bits_count_are_not() -> None:
    assert is_for_gluon(heads(2**12, 2**11, 128, 8))
    assert not is_for_gluon(heads(2**12, 2**12, 1, 8))  # 128 for each query


# ----------------------------------------------------------------------------------------------------------------------
# What is launched
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """On a GPU of 9.0: which step of Gluon's is called, with which options, and the own kernels' names."""
    v10 = importlib.import_module(f"{FOLDER}.v10_dispatch")
    taken: Taken = []
    monkeypatch.setattr(triton.runtime.driver, "_active", aot._Driver(90))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    for name in (NARROW, WIDE):
        module = importlib.import_module(f"{FOLDER}.{name.removeprefix('attention_backward_')}")
        monkeypatch.setattr(module, name, lambda *given, name=name, **options: taken.append({"step": name, **options}))
    for name in OWN:
        kernel = MagicMock()
        kernel.__getitem__.return_value = lambda *given, name=name, **constants: taken.append({"step": name})
        monkeypatch.setattr(v10, name, kernel)
    monkeypatch.setattr(v10, "deltas", lambda *_: (torch.zeros(2, 4, 256), torch.zeros(2, 4, 256)))
    return taken


def call(*, d: int = 128, wanted: tuple[bool, ...] = (True,) * 3, **options: Any) -> Any:
    """Of 129 queries and 300 keys; the gradients."""
    q, k = heads(2, 4, 129, d), heads(2, 2, 300, d)
    lse = torch.empty(2, 4, 129, device="meta")
    out = tuple(torch.empty_like(each) if of else None for each, of in zip((q, k, k), wanted, strict=True))
    step = importlib.import_module(f"{FOLDER}.v10_dispatch")
    step.attention_backward_v10_dispatch(q, q, k, k, q, lse, None, out=out, **options)
    return out


@pytest.mark.parametrize(("d", "step"), [(8, NARROW), (64, NARROW), (72, WIDE), (128, WIDE)])
def test_narrow_heads_go_to_v07(launched: Taken, d: int, step: str) -> None:
    out = call(d=d, scale=-0.25)
    assert launched == [{"step": step, "out": out, "scale": -0.25, "band": None}]


def test_gluon_gets_the_band_from_the_first_key_on(launched: Taken) -> None:
    call()
    call(band=(-(2**31), 0))
    call(band=(-(2**31), 0), from_end=True)
    call(band=(-7, 9), from_end=True)
    call(from_end=True)
    assert [each["band"] for each in launched] == [None, (-(2**31), 0), (171 - 2**31, 171), (164, 180), None]


def test_what_gluon_does_not_serve_the_steps_own_kernels_do(launched: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    call(d=256)
    call(softcap=2.0)
    call(deterministic=True)
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    call()
    assert [each["step"] for each in launched] == [*OWN] * 4
    call(wanted=(True, False, False))
    assert launched[8:] == [{"step": OWN[1]}]


# ----------------------------------------------------------------------------------------------------------------------
# dq's rows
# ----------------------------------------------------------------------------------------------------------------------


def test_sums_are_rounded_into_rows_of_any_stride() -> None:
    forks.interpreted("tests.ops.attention.test_attention_backward_routes", "round_into_strides")


def round_into_strides() -> None:
    rounding = importlib.import_module(f"{FOLDER}.rounding")
    for s, d in itertools.product((1, 70), (8, 40, 64, 128)):
        sums = torch.randn(2, 3, 128, d, generator=torch.Generator().manual_seed(0))
        memory = torch.full((2, s, 3, d + 8), torch.nan, dtype=torch.bfloat16)
        dq = memory[..., :d].transpose(1, 2)
        rounding.round_sums(sums, dq, -0.3)
        assert torch.equal(dq, (sums[:, :, :s] * -0.3).bfloat16())
        assert memory[..., d:].isnan().all()
