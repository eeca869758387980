#!/usr/bin/env python3
"""What ldmatrix brings to matmul_bf16 v03_swizzled, and what the XOR does: each without the other, on a GPU of 9.0.

v03 changes two things of v02 at once. The variants are made of the two steps' sources, so that they cannot fall behind
them: v03 with pieces that stay in their places, and v02 with pieces that change them. All are checked against float64,
timed in turns, and profiled by ncu. Writes ``profiling/data/<gpu>/trials/ldmatrix_or_xor.csv``.

Predicted before it was measured: ldmatrix alone takes a third of the instructions away and leaves the wavefronts of
shared memory, since its 8 rows begin in the same bank, so the time stays above 0.9 of v02's. The XOR alone takes most
wavefronts away and adds instructions for the addresses, and the time falls to less than 0.6 of v02's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from build_support import sources, toolkit  # noqa: E402
from kernel_twins import ops  # noqa: E402
from kernel_twins.harness.ceilings import gpu_slug  # noqa: E402
from kernel_twins.harness.check import Judge  # noqa: E402
from kernel_twins.report.calls.sampled_timing import timed  # noqa: E402
from kernel_twins.report.measure import stage  # noqa: E402
from kernel_twins.report.ncu import ncu  # noqa: E402
from kernel_twins.report.rows.base import DATA  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

Product = Callable[..., None]

OP, CASE = ops.get("matmul_bf16"), Case.parse("4096x4096x4096-bf16")
FOLDER = ROOT / "cuda-kernels" / "matmul" / "matmul_bf16"
METRICS = {
    "instructions": "smsp__inst_executed.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "lost_to_banks": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
}
COLUMNS = ["variant", "times_us", *METRICS, "sm_clock_mhz", "gpu", "driver", "nvcc", "ncu", "date"]

_LAUNCH = """
extern "C" void launch(const void* a, const void* b, void* out, int64_t M, int64_t N, int64_t K, cudaStream_t stream) {
  matmul_bf16_STEP({a, b, out, M, N, K, K, 1, N, 1, Dtype::bf16, Dtype::bf16, nullptr, stream});
}
"""
_SWIZZLED = re.compile(r"template <int COLS>\n__device__ inline int swizzled.*?\n}\n", re.DOTALL)  # of v03
_COPIES = "template <bool WIDE, int ROWS, int COLS, typename T>"  # stands behind it there
# What is written otherwise: in v03 the place of a piece, in v02 every place where a piece is stored or read.
_STAY = {"(piece ^ row / ROWS % PIECES)": "(piece ^ row / ROWS % PIECES * 0)"}
_XOR = {
    "tile + row * COLS + piece * PIECE": "tile + swizzled<COLS>(row, piece)",
    "tile[row * COLS + col] =": "tile[swizzled<COLS>(row, col / PIECE) + col % PIECE] =",
    "&tiles.a[row * BLOCK_K + k]": "&tiles.a[swizzled<BLOCK_K>(row, k / PIECE) + k % PIECE]",
    "&tiles.b[col * BLOCK_K + k]": "&tiles.b[swizzled<BLOCK_K>(col, k / PIECE) + k % PIECE]",
    "tiles.b[k * BLOCK_N + col]": "tiles.b[swizzled<BLOCK_N>(k, col / PIECE) + col % PIECE]",
    "tiles.b[(k + 1) * BLOCK_N + col]": "tiles.b[swizzled<BLOCK_N>(k + 1, col / PIECE) + col % PIECE]",
}


def variants() -> dict[str, str]:
    """The sources by variant; ValueError where a step no longer has what is to be replaced."""
    v02, v03 = ((FOLDER / f"{step}.cu").read_text() for step in ("v02_tensor_cores", "v03_swizzled"))
    (swizzled,) = _SWIZZLED.findall(v03)
    texts = {
        "v02_tensor_cores": v02,
        "xor_alone": _replaced(v02, {_COPIES: swizzled + _COPIES, **_XOR}).replace("v02_tensor_cores", "xor_alone"),
        "ldmatrix_alone": _replaced(v03, _STAY).replace("v03_swizzled", "ldmatrix_alone"),
        "v03_swizzled": v03,
    }
    return {name: text + _LAUNCH.replace("STEP", name) for name, text in texts.items()}


def _replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in the step, must stand there once")
        text = text.replace(old, new)
    return text


def compiled(name: str, text: str, folder: Path) -> None:
    """Leave a variant's library in a folder, compiled as the extension is."""
    source = folder / f"{name}.cu"
    source.write_text(text)
    nvcc = toolkit.find(os.environ, torch.version.cuda or "").nvcc
    flags = [*sources.NVCC_FLAGS, "-arch=sm_90a", "-shared", "-Xcompiler", "-fPIC"]
    places = [f"-I{ROOT / 'cuda-kernels'}", f"-I{FOLDER}", "-o", str(source.with_suffix(".so"))]
    subprocess.run([str(nvcc), *flags, *places, str(source)], check=True)


def loaded(library: Path) -> Product:
    launch = ctypes.CDLL(str(library)).launch

    def product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        sizes = (ctypes.c_int64(size) for size in (a.shape[0], b.shape[1], a.shape[1]))
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, out))
        launch(*pointers, *sizes, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

    return product


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = OP.inputs(CASE, generator)
    return a, b


def counted(folder: Path) -> pd.DataFrame:
    """ncu's counters, a row a variant: of this script, which launches each once."""
    command = [str(ncu.find()), "--csv", "--page", "raw", "--cache-control", "all", "--clock-control", "none"]
    command += ["--kernel-name", "regex:matmul_bf16_", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, __file__, "--launch", str(folder)]
    environment = os.environ | {"LC_ALL": "C"}  # ncu writes numbers as the locale does
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    told = done.stdout.splitlines()
    (folder / "counters.csv").write_text("\n".join(line for line in told if line.startswith('"')))
    return pd.read_csv(folder / "counters.csv", skiprows=[1], thousands=",")  # the second line has units


def launch_once(folder: Path) -> None:
    """For ncu."""
    a, b = operands()
    out = torch.empty(*CASE.shape[:2], dtype=a.dtype, device=a.device)
    for name in variants():
        loaded(folder / f"{name}.so")(a, b, out=out)
    torch.cuda.synchronize()


def measure(folder: Path) -> list[dict[str, object]]:
    """The rows; SystemExit where a variant is wrong."""
    texts = variants()
    for name, text in texts.items():
        compiled(name, text, folder)
    products = {name: loaded(folder / f"{name}.so") for name in texts}
    judge = Judge(OP, CASE)
    for name, product in products.items():
        if not (verdict := judge(product)).ok:
            raise SystemExit(f"{name} is wrong: {verdict.reason}")
    a, b = operands()
    out = torch.empty(*CASE.shape[:2], dtype=a.dtype, device=a.device)
    with torch.cuda.stream(torch.cuda.Stream()):
        times, sensors = timed({name: [partial(product, a, b, out=out)] for name, product in products.items()})
    counters = counted(folder)
    run = stage.new_run()
    return [
        {
            "variant": name,
            "times_us": " ".join(f"{value:.5g}" for value in times[name].times_us),
            **{column: int(counters[metric].iloc[place]) for column, metric in METRICS.items()},
            "sm_clock_mhz": sensors["sm_clock_mhz"],
            **{key: run[key] for key in ("gpu", "driver", "nvcc", "ncu", "date")},
        }
        for place, name in enumerate(products)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    if folder := parser.parse_args().launch:
        launch_once(folder)
        return
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name))
    target = DATA / gpu_slug(torch.cuda.get_device_name()) / "trials" / "ldmatrix_or_xor.csv"
    target.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=COLUMNS).to_csv(target, index=False)
    print(f"wrote {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
