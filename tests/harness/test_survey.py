"""The hardware survey: its datasheet table, its documents, its command line, and the ceilings that others read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_twins.harness import ceilings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "hardware-survey"
sys.path.insert(0, str(FOLDER))

import datasheets  # noqa: E402
import survey  # noqa: E402
from render import datasheet_limit, render  # noqa: E402

SHEETS = datasheets.load()
PUBLISHED = sorted((FOLDER / "results").glob("*.json"))
REFERENCE = FOLDER / "results" / "h100-sxm.json"


def measurement(name: str, value: float, unit: str, **sensors: Any) -> dict[str, Any]:
    known = {"sm_clock_mhz": 1755.0, "memory_clock_mhz": 2619.0, "power_w": 455.5, "power_max_w": 698.4}
    known |= {"temperature_c": 51.0, "throttle": "sw_power_cap+sw_thermal"}  # type: ignore[dict-item]
    spread = {"n": 20, "iqr": value / 100, "min": value, "max": value, "iterations": 3}
    return {"name": name, "value": value, "unit": unit, **spread, **known, **sensors}


def example(**device: Any) -> dict[str, Any]:
    """A survey of an H100 with round figures."""
    rates = {"dram_read": 3000.0, "dram_copy": 2800.0, "dram_write": 2900.0, "l2_read": 6000.0, "shared_read": 30000.0}
    compute = {"fma_fp32": 60.0, "mma_bf16": 450.0, "wgmma_bf16": 600.0, "mm_bf16_4096x4096x4096": 720.0}
    copies = {"h2d_pinned": 55.0, "d2h_pinned": 54.0}
    return {
        "gpu": "h100-sxm",
        "date": "2026-01-02",
        "device": {
            "name": "NVIDIA H100 80GB HBM3",
            "compute_capability": "9.0",
            "multiprocessors": 132,
            "memory_bytes": 80 * 1024**3,
            "l2_bytes": 50 * 1024**2,
            "shared_memory_per_multiprocessor_bytes": 228 * 1024,
            "shared_memory_per_block_bytes": 227 * 1024,
            "registers_per_multiprocessor": 65536,
            "threads_per_multiprocessor": 2048,
            "uuid_sha256_12": "0123456789ab",
            "power_limit_w": 700.0,
            "pcie_generation": 5,
            "pcie_width": 16,
            "sm_clock_max_mhz": 1980,
            "memory_clock_max_mhz": 2619,
            "memory_bus_bits": 5120,
            "mig": False,
            "ecc": True,
            **device,
        },
        "software": {"driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "python": "3.12.3"},
        "measurements": [
            *(measurement(name, value, "GB/s") for name, value in (rates | copies).items()),
            *(measurement(name, value, "TFLOP/s") for name, value in compute.items()),
            measurement("launch", 2.25, "us"),
        ],
    }


def row(document: str, label: str) -> list[str]:
    (line,) = [line for line in document.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


# ---- the datasheet table


def test_fourteen_gpus_are_in_the_table() -> None:
    assert len(SHEETS) == 14
    assert all(sheet.name in datasheets.table() for sheet in SHEETS.values())


def test_every_figure_has_a_source() -> None:
    assert all(len(cell.source) > 10 for sheet in SHEETS.values() for cell in sheet.cells.values())


def close(actual: float, expected: float, tolerance: float = 0.015) -> bool:
    return abs(actual - expected) <= tolerance * expected


@pytest.mark.parametrize("gpu", SHEETS)
def test_bandwidth_is_bus_times_data_rate(gpu: str) -> None:
    value = {key: cell.value for key, cell in SHEETS[gpu].cells.items() if key.startswith("memory_")}
    computed = value["memory_bus"] / 8 * value["memory_data_rate"]
    # The sheets of these two round down: their memory runs at 3.186 and 6.402 Gbit/s a pin.
    tolerance = {"h100-pcie": 0.02, "h200": 0.025}.get(gpu, 0.015)
    assert close(computed, value["memory_bandwidth"], tolerance)


@pytest.mark.parametrize("gpu", SHEETS)
def test_fp32_is_lanes_times_two_times_clock(gpu: str) -> None:
    sheet = SHEETS[gpu]
    lanes, clock = sheet.cells["fp32_lanes_per_multiprocessor"].value, sheet.cells["boost_clock"].value
    computed = sheet.cells["multiprocessors"].value * lanes * 2 * clock / 1e6
    assert close(computed, sheet.cells["fp32"].value)


@pytest.mark.parametrize("gpu", [gpu for gpu in SHEETS if "tensor_clock" in SHEETS[gpu].cells])
def test_tensor_rate_is_dense_and_follows_from_its_clock(gpu: str) -> None:
    sheet = SHEETS[gpu]
    per_clock = sheet.cells["half_flop_per_clock_per_multiprocessor"].value * sheet.cells["multiprocessors"].value
    assert close(per_clock * sheet.cells["tensor_clock"].value / 1e6, sheet.cells["fp16"].value)


@pytest.mark.parametrize("gpu", SHEETS)
def test_precisions_stand_in_whole_proportions(gpu: str) -> None:
    sheet = SHEETS[gpu]
    half = sheet.cells["fp16"].value
    assert sheet.value("bf16") in (half, None)
    assert close(sheet.value("tf32") or half / 2, half / 2, 0.025)
    assert close(sheet.value("fp8") or half * 2, half * 2, 0.025)
    assert any(close(sheet.value("int8") or half * 2, half * factor, 0.025) for factor in (2, 4))


def test_the_gpu_at_hand_stands_out_in_the_table() -> None:
    assert "**H100 SXM**" in datasheets.table("h100-sxm")
    assert "**" not in datasheets.table("some-other-gpu")


# ---- the documents


def test_shares_of_the_datasheet() -> None:
    document = render(example())
    assert row(document, "device memory, read")[1:6] == ["3,000", "GB/s", "1.0 %", "20", "89.6 %"]  # of 3350
    assert row(document, "fp32 FMA")[5] == "89.7 %"  # of 66.9
    assert row(document, "bf16 tensor, torch.mm 4096x4096x4096")[5] == "72.8 %"  # of 989.4
    assert row(document, "shared memory, read")[5] == "89.7 %"  # of 132 x 128 bytes x 1.98 GHz = 33454
    assert row(document, "host to device, pinned")[5] == "87.3 %"  # of 16 lanes of 3.938
    assert row(document, "L2, read")[5] == "-"  # no datasheet says
    assert row(document, "launch, back to back")[1:3] == ["2.25", "µs"]


def test_sensors_stand_beside_each_measurement() -> None:
    assert row(render(example()), "fp32 FMA")[6:] == [
        "1,755",
        "2,619",
        "455.5",
        "698.4",
        "51",
        "sw_power_cap, sw_thermal",
    ]


def test_balance_points_are_rate_over_bandwidth() -> None:
    points = ceilings.Ceilings.of(example()).balance_points()
    assert points == {"fp32_dram": 20, "fp32_l2": 10, "bf16_dram": 240, "bf16_l2": 120}
    assert row(render(example()), "bf16") == ["bf16", "240", "120"]


def test_what_nvml_does_not_say_is_left_blank() -> None:
    silent = example(power_limit_w=None, pcie_generation=None, pcie_width=None, ecc=None, mig=None)
    for entry in silent["measurements"]:
        entry |= dict.fromkeys(
            ("sm_clock_mhz", "memory_clock_mhz", "power_w", "power_max_w", "temperature_c", "throttle")
        )
    document = render(silent)
    assert "None" not in document
    assert row(document, "fp32 FMA")[6:] == ["-"] * 6
    assert row(document, "host to device, pinned")[5] == "-"


def test_a_gpu_without_a_datasheet_has_no_shares() -> None:
    unknown = example() | {"gpu": "some-other-gpu"}
    assert "not in the datasheet table" in render(unknown)
    assert row(render(unknown), "fp32 FMA")[5] == "-"


def test_rendering_is_a_fixed_point() -> None:
    assert render(json.loads(json.dumps(example()))) == render(example())


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_documents_agree_with_their_data(path: Path) -> None:
    recorded = json.loads(path.read_text())
    assert recorded["gpu"] == path.stem
    assert path.with_suffix(".md").read_text() == render(recorded)


def test_the_reference_survey_is_whole_and_plausible() -> None:
    recorded = json.loads(REFERENCE.read_text())
    assert ceilings.load("h100-sxm").gpu == "h100-sxm"
    for entry in recorded["measurements"]:
        assert entry["n"] >= 20
        assert entry["sm_clock_mhz"]
        assert entry["power_w"]
        limit = datasheet_limit(entry["name"], recorded["device"], SHEETS["h100-sxm"])
        # A miscounted probe would be off by a factor; mma.sync cannot use the whole rate on this chip, and
        # pageable copies depend on the host.
        if limit and entry["name"] != "mma_bf16" and not entry["name"].endswith("pageable"):
            assert 0.6 < entry["value"] / limit < 1.01, entry["name"]


# ---- the command line


def test_without_a_gpu_it_shows_the_table_and_says_so(tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, FOLDER / "survey.py"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=True,
    )
    assert "| H100 SXM |" in run.stdout
    assert "nothing was measured" in run.stderr


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Surveys are read and written below tmp_path."""
    for module in (survey, ceilings):
        monkeypatch.setattr(module, "PUBLISHED", tmp_path / "results")
        monkeypatch.setattr(module, "PRIVATE", tmp_path / "runs")
    (tmp_path / "results").mkdir()
    return tmp_path


def test_without_a_gpu_it_shows_the_recorded_surveys(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(survey, "why_no_gpu", lambda: "no GPU")
    (folders / "results" / "h100-sxm.json").write_text(json.dumps(example()))
    assert survey.main([]) == 0
    assert render(example()) in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--publish"], ["--json", "-"]])
def test_a_survey_that_was_asked_for_and_cannot_be_made_is_no_success(
    option: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "why_no_gpu", lambda: "no GPU")
    assert survey.main(option) == survey.NO_GPU


@pytest.fixture
def measured(folders: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a survey of the GPU at hand returns; tests change it."""
    measure = pytest.importorskip("measure", reason="torch is not installed")
    result = example()
    monkeypatch.setattr(survey, "why_no_gpu", lambda: "")
    monkeypatch.setattr(measure, "survey", lambda: result)
    return result


@pytest.mark.parametrize(
    ("gpu", "options", "path"),
    [
        ("h100-sxm", [], "results/h100-sxm.json"),
        ("l4", [], "runs/survey-l4.json"),
        ("l4", ["--publish"], "results/l4.json"),
    ],
)
def test_a_survey_is_written_where_others_look_for_it(
    gpu: str, options: list[str], path: str, measured: dict[str, Any], folders: Path
) -> None:
    measured["gpu"] = gpu
    assert survey.main(options) == 0
    assert json.loads((folders / path).read_text()) == measured
    assert (folders / path).with_suffix(".md").read_text() == render(measured)
    assert ceilings.load(gpu).gpu == gpu


def test_json_alone_goes_to_stdout(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert survey.main(["--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == measured


# ---- the ceilings


def test_the_bf16_ceiling_is_the_best_of_its_measurements() -> None:
    assert ceilings.Ceilings.of(example()).bf16 == 720
    assert ceilings.Ceilings.of(example()).fp32 == 60
    assert ceilings.Ceilings.of(example()).dram_copy == 2800


def test_a_missing_survey_names_those_there_are(folders: Path) -> None:
    (folders / "results" / "h100-sxm.json").write_text(json.dumps(example()))
    with pytest.raises(FileNotFoundError, match=r"gpu is 'l4'.*published: h100-sxm.*survey\.py"):
        ceilings.load("l4")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_gpus_are_found_in_the_table_by_the_name_that_the_driver_reports(name: str, slug: str) -> None:
    assert ceilings.gpu_slug(name) == slug
    assert slug in SHEETS


# ---- the probes


def test_python_counts_the_work_as_the_probes_do() -> None:
    measure = pytest.importorskip("measure", reason="torch is not installed")
    header = (FOLDER / "probes.h").read_text()
    constants = dict(re.findall(r"constexpr int64_t (\w+_PER_SM) = (\d+);", header))
    assert len(constants) == 4
    assert {name: getattr(measure, name) for name in constants} == {name: int(text) for name, text in constants.items()}
    assert "RESULT_BYTES = 1 << 20;" in header
    assert measure.RESULT_BYTES == 1 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("probe", ["dram_read", "l2_read", "shared_read", "fma_fp32", "mma_bf16", "wgmma_bf16"])
def test_a_probe_does_the_work_that_is_counted(probe: str, iterations: int) -> None:
    import measure
    import torch

    if probe not in measure.counting_probes():
        pytest.skip("wgmma needs compute capability 9.0")
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    expected = iterations * measure.work_per_iteration(probe, measure.COUNTED_BYTES, multiprocessors)
    assert measure.counted_work(probe, iterations) == expected


@pytest.mark.gpu
def test_the_write_probe_writes_everything_behind_the_results() -> None:
    import torch

    from kernel_twins.harness.load import extension

    words = 1 << 20
    buffer = torch.zeros((1 << 20) + 4 * words, device="cuda", dtype=torch.uint8)
    extension().probe("dram_write", buffer, 1)
    data = buffer[1 << 20 :].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    assert torch.equal(data, torch.arange(words, device="cuda") * 2654435761 & 0xFFFFFFFF)
    assert not buffer[: 1 << 20].any()


@pytest.mark.gpu
def test_the_copy_probe_copies_one_half_onto_the_other() -> None:
    import measure

    from kernel_twins.harness.load import extension

    buffer = measure._normal_buffer(1 << 22)
    before = buffer.clone()
    extension().probe("dram_copy", buffer, 1)
    middle = (1 << 20) + (1 << 21)
    assert buffer[:middle].equal(before[:middle])
    assert buffer[middle:].equal(before[1 << 20 : middle])


@pytest.mark.gpu
@pytest.mark.parametrize("data_bytes", [0, 1 << 16, (1 << 20) + 16])
def test_a_buffer_of_the_wrong_size_is_refused(data_bytes: int) -> None:
    import torch

    from kernel_twins.harness.load import extension

    buffer = torch.zeros((1 << 20) + data_bytes, device="cuda", dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="buffer has"):
        extension().probe("dram_read", buffer, 1)
