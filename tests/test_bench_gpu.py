"""The bench on a GPU: what its graphs write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import bench  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu


def test_results_that_a_call_allocates_rotate_as_out_does() -> None:
    """Else they stay in L2, and the call looks faster than one that writes as many bytes into ``out``."""
    places: list[int] = []

    def call(x: Tensor, *, out: Tensor) -> tuple[Tensor, Tensor]:
        results = x.clone(), x[:1].clone()
        places.append(results[0].data_ptr())
        return results

    x = torch.ones(2**20, device="cuda")
    sets: list[bench.CallSet] = [((x,), torch.empty_like(x)) for _ in range(3)]
    bench._capture(call, sets, 9)
    assert all(len(set(places[first : first + 3])) == 3 for first in range(7))
    assert len(set(places)) == 3  # and no more memory is taken than that
