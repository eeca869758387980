"""What is installed is what the clone has: the same modules, found without the clone."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from build_support import packages
from kernel_twins import OPS
from tests import copies

ROOT = Path(__file__).resolve().parents[2]
TRITON_STEPS = [op.module(step.name) for op in OPS.values() for step in op.steps_of("triton")]


def test_the_clone_finds_its_own_folders() -> None:
    for name in TRITON_STEPS:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None
        assert Path(spec.origin).is_relative_to(ROOT / "triton-kernels")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python part as a wheel would install it, from a clone that is gone afterwards."""
    clone, site = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("site")
    for name in ("kernel_twins", "triton-kernels", "build_support"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone / name)
    (clone / "torch.py").write_text("raise ImportError('hidden: nothing is to be compiled here')\n")
    stale = site / "kernel_twins" / "_triton" / "dropout.py"  # of an earlier build, before it became a folder
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(site)]
    subprocess.run(command, cwd=clone, env={**os.environ, "PYTHONPATH": str(clone)}, check=True)
    shutil.rmtree(clone)
    return site


def run_installed(site: Path, *arguments: str) -> str:
    """Run Python in another folder with only the installed package to import."""
    environ = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=site.parent, env=environ, capture_output=True, text=True, check=True).stdout


def test_installed_modules_are_found_where_they_were_installed(installed: Path) -> None:
    script = "import importlib.util, sys\nfor name in sys.argv[1:]: print(importlib.util.find_spec(name).origin)"
    modules = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("kernel_twins/report/**/[a-z]*.py")]
    report = [".".join(module.parts) for module in modules]
    others = [path.relative_to(ROOT / "triton-kernels").with_suffix("") for path in ROOT.glob("triton-kernels/*/*.py")]
    shared = [".".join(["kernel_twins._triton", *other.parts]) for other in others]
    names = ["kernel_twins", *TRITON_STEPS, *shared, *report]
    origins = run_installed(installed, "-c", script, *names).split("\n")[:-1]
    assert len(origins) == len(names)
    assert all(Path(origin).is_relative_to(installed) for origin in origins)


def test_what_an_earlier_build_left_is_not_installed(installed: Path) -> None:
    assert (installed / "kernel_twins" / "_triton" / "dropout").is_dir()
    assert not (installed / "kernel_twins" / "_triton" / "dropout.py").exists()


def test_the_installed_package_lists_the_ladders(installed: Path) -> None:
    listing = run_installed(installed, "-m", "kernel_twins", "list")
    assert all(step.name in listing for op in OPS.values() for step in op.steps)


@pytest.mark.parametrize("command", ["run", "bench", "show"])
def test_messages_of_the_installed_package_name_no_file_that_it_lacks(command: str, installed: Path) -> None:
    """But for those that they send to a clone."""
    environ = {**os.environ, "PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    arguments = [sys.executable, "-m", "kernel_twins", command, "vector_add", "v03", *(["cuda"] * (command != "bench"))]
    done = subprocess.run(arguments, cwd=installed.parent, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr.startswith("kernel_twins: ")
    there = re.sub(r"`[^`]+` in a clone of kernel-twins", "", done.stderr)
    assert not re.search(r"setup\.py|requirements\.txt|profiling/|hardware-survey/", there), done.stderr


@pytest.mark.slow
def test_a_wheel_has_what_public_functions_run_and_no_ladder(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA, so there is nothing to build")
    lacking = copies.unbuilt()
    if lacking and os.environ.get("REQUIRE_BUILD") != "1":
        pytest.skip(lacking)
    assert not lacking
    copy = copies.copied(tmp_path / "copy")
    copies.build(copy)
    assert {path.name.partition(".")[0] for path in copy.glob("kernel_twins/*.so")} == {"_C", "_ladder"}
    copies.build(copy, "bdist_wheel")
    (wheel,) = copy.glob("dist/*.whl")
    with zipfile.ZipFile(wheel) as packed:
        compiled = [name for name in packed.namelist() if name.endswith(".so")]
        packed.extractall(tmp_path / "site")
    assert [name.partition(".")[0] for name in compiled] == ["kernel_twins/_C"]
    script = (
        "import torch, kernel_twins\n"
        "print(float(kernel_twins.softmax(torch.zeros(2, 4)).sum()))\n"
        "kernel_twins.load('softmax', kernel_twins.OPS['softmax'].behind['cuda'][0], 'cuda')\n"
        "try: kernel_twins.load('vector_add', 'v01_scalar', 'cuda')\n"
        "except kernel_twins.errors.UnavailableError as error: print(error)\n"
    )
    computed, refused = run_installed(tmp_path / "site", "-c", script).splitlines()
    assert computed == "2.0"
    assert re.match("the CUDA side of vector_add v01_scalar is missing, .*: run `python setup.py build_ext`", refused)


def test_the_autotuners_winners_are_installed(installed: Path) -> None:
    committed = {path.name for path in ROOT.glob("triton-kernels/tuned/*.json")}
    assert {path.name for path in installed.glob("kernel_twins/_triton/tuned/*.json")} == committed


def test_importing_the_package_loads_neither_torch_nor_triton() -> None:
    script = "import sys, kernel_twins; sys.exit(bool({'torch', 'triton'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_every_mapped_package_is_a_folder() -> None:
    described = packages.describe(ROOT)
    assert set(described["package_dir"]) <= set(described["packages"])
    assert all((ROOT / folder).is_dir() for folder in described["package_dir"].values())


def test_pins_lie_in_the_ranges_of_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    ranges = [Requirement(line) for group in groups for line in group]
    text = "".join((ROOT / file).read_text() for file in ("requirements.txt", "examples/requirements.txt"))
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    for wanted in ranges:
        assert wanted.name in pins, f"{wanted.name} is not pinned in requirements.txt"
        assert wanted.specifier.contains(pins[wanted.name]), f"{wanted} excludes the pinned {pins[wanted.name]}"
