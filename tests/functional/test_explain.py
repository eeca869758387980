"""``kernel_twins.explain`` on a machine without a GPU, where the rules take tensors of the CPU for those of one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.functional import backends, expected  # noqa: E402
from kernel_twins.functional.kept import ABSENT  # noqa: E402
from tests.sides import cuda_library  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
X = torch.zeros(4096, 4096, dtype=torch.bfloat16)
TARGET = torch.zeros(4096, dtype=torch.long)
CALLS = {
    "softmax": (X,),
    "log_softmax": (X, 1),
    "layer_norm": (X, 4096),
    "rms_norm": (X, (4096,)),
    "cross_entropy": (X, TARGET),
    "dropout_add": (X, X),
    "sum": (X, 1),
    "mean": (X, 0),
    "amax": (X, 1),
    "argmax": (X, 1),
    "matmul": (X, X),
    "linear": (X, X, None, "gelu"),
}


@pytest.fixture
def on_gpu(monkeypatch) -> None:
    """An H100 that has every step, on which the tensors lie."""
    cuda_library()
    for path in {*kernel_twins._MODULES.values()}:
        module = importlib.import_module(f"kernel_twins.functional.{path}")
        for name, stub in {
            "is_on_gpu": lambda tensor: isinstance(tensor, torch.Tensor),
            "_runs": lambda *_: True,
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stub)
    monkeypatch.setattr(backends, "measured_gpu", lambda device: "h100-sxm")
    monkeypatch.setattr("kernel_twins.functional.explain.measured_gpu", lambda device: "h100-sxm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize("name", CALLS)
def test_it_tells_backend_step_times_and_where_they_are_from(on_gpu, name: str) -> None:
    told = kernel_twins.explain(getattr(kernel_twins, name), *CALLS[name])
    assert told.function == name and not told.reason
    assert {*told.gpu_us} == {*told.host_us} == {*expected.BACKENDS}
    assert told.expected_us == max(told.gpu_us[told.backend], told.host_us[told.backend])
    assert len(told.nearest) == expected.NEIGHBOURS and told.measured_on == "h100-sxm"
    steps = {step for op in OPS.values() for names in op.behind.values() for step in names}
    assert (told.step in steps) == (told.backend != "torch")
    text = str(told)
    assert f"{name}: {'PyTorch' if told.backend == 'torch' else told.backend}" in text
    assert told.nearest[0][0] in text and "µs" in text and "h100-sxm" in text


def test_the_documents_example_is_what_it_says(on_gpu) -> None:
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    *told, cases = str(kernel_twins.explain(kernel_twins.softmax, x)).splitlines()
    document = (ROOT / "docs" / "functions.md").read_text()
    assert "\n".join([*told, cases.partition("), ")[0] + "), ..."]) in document


def test_both_passes_count_where_a_gradient_is_wanted(on_gpu) -> None:
    alone = kernel_twins.explain(kernel_twins.softmax, X)
    both = kernel_twins.explain(kernel_twins.softmax, X.clone().requires_grad_())
    assert all(both.gpu_us[backend] > 1.5 * us for backend, us in alone.gpu_us.items())
    assert all(both.host_us[backend] == 2 * us for backend, us in alone.host_us.items())


def test_it_says_why_a_call_is_pytorchs(on_gpu) -> None:
    for given, reason in (
        ((X[:0],), "no elements"),
        ((X.double(),), "dtypes that kernels take"),
        ((X.view(64, 64, 4096).permute(2, 0, 1)[:, :, :3], 1), "rows would be copied"),
    ):
        told = kernel_twins.explain(kernel_twins.softmax, *given)
        assert (told.backend, told.step) == ("torch", "")
        assert reason in told.reason and reason in str(told)
        assert told.expected_us is None
    q = torch.zeros(1, 8, 64, 64, dtype=torch.bfloat16)
    told = kernel_twins.explain(kernel_twins.scaled_dot_product_attention, q, q, q, dropout_p=0.5)
    assert told.reason == "a mask or dropout is PyTorch's"
    told = kernel_twins.explain(kernel_twins.cross_entropy, X, TARGET, weight=X[0])
    assert "weight" in told.reason


def test_it_says_that_nothing_was_measured(on_gpu, monkeypatch) -> None:
    monkeypatch.setattr(expected, "_content", dict)
    expected.table.cache_clear()
    expected.timed.cache_clear()
    told = kernel_twins.explain(kernel_twins.softmax, X)
    expected.table.cache_clear()
    expected.timed.cache_clear()
    assert told.backend == "cuda" and told.gpu_us == told.host_us == {} and told.measured_on == ""
    assert "nothing was measured" in str(told)


def test_it_does_not_blame_measurements_for_what_is_taken_whatever_they_say(on_gpu, monkeypatch) -> None:
    told = kernel_twins.explain(kernel_twins.cross_entropy_gradient_, torch.ones(4, 8), TARGET[:4])
    assert told.backend == "cuda" and "whatever was measured" in told.reason
    monkeypatch.setattr("kernel_twins.functional.softmax.softmax._runs", lambda *_: False)
    told = kernel_twins.explain(kernel_twins.softmax, X)
    assert told.backend == "torch" and told.gpu_us["cuda"] < told.gpu_us["torch"]
    assert told.reason == ABSENT


def test_nothing_is_computed_nor_written(on_gpu) -> None:
    logits = torch.ones(4, 8)
    kernel_twins.explain(kernel_twins.cross_entropy_gradient_, logits, TARGET[:4])
    assert (logits == 1).all()


def test_what_is_no_public_function_or_names_a_backend_is_refused() -> None:
    compiled = torch.compile(kernel_twins.softmax, backend="eager")
    for wrong in (torch.softmax, kernel_twins.load, kernel_twins.explain, compiled, "softmax", None):
        with pytest.raises(TypeError, match=r"must be a public function.*kernel_twins\.matmul"):
            kernel_twins.explain(wrong, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend is 'cuda', must be left out"):
        kernel_twins.explain(kernel_twins.softmax, X, backend="cuda")
    with pytest.raises(ValueError, match="backend is 'torch', must be left out"):
        kernel_twins.explain(kernel_twins.softmax, X, -1, "torch")
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        kernel_twins.explain(kernel_twins.linear, X, X, activation="tanh")


def test_a_call_behind_it_goes_on() -> None:
    kernel_twins.explain(kernel_twins.softmax, X[:2])
    assert kernel_twins.softmax(X[:2].float()).sum() == pytest.approx(2)
