"""What the last Triton step of attention_backward launches of its own, without a GPU."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.attention_reference import SUBSETS  # noqa: E402

KERNELS = ("attention_backward_v10_dispatch_kernel", "attention_backward_v10_dispatch_dq_kernel")


class Launches:
    """Kernels that are launched, with what they get behind delta and lse."""

    def __init__(self) -> None:
        self.step = importlib.import_module("kernel_twins._triton.attention.attention_backward.v10_dispatch")
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def instead_of(self, name: str) -> MagicMock:
        kernel = MagicMock()
        kernel.__getitem__.return_value = lambda *given, **constants: self.made.append((name, given[6:], constants))
        return kernel

    def __call__(self, *, wanted: tuple[bool, ...] = (True,) * 3, packed: bool = False, d: int = 64, **options: Any):
        """Of 70 queries and 90 keys, which four heads and two have; the gradients, NaN where nothing cleared them."""
        b = 1 if packed else 2
        of_queries, of_keys = torch.zeros(b, 4, 70, d, dtype=torch.half), torch.zeros(b, 2, 90, d, dtype=torch.half)
        out = tuple(
            torch.full_like(each, torch.nan) if is_wanted else None
            for each, is_wanted in zip((of_queries, of_keys, of_keys), wanted, strict=True)
        )
        given = of_queries, options.pop("q", of_queries), of_keys, of_keys, of_queries, torch.zeros(b, 4, 70), None
        starts = (torch.tensor([0, 30, 70]).int(), torch.tensor([0, 50, 80]).int()) if packed else ()
        self.step.attention_backward_v10_dispatch(*given, *starts, out=out, **options)
        return out


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(found.step, "runs_gluon", lambda: False)
    for name in KERNELS:
        monkeypatch.setattr(found.step, name, found.instead_of(name))
    monkeypatch.setattr(found.step, "deltas", lambda *_: (torch.zeros(2, 4, 128), torch.zeros(2, 4, 128)))
    return found


@pytest.mark.parametrize("wanted", SUBSETS)
def test_a_kernel_is_launched_for_gradients_that_are_wanted_alone(
    launches: Launches, wanted: tuple[bool, bool, bool]
) -> None:
    dq, dk, dv = launches(wanted=wanted)
    made = {name: given for name, given, _ in launches.made}
    of_keys, of_queries = KERNELS
    assert list(made) == [name for name, is_there in ((of_keys, any(wanted[1:])), (of_queries, wanted[0])) if is_there]
    if of_keys in made:
        assert made[of_keys][0] is dk
        assert made[of_keys][1] is dv
    if of_queries in made:
        assert made[of_queries][0] is dq


def test_gradients_of_tokens_in_no_sequence_are_cleared_before(launches: Launches) -> None:
    assert all(each.eq(0).all() for each in launches(packed=True))
    assert all(each.isnan().all() for each in launches())
    assert [constants["PACKED"] for _, _, constants in launches.made] == [True, True, False, False]


def test_without_pairs_gradients_are_0_and_nothing_is_launched(launches: Launches) -> None:
    q, k = torch.zeros(1, 2, 0, 64, dtype=torch.half), torch.zeros(1, 2, 5, 64, dtype=torch.half)
    out = tuple(torch.full_like(each, torch.nan) for each in (q, k, k))
    launches.step.attention_backward_v10_dispatch(q, q, k, k, q, torch.zeros(1, 2, 0), out=out)
    assert not launches.made
    assert all(each.eq(0).all() for each in out)


def test_limits_of_a_band_have_32_bits_and_bind_no_more_beyond_all_keys(launches: Launches) -> None:
    """The limits stand before from_end, which is before the strides."""
    launches(band=(-(2**40), 2**40))
    launches(band=(-(2**40), 2**40), from_end=True)
    launches(band=(-3, 0), from_end=True)
    found = [given[len(given) - 18 : len(given) - 15] for name, given, _ in launches.made if name == KERNELS[1]]
    assert found == [(-70, 90, 0), (-90, 70, 1), (-3, 0, 1)]


@pytest.mark.parametrize("d", [8, 64, 72, 128, 136, 256])
def test_tiles_of_every_width_fit(launches: Launches, d: int) -> None:
    launches(d=d)
    for _, _, constants in launches.made:
        assert d <= constants["BLOCK_D"] <= max(16, 2 * d)
        assert constants["BLOCK_M"] * constants["BLOCK_D"] <= 32_768
        assert constants["BLOCK_N"] * constants["BLOCK_D"] <= 16_384


def test_rows_that_the_copy_engine_does_not_take_are_refused(launches: Launches) -> None:
    odd = torch.zeros(2, 4, 70, 67, dtype=torch.half)[..., :64]
    with pytest.raises(ValueError, match=r"q has strides .*, 67, 1\) and starts 0 bytes off.*call q.contiguous"):
        launches(q=odd)
