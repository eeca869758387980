"""The examples on a GPU, the decoder layer at its own size."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.examples.test_examples import run

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_models_learn_the_same() -> None:
    for library in ("transformers", "timm"):
        pytest.importorskip(library)
    lines = run("train.py", "--steps", 8, "--heads", 4, "--layers", 2, "--tokens", 256, "--vocabulary", 4096)
    rows = [line.split(", ")[1].split() for line in lines if line.split(", ")[0] in ("llama", "gpt2", "bert", "vit")]
    assert len(rows) == 16
    for _, first, last, _, found, *_ in rows:
        assert float(last) < float(first) and float(found) == pytest.approx(float(last), rel=0.02)


@pytest.mark.usefixtures("alone")
def test_a_decoder_layer_computes_the_same() -> None:
    _, *rows = run("decoder.py", "--repeats", 3)
    assert len(rows) == 4 and all(float(row.split()[-1]) < 0.05 for row in rows)
