"""The bf16 product on a GPU: its last steps' splits of K share memory with nobody, and what is refused is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS, load, load_baseline  # noqa: E402
from kernel_twins.harness.check import compare, generator  # noqa: E402
from kernel_twins.ops.tensors import empty_outputs  # noqa: E402
from kernel_twins.spec import BACKENDS, Backend, Case, Step  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import CUDAGraph, Stream

pytestmark = pytest.mark.gpu

OP = OPS["matmul_bf16"]
SPLIT = Case.parse("64x4096x4096-bf16")  # few tiles, long sums
SQUARE = Case.parse("512x512x512-bf16")
ODD = Case.parse("255x257x4099-bf16")  # operands that are copied first
CELLS = pytest.mark.parametrize(
    ("step", "backend", "case"),
    [
        pytest.param(step, backend, case, id=f"{step.name}-{backend}-{case.slug}")
        for step in OP.steps
        if step.wide
        for backend in step.backends
        for case in (SPLIT, SQUARE, ODD)
        if OP.serves(step, case)
    ],
)
ROUNDS = 200


def operands(case: Case, seed: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
    out = empty_outputs(OP, case, "cuda")
    assert isinstance(out, torch.Tensor)
    return OP.inputs(case, generator(case, "cuda", seed)), out


class Product:
    """A step with operands of its own, compiled and tuned; ``expected`` is its first result, which is right."""

    def __init__(self, step: Step, backend: Backend, case: Case, seed: int) -> None:
        if not step.runs_on(torch.cuda.get_device_capability()):
            pytest.skip(f"{step.name} needs compute capability {step.arch}")
        self.call = load(OP.name, step.name, backend)
        self.inputs, self.out = operands(case, seed)
        self.differing = torch.zeros((), dtype=torch.int64, device="cuda")
        self.run()
        verdict = compare(OP, case, self.inputs, (self.out,))
        assert verdict.ok, verdict.reason
        self.expected = self.out.clone()

    def run(self) -> None:
        self.out.fill_(math.nan)
        self.call(*self.inputs, out=self.out)

    def count_unless_as_expected(self) -> None:
        self.differing += (self.out.view(torch.int16) != self.expected.view(torch.int16)).any()

    def captured(self, stream: Stream) -> CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.run()
        return graph

    def assert_always_as_expected(self) -> None:
        torch.cuda.synchronize()
        assert self.differing.item() == 0


def hold_back(*streams: Stream) -> None:
    """Let the streams wait a tenth of a second, so that what is queued on them meanwhile runs at the same time."""
    torch.cuda._sleep(200_000_000)
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())


def both_at_once(products: list[Product], streams: list[Stream], runs: list[Callable[[], None]]) -> None:
    """Run one beside the other, each on its stream, and compare after every round."""
    hold_back(*streams)
    for _ in range(ROUNDS):
        for product, stream, run in zip(products, streams, runs, strict=True):
            with torch.cuda.stream(stream):
                run()
                product.count_unless_as_expected()
    for product in products:
        product.assert_always_as_expected()


@CELLS
def test_a_thousand_runs_agree_bit_by_bit(step: Step, backend: Backend, case: Case) -> None:
    """Of two products in turn, so that a partial sum that is read too early is another one's."""
    products = [Product(step, backend, case, seed) for seed in (0, 1)]
    for _ in range(1000):
        for product in products:
            product.run()
            product.count_unless_as_expected()
    for product in products:
        product.assert_always_as_expected()


@CELLS
def test_calls_on_two_streams_run_at_once(step: Step, backend: Backend, case: Case) -> None:
    products = [Product(step, backend, case, seed) for seed in (0, 1)]
    both_at_once(products, [torch.cuda.Stream(), torch.cuda.Stream()], [product.run for product in products])


@CELLS
def test_two_graphs_of_one_stream_run_at_once(step: Step, backend: Backend, case: Case) -> None:
    products = [Product(step, backend, case, seed) for seed in (0, 1)]
    captured_on, *streams = (torch.cuda.Stream() for _ in range(3))
    graphs = [product.captured(captured_on) for product in products]
    both_at_once(products, streams, [graph.replay for graph in graphs])


@CELLS
def test_a_graph_runs_beside_calls_on_the_stream_that_it_was_captured_on(
    step: Step, backend: Backend, case: Case
) -> None:
    products = [Product(step, backend, case, seed) for seed in (0, 1)]
    captured_on, other = torch.cuda.Stream(), torch.cuda.Stream()
    graph = products[0].captured(captured_on)
    both_at_once(products, [other, captured_on], [graph.replay, products[1].run])


@CELLS
def test_calls_are_right_after_a_capture_that_was_given_up(step: Step, backend: Backend, case: Case) -> None:
    product, stream = Product(step, backend, case, 0), torch.cuda.Stream()

    def give_up() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            product.run()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        give_up()
    graph = product.captured(stream)
    for run in (product.run, graph.replay, graph.replay):
        run()
        product.count_unless_as_expected()
    product.assert_always_as_expected()


@pytest.mark.parametrize("name", [name for name in OP.baselines if name not in OP.baseline_cases])
def test_a_baseline_replays_from_a_graph_and_leaves_the_preferred_library_as_it_was(name: str) -> None:
    call, preferred = load_baseline(OP.name, name), torch.backends.cuda.preferred_blas_library()
    inputs, out = operands(SPLIT)
    call(*inputs, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = call(*inputs, out=out)
    assert torch.backends.cuda.preferred_blas_library() == preferred
    result = out if returned is None else returned
    result.fill_(math.nan)
    graph.replay()
    verdict = compare(OP, SPLIT, inputs, (result,))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    ("step", "backend", "case"),
    [
        pytest.param(step, backend, case, id=f"{step.name}-{backend}-{case.slug}")
        for step in OP.steps
        for backend in step.backends
        for case in OP.test_cases
        if not OP.serves(step, case)
    ],
)
def test_what_a_step_does_not_serve_it_refuses_by_name(step: Step, backend: Backend, case: Case) -> None:
    """Or it is right: a Triton twin masks what its CUDA step leaves out, and the pitch of a single row may be any."""
    if not step.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step.name} needs compute capability {step.arch}")
    call = load(OP.name, step.name, backend)
    inputs, out = operands(case)
    try:
        call(*inputs, out=out)
    except (TypeError, ValueError, RuntimeError) as error:
        right, said = str(error).startswith(("a ", "b ", "out ")), str(error)
    else:
        verdict = compare(OP, case, inputs, (out,))
        right, said = verdict.ok, verdict.reason
    assert right, said


def matrix(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda a, b, out: (a.double(), b, out), id="dtype of a"),
        pytest.param(lambda a, b, out: (a, b.half(), out), id="dtype of b"),
        pytest.param(lambda a, b, out: (a, b, out.half()), id="dtype of out"),
        pytest.param(lambda a, b, out: (a[0], b, out), id="rank of a"),
        pytest.param(lambda a, b, out: (a, b[0], out), id="rank of b"),
        pytest.param(lambda a, b, out: (a, b.cpu(), out), id="device of b"),
        pytest.param(lambda a, b, out: (a, b, out.cpu()), id="device of out"),
        pytest.param(lambda a, b, out: (a, b[:7], out), id="shape of b"),
        pytest.param(lambda a, b, out: (a, b, out[:3]), id="shape of out"),
        pytest.param(lambda a, b, out: (a, b, out.t().contiguous().t()), id="strides of out"),
        pytest.param(lambda a, b, out: (a, b, a.flatten()[:24].view(4, 6)), id="overlap"),
    ],
)
def test_both_languages_refuse_in_the_same_words(spoil: Callable[..., tuple[Tensor, ...]]) -> None:
    a, b, out = spoil(matrix(4, 8), matrix(8, 6), matrix(4, 6))
    said = set()
    for backend in BACKENDS:
        with pytest.raises((TypeError, ValueError)) as caught:
            load("matmul_bf16", "v01_naive", backend)(a, b, out=out)
        said.add((caught.type, str(caught.value)))
    assert len(said) == 1, said


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_fp32_out_is_refused_with_the_steps_of_that_language_that_write_one(backend: Backend) -> None:
    able = ", ".join(step.name for step in OP.steps if step.fp32_out and backend in step.backends)
    with pytest.raises(TypeError, match=rf"^out is torch.float32, must be torch.bfloat16: .* no other, take {able}$"):
        load("matmul_bf16", "v01_naive", backend)(matrix(4, 8), matrix(8, 6), out=matrix(4, 6).float())


@pytest.mark.parametrize(
    ("m", "n", "k", "by_columns", "told"),
    [
        (8, 4096, 4096, True, "tiles of 8 x 64, transposed"),
        (4096, 5, 4096, True, "tiles of 64 x 8"),
        (4096, 4096, 4096, False, "tiles of 128 x 256, clusters of 2"),
        (4096, 4097, 4096, False, "the second operand is repacked"),
    ],
)
def test_an_explanation_tells_the_tile(m: int, n: int, k: int, by_columns: bool, told: str, monkeypatch) -> None:
    a = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.empty((n, k) if by_columns else (k, n), device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr("kernel_twins.functional.backends.ordered", lambda *_: ["cuda"])
    explanation = kernel_twins.explain(kernel_twins.matmul, a, b.t() if by_columns else b)
    assert told in explanation.configuration and f"\n  with {explanation.configuration}\n" in f"{explanation}\n"
    if by_columns:
        assert kernel_twins.explain(kernel_twins.linear, a, b).configuration == explanation.configuration
    wide = b.float().t() if by_columns else b.float()
    assert kernel_twins.explain(kernel_twins.matmul, a.float(), wide).configuration == ""
