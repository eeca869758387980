"""Proton's tree to rows and to the log's lines. The tree is written by hand in the form of Triton 3.6's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kernel_twins import OPS
from kernel_twins.report.measure import proton, publish
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.spec import Name

OP = OPS["reduction"]
CASE = OP.profile_case
POLLING, SEVERAL = "kl.reduction.triton.v08_polling", "kl.reduction.cuda.v05_grid_stride"
DEVICES = {
    "CUDA": {
        "0": {"arch": "90", "bus_width": 5120, "clock_rate": 1980000, "memory_clock_rate": 2619000, "num_sms": 132}
    }
}


def frame(name: str, metrics: dict[str, Any], children: list[dict[str, Any]]) -> dict[str, Any]:
    return {"children": children, "frame": {"name": name, "type": "function"}, "metrics": metrics}


def kernel(name: str, count: int, ns: int) -> dict[str, Any]:
    return frame(name, {"count": count, "device_id": "0", "device_type": "CUDA", "time (ns)": ns}, [])


def scope(label: str, *kernels: dict[str, Any], calls: int = 10) -> dict[str, Any]:
    return frame(label, {"bytes": float(calls * OP.bytes(CASE)), "flops": float(calls * OP.flops(CASE))}, [*kernels])


def write(folder: Path, *scopes: dict[str, Any]) -> Path:
    warm_up = kernel("warm_up_kernel", 3, 7)
    root = frame("ROOT", {"count": 0, "time (ns)": 0}, [warm_up, *scopes])
    path = folder / "reduction.proton.hatchet"
    path.write_text(json.dumps([root, DEVICES]))
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write(
        tmp_path,
        scope(POLLING, kernel("reduction_v08_polling_kernel", 10, 912_000)),
        scope(
            SEVERAL,
            kernel("_Z32reduction_v05_grid_stride_kernelI6float4EvPKfPfl", 10, 900_000),
            kernel("_Z32reduction_v05_grid_stride_kernelIfEvPKfPfl", 10, 30_000),
        ),
        scope(
            "kl.reduction.torch.baseline",
            kernel("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(float)", 10, 900_000),
            kernel("_ZN2at6native4tailEv", 10, 100_000),
        ),
    )


def test_every_kernel_below_a_label_becomes_a_row(tree: Path) -> None:
    rows = proton.rows(tree, OP, "r1", {POLLING: "12345678:9"})
    assert list(rows.columns) == store.TABLES["proton"]
    assert list(rows["kernel"]) == [
        "reduction_v08_polling_kernel", "reduction_v05_grid_stride_kernel", "reduce_kernel", "tail",
    ]  # fmt: skip
    first = rows.iloc[0]
    assert (first["backend"], first["step"], first["case"]) == ("triton", "v08_polling", CASE.slug)
    assert (first["count"], first["time_ns"]) == ("10", "912000")
    assert (first["bytes"], first["flops"]) == (str(10 * OP.bytes(CASE)), str(10 * OP.flops(CASE)))
    assert (first["code"], first["run"]) == ("12345678:9", "r1")


def test_instances_of_one_template_are_one_kernel(tree: Path) -> None:
    rows = proton.rows(tree, OP, "r1", {})
    (row,) = rows[rows["step"] == "v05_grid_stride"].to_dict("records")
    assert (row["count"], row["time_ns"]) == ("20", "930000")


def test_rows_survive_the_way_through_the_file(tree: Path, tmp_path: Path) -> None:
    rows = proton.rows(tree, OP, "r1", {})
    store.write(store.path(tmp_path, "reduction", "proton"), rows)
    again = store.read_table(tmp_path, "reduction", "proton")
    assert again.equals(rows.astype(str))
    assert proton.told(again, OP, CASE, Name("triton", "v08_polling")) == proton.told(
        rows, OP, CASE, Name("triton", "v08_polling")
    )


def test_the_log_is_told_times_rates_and_what_is_missing(tree: Path) -> None:
    rows = proton.rows(tree, OP, "r1", {})
    (line,) = proton.told(rows, OP, CASE, Name("triton", "v08_polling"))
    gbps = OP.bytes(CASE) / 91_200
    assert line.startswith("Proton: reduction_v08_polling_kernel 91.2 µs a call, ")
    told = re.search(r"([\d,]+) GB/s of the minimum bytes", line)
    assert told is not None
    assert int(told[1].replace(",", "")) == pytest.approx(gbps, abs=0.5)
    assert line.endswith("counters were not collected")
    (line,) = proton.told(rows, OP, CASE, Name("torch"))
    assert "2 kernels 100 µs a call (reduce_kernel 90 µs, tail 10 µs)" in line
    assert proton.told(rows, OP, CASE, Name("cub")) == []


def test_another_steps_kernel_is_refused(tmp_path: Path) -> None:
    foreign = scope(POLLING, kernel("reduction_v07_last_block_kernel", 10, 912_000))
    own = scope(SEVERAL, kernel("reduction_v05_grid_stride_kernel", 20, 900_000))
    kept, refused = publish._without_foreign(OP, proton.rows(write(tmp_path, foreign, own), OP, "r1", {}))
    assert list(kept["step"]) == ["v05_grid_stride"]
    told = "no launch is of the step's own kernel, but of reduction_v07_last_block_kernel"
    assert refused.to_numpy().tolist() == [[CASE.slug, "triton", "v08_polling", told, "", "r1"]]


def test_products_are_told_in_flop(tmp_path: Path) -> None:
    op = OPS["matmul_bf16"]
    metrics = {"bytes": 10.0 * op.bytes(op.profile_case), "flops": 10.0 * op.flops(op.profile_case)}
    cell = frame("kl.matmul_bf16.torch.baseline", metrics, [kernel("nvjet_sm90", 10, 2_000_000)])
    rows = proton.rows(write(tmp_path, cell), op, "r1", {})
    (line,) = proton.told(rows, op, op.profile_case, Name("torch"))
    assert "nvjet_sm90 200 µs a call, 687 TFLOP/s" in line


@pytest.mark.parametrize("length", [0, 1, 200, -1])
def test_a_tree_that_is_cut_short_is_refused(tree: Path, length: int) -> None:
    tree.write_text(tree.read_text()[:length])
    with pytest.raises(InvalidDataError, match=r"reduction\.proton\.hatchet is not a tree.*--tool proton"):
        proton.rows(tree, OP, "r1", {})


@pytest.mark.parametrize("content", ["[1]", '{"a": 1}', '[{"frame": {}, "children": [], "metrics": {}}]', "\ufeff[]"])
def test_another_files_content_is_refused(tree: Path, content: str) -> None:
    tree.write_text(content)
    with pytest.raises(InvalidDataError, match="is not a tree"):
        proton.rows(tree, OP, "r1", {})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match="gone"):
        proton.rows(tmp_path / "gone.hatchet", OP, "r1", {})


def test_a_cell_that_is_missing_is_noticed(tree: Path) -> None:
    missing = "kl.reduction.cuda.v01_interleaved"
    with pytest.raises(InvalidDataError, match=f"holds no {missing}: "):
        proton.rows(tree, OP, "r1", {POLLING: "", missing: ""})


def test_a_scope_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=f"{POLLING}: Proton saw 0 kernels, 10 expected"):
        proton.rows(write(tmp_path, scope(POLLING)), OP, "r1", {})


def test_lost_launches_are_noticed(tmp_path: Path) -> None:
    """CUPTI drops records when its buffers run over; a sum that lacks some would be too fast a time."""
    short = write(tmp_path, scope(POLLING, kernel("reduction_v08_polling_kernel", 9, 820_000)))
    with pytest.raises(InvalidDataError, match="Proton saw 9 kernels, 10 expected"):
        proton.rows(short, OP, "r1", {})


def test_another_number_of_calls_is_noticed(tmp_path: Path) -> None:
    twice = write(tmp_path, scope(POLLING, kernel("reduction_v08_polling_kernel", 10, 912_000), calls=20))
    with pytest.raises(InvalidDataError, match="10 calls have"):
        proton.rows(twice, OP, "r1", {})


def test_a_kernel_without_time_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=POLLING):
        proton.rows(write(tmp_path, scope(POLLING, kernel("k", 10, 0))), OP, "r1", {})


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("reduction_v08_polling_kernel", "reduction_v08_polling_kernel"),
        ("_Z17vector_add_kernelPKfS0_Pfl", "vector_add_kernel"),
        ("_ZN12_GLOBAL__N_117vector_add_kernelIfEEvPKT_", "vector_add_kernel"),
        ("_ZN3cub17CUB_300001_SM_9006detail6reduce18DeviceReduceKernelINS2_10policy_hubEEEvT0_", "DeviceReduceKernel"),
        ("void (anonymous namespace)::vector_add_kernel<float>(float const*)", "vector_add_kernel"),
        ("void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)", "reduce_kernel"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"),
        ("_Znonsense", "_Znonsense"),
    ],
)
def test_kernels_are_called_as_ncu_calls_them(called: str, name: str) -> None:
    assert proton.kernel_name(called) == name


def test_a_tree_that_proton_wrote_on_an_h100(tmp_path: Path) -> None:
    recorded = Path(__file__).parents[1] / "fixtures" / "proton" / "reduction.json"
    rows = proton.rows(recorded, OP, "r1", {})
    assert len(set(zip(rows["backend"], rows["step"], strict=True))) == 15
    polling = rows[rows["step"] == "v08_polling"].iloc[0]
    assert (polling["kernel"], polling["count"], polling["time_ns"]) == ("reduction_v08_polling_kernel", "10", "876690")
    (line,) = proton.told(rows, OP, CASE, Name("cub"))
    assert "2 kernels 88.5 µs a call" in line
