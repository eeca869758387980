"""The examples run, at sizes for a CPU, and PyTorch's modules and ours learn the same there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *arguments: object) -> list[str]:
    """The lines that an example prints."""
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_models_learn_the_same() -> None:
    for library in ("transformers", "timm"):
        pytest.importorskip(library)
    sizes = ("--heads", 1, "--layers", 1, "--batch", 2, "--tokens", 32, "--vocabulary", 100)
    lines = run("train.py", "--device", "cpu", "--steps", 3, "--ways", "eager", "checkpointed", *sizes)
    rows = [line for line in lines if ", " in line and line.split(", ")[0] in ("llama", "gpt2", "bert", "vit")]
    assert len(rows) == 8
    for row in rows:
        _, _, *losses = row.split()[:6]
        assert losses[:2] == losses[2:] and float(losses[1]) < float(losses[0])


@pytest.mark.slow
def test_a_decoder_layer_computes_the_same() -> None:
    sizes = ("--columns", 64, "--d", 16, "--kv-heads", 2, "--hidden", 96, "--batch", 2, "--tokens", 32)
    _, *rows = run("decoder.py", "--device", "cpu", "--repeats", 1, *sizes)
    assert [row.split("  ")[0] for row in rows] == ["PyTorch", "ours", "PyTorch, compiled", "ours, compiled"]
    assert all(float(row.split()[-1]) < 0.03 for row in rows)
