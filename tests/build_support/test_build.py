"""The build finds what it needs or says what is missing; the built extension imports and refuses bad arguments."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from build_support import compiler, extension, parts, ptxas_gate, sources, step_table, toolkit
from build_support.toolkit import BuildError
from kernel_twins import OPS
from kernel_twins.spec import BACKENDS, Backend, Op

ROOT = sources.ROOT
DIVIDED = parts.divide(OPS.values())


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def make_toolkit(home: Path, release: str = "13.0", headers: bool = True, library: str = "lib64/libcudart.so") -> Path:
    """A folder that looks like a toolkit; its nvcc answers like the real one, which reports the folder above it."""
    answers = (
        f'case $1 in --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;\n'
        """--dryrun) echo "#$ TOP=$(dirname "$0")/.." >&2 ;; esac\n"""
    )
    write_script(home / "bin" / "nvcc", answers)
    if headers:
        (home / "include").mkdir(parents=True)
        (home / "include" / "cuda_runtime.h").touch()
    (home / library).parent.mkdir(parents=True, exist_ok=True)
    (home / library).touch()
    return home


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of site-packages/nvidia."""
    folder = tmp_path / "site-packages" / "nvidia"
    folder.mkdir(parents=True)
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if name == "nvidia" else None)
    return folder


class TestToolkit:
    def environ(self, tmp_path: Path, **variables: Path) -> dict[str, str]:
        # The fake nvcc needs dirname and echo; the folder of this machine's own nvcc comes after the fake one's.
        return {"PATH": f"{tmp_path}/usr/local/bin:/usr/bin:/bin"} | {
            name: str(path) for name, path in variables.items()
        }

    def test_cuda_home_comes_first(self, tmp_path: Path, index: Path) -> None:
        named = make_toolkit(tmp_path / "named")
        make_toolkit(tmp_path / "usr" / "local")
        make_toolkit(index / "cu13")
        assert toolkit.find(self.environ(tmp_path, CUDA_HOME=named), "13.0").home == named

    def test_nvcc_on_path_comes_before_the_index(self, tmp_path: Path, index: Path) -> None:
        on_path = make_toolkit(tmp_path / "usr" / "local")
        make_toolkit(index / "cu13")
        assert toolkit.find(self.environ(tmp_path), "13.0").home == on_path

    def test_a_wrapper_leads_to_the_toolkit_it_calls(self, tmp_path: Path, index: Path) -> None:
        real = make_toolkit(tmp_path / "cuda-13.0")
        write_script(tmp_path / "usr/local/bin/nvcc", f'exec {real}/bin/nvcc "$@"\n')
        assert toolkit.find(self.environ(tmp_path), "13.0").home == real

    def test_a_link_leads_to_the_toolkit_it_points_to(self, tmp_path: Path, index: Path) -> None:
        real = make_toolkit(tmp_path / "cuda-13.0")
        (tmp_path / "usr/local/bin").mkdir(parents=True)
        (tmp_path / "usr/local/bin/nvcc").symlink_to(real / "bin" / "nvcc")
        assert toolkit.find(self.environ(tmp_path), "13.0").home == real

    @pytest.mark.parametrize("lacking", [{"release": "12.4"}, {"headers": False}, {"library": "lib64/other.so"}])
    def test_an_nvcc_on_path_that_does_not_serve_is_passed_over(
        self, tmp_path: Path, index: Path, lacking: dict[str, Any]
    ) -> None:
        make_toolkit(tmp_path / "usr" / "local", **lacking)
        from_index = make_toolkit(index / "cu13", library="lib/libcudart.so.13")
        assert toolkit.find(self.environ(tmp_path), "13.0").home == from_index

    @pytest.mark.parametrize(
        ("lacking", "complaint"),
        [
            ({"release": "12.4"}, "is CUDA 12.4, and torch was built with CUDA 13"),
            ({"headers": False}, "has no include/cuda_runtime.h"),
            ({"library": "lib64/other.so"}, "has no libcudart.so"),
        ],
    )
    def test_a_cuda_home_that_does_not_serve_is_refused(
        self, tmp_path: Path, index: Path, lacking: dict[str, Any], complaint: str
    ) -> None:
        named = make_toolkit(tmp_path / "named", **lacking)
        make_toolkit(index / "cu13")
        with pytest.raises(BuildError, match=f"CUDA_HOME is '{named}'.*{complaint}.*unset it"):
            toolkit.find(self.environ(tmp_path, CUDA_HOME=named), "13.0")

    def test_a_toolkit_older_than_the_kernels_take_is_refused(self, tmp_path: Path, index: Path) -> None:
        named = make_toolkit(tmp_path / "named", release="12.6")
        with pytest.raises(BuildError, match=r"is CUDA 12\.6, and the kernels take 12\.8 or newer"):
            toolkit.find(self.environ(tmp_path, CUDA_HOME=named), "12.6")
        assert toolkit.inspect(make_toolkit(tmp_path / "newer", release="12.8"), 12).version == (12, 8)
        with pytest.raises(BuildError, match=r"pip install 'nvidia-cuda-nvcc==12\.8\.\*'"):
            toolkit.find({"PATH": ""}, "12.6")

    def test_nothing_found_names_all_places_and_the_command(self, index: Path) -> None:
        with pytest.raises(BuildError) as caught:
            toolkit.find({"PATH": ""}, "13.0")
        message = str(caught.value)
        assert "CUDA_HOME: not set" in message
        assert "nvcc on PATH: there is none" in message
        assert "nvidia-cuda-nvcc is not installed" in message
        assert "pip install 'nvidia-cuda-nvcc==13.0.*'" in message

    def test_a_versioned_library_gets_a_link_to_link_against(self, tmp_path: Path) -> None:
        for name in ("old", "new"):  # the second time the link must follow to the other toolkit
            home = make_toolkit(tmp_path / name, library="lib/libcudart.so.13")
            folder = toolkit.linkable_cudart(toolkit.inspect(home, 13), tmp_path / "build")
            assert (folder / "libcudart.so").resolve() == home / "lib" / "libcudart.so.13"

    def test_an_unversioned_library_is_linked_where_it_is(self, tmp_path: Path) -> None:
        home = make_toolkit(tmp_path / "cuda")
        assert toolkit.linkable_cudart(toolkit.inspect(home, 13), tmp_path / "build") == home / "lib64"


CONTAINERS = "7.5 8.0 8.6 9.0 10.0 12.0+PTX"  # what NVIDIA's PyTorch images export


@pytest.mark.parametrize(
    ("variable", "gpus", "expected"),
    [
        (None, [], "9.0a"),
        ("", [], "9.0a"),
        ("native", [(8, 9)], "8.9"),
        (None, [(9, 0)], "9.0a"),
        (None, [(8, 0), (9, 0), (8, 0)], "8.0;9.0a"),
        (None, [(7, 5)], "9.0a"),
        (None, [(12, 0)], "12.0"),
        ("8.0;9.0a", [], "8.0;9.0a"),
        ("9.0", [], "9.0a"),
        ("9.0 9.0a", [], "9.0a"),
        ("8.0 9.0+PTX", [(9, 0)], "8.0;9.0a;9.0+PTX"),
        ("9.0a+PTX", [], "9.0a;9.0+PTX"),
        (CONTAINERS, [], "8.0;8.6;9.0a;10.0;12.0+PTX"),
        ("Turing;Ampere", [], "8.0;8.6+PTX"),
        ("Hopper", [], "9.0a;9.0+PTX"),
        ("Kepler+Tesla Ampere+Tegra", [], "8.7"),
        ("10.0a 10.3f+PTX", [], "10.0;10.3+PTX"),
        ("All", [], "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"),
    ],
)
def test_architectures(variable: str | None, gpus: list[tuple[int, int]], expected: str) -> None:
    environ = {} if variable is None else {"TORCH_CUDA_ARCH_LIST": variable}
    assert sources.architectures(environ, gpus) == expected
    assert sources.architectures({"TORCH_CUDA_ARCH_LIST": expected}, []) == expected


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("8.0;9.0a;12.0+PTX", []),
        ("9.0", ["has 9.0, which is built for as 9.0a: only 9.0a has wgmma."]),
        ("Hopper", ["has 9.0+PTX, which is built for as 9.0a and 9.0+PTX: only 9.0a has wgmma."]),
        ("10.0f", ["has 10.0f, which is built for as 10.0: no step needs more."]),
        (
            "7.5+PTX 8.0 9.0",
            [
                "has 7.5+PTX, which is passed over: no step runs on GPUs before 8.0.",
                "has 9.0, which is built for as 9.0a: only 9.0a has wgmma.",
            ],
        ),
    ],
)
def test_an_architecture_that_is_not_taken_as_it_is_has_a_line(variable: str, said: list[str]) -> None:
    lines: list[str] = []
    sources.architectures({"TORCH_CUDA_ARCH_LIST": variable}, [], lines.append)
    assert lines == [f"TORCH_CUDA_ARCH_LIST {line}" for line in said]


def test_torch_takes_every_architecture_that_it_is_handed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", sources.architectures({"TORCH_CUDA_ARCH_LIST": CONTAINERS}, []))
    flags = cpp_extension._get_cuda_arch_flags([])
    assert {"-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_120,code=compute_120"} <= set(flags)
    for name, archs in sources.NAMED_ARCHS.items():
        if name != "All":  # CMake's
            found = []
            for given in (name, archs):
                monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
                found.append(cpp_extension._get_cuda_arch_flags([]))
            assert found[0] == found[1]


@pytest.mark.parametrize("word", ["Hoper", "8.0,9.0a", "9", "sm_90", "8.0+ptx"])
def test_unreadable_architectures_are_refused_by_name(word: str) -> None:
    said = rf"TORCH_CUDA_ARCH_LIST has '{re.escape(word)}', must list compute .* Hopper, .*: unset it to build for the"
    with pytest.raises(BuildError, match=said):
        sources.architectures({"TORCH_CUDA_ARCH_LIST": f"8.0;{word}"}, [])


@pytest.mark.parametrize("chosen", ["7.5", "Pascal;Turing"])
def test_a_list_that_leaves_nothing_to_build_for_is_refused(chosen: str) -> None:
    said = rf"^TORCH_CUDA_ARCH_LIST is '{chosen}', must have a compute capability from 8.0 on, such as 9.0a: .* add one"
    with pytest.raises(BuildError, match=said):
        sources.architectures({"TORCH_CUDA_ARCH_LIST": chosen}, [(9, 0)])


def test_an_architecture_that_the_compiler_does_not_know_is_refused(tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda", release="12.8")
    with (home / "bin" / "nvcc").open("a") as nvcc:
        nvcc.write('[ $1 = --list-gpu-arch ] && printf "compute_80\\ncompute_90\\ncompute_100\\n"; true\n')
    known = toolkit.known_architectures(toolkit.inspect(home, 12))
    sources.require_known("8.0;9.0a;9.0+PTX;10.0+PTX", known, "nvcc 12.8")
    said = r"asks for 12\.1\+PTX, which nvcc 12\.8 does not compile for: it knows 8\.0, 9\.0, 10\.0; list some of these"
    with pytest.raises(BuildError, match=said):
        sources.require_known("9.0a;12.1+PTX", known, "nvcc 12.8")


def test_the_real_compiler_knows_what_containers_list() -> None:
    try:
        cuda = toolkit.from_index(13)
    except BuildError as error:
        pytest.skip(f"the pinned compiler is not there: {error}")
    archs = sources.architectures({"TORCH_CUDA_ARCH_LIST": f"{CONTAINERS} All Ada Blackwell"}, [])
    sources.require_known(archs, toolkit.known_architectures(cuda), "nvcc")


@pytest.mark.parametrize(
    ("manager", "remedy"), [("apt-get", "sudo apt-get install g[+][+]"), ("dnf", "sudo dnf install gcc-c[+][+]")]
)
def test_no_compiler_names_the_command_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str, remedy: str
) -> None:
    write_script(tmp_path / manager, "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=f"no C[+][+] compiler.*{remedy}"):
        extension.require_cxx_compiler()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("class version: cuda = None\n__version__ = '2.11.0+cpu'\n", "torch 2.11.0+cpu was built without CUDA"),
        ("raise ImportError('hidden')\n", "torch is not installed"),
    ],
)
def test_without_a_cuda_torch_the_build_says_so_in_one_sentence_and_succeeds(
    tmp_path: Path, body: str, reason: str
) -> None:
    (tmp_path / "torch.py").write_text(body)
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert f"The CUDA side is not built, because {reason}: run `pip " in done.stderr


def test_an_operation_that_there_is_not_is_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    try:
        toolkit.find(os.environ, torch.version.cuda or "")
    except (BuildError, ValueError) as error:
        pytest.skip(f"nothing can be built: {error}")
    command = [sys.executable, "setup.py", "build_ext", "--op", "softmin"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"^error: --op is 'softmin', must be one of vector_add, .*softmax", done.stderr, re.MULTILINE)


class TestPreflight:
    """build_support/preflight.sh, with nothing on PATH but what a test puts there."""

    def run(self, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": str(folder), **variables}
        script = ROOT / "build_support" / "preflight.sh"
        return subprocess.run(["/bin/sh", str(script)], env=environ, capture_output=True, text=True, check=False)

    def test_passes_over_names_that_do_not_run_and_versions_that_do_not_serve(self, tmp_path: Path) -> None:
        write_script(tmp_path / "python3", "echo '3.10.4 (not 3.11-3.14)'\n")
        write_script(tmp_path / "python3.14", "exit 127\n")
        write_script(tmp_path / "python3.12", "echo ok\n")
        write_script(tmp_path / "c++", "")
        done = self.run(tmp_path)
        assert (done.returncode, done.stdout) == (0, "python3.12\n")

    def test_names_what_it_found(self, tmp_path: Path) -> None:
        write_script(tmp_path / "python3", "echo '3.12.3 (no venv module)'\n")
        write_script(tmp_path / "python3.11", "exit 127\n")
        write_script(tmp_path / "c++", "")
        write_script(tmp_path / "apt-get", "")
        done = self.run(tmp_path)
        assert done.returncode == 1
        assert "python3: 3.12.3 (no venv module)" in done.stderr
        assert "python3.11: (does not run)" in done.stderr
        assert "sudo apt-get install python3-venv python3-dev" in done.stderr

    def test_refuses_the_python_that_was_asked_for_by_name(self, tmp_path: Path) -> None:
        write_script(tmp_path / "python3", "echo ok\n")
        write_script(tmp_path / "python3.10", "echo '3.10.4 (not 3.11-3.14)'\n")
        write_script(tmp_path / "c++", "")
        done = self.run(tmp_path, PYTHON="python3.10")
        assert done.returncode == 1
        assert "python3.10: 3.10.4 (not 3.11-3.14)" in done.stderr

    def test_asks_for_the_compiler(self, tmp_path: Path) -> None:
        write_script(tmp_path / "python3", "echo ok\n")
        write_script(tmp_path / "dnf", "")
        done = self.run(tmp_path)
        assert done.returncode == 1
        assert "c++ is not on PATH" in done.stderr
        assert "sudo dnf install" in done.stderr

    def test_its_question_is_answered_by_this_python(self) -> None:
        script = (ROOT / "build_support" / "preflight.sh").read_text()
        probe = re.search(r"probe='(.*?)'", script, re.DOTALL)
        assert probe is not None
        answer = subprocess.run([sys.executable, "-c", probe[1]], capture_output=True, text=True, check=True).stdout
        assert answer == "ok\n" or re.fullmatch(r"3\.\d+\.\d+ \(no (venv module|headers)\)\n", answer)


def test_every_file_of_kernels_is_compiled_and_none_lies_loose() -> None:
    top = ROOT / "cuda-kernels"
    compiled = [*DIVIDED.public_files, *DIVIDED.ladder_files]
    assert {path.relative_to(ROOT) for path in top.rglob("*.cu")} <= {*compiled}
    assert len({*compiled}) == len(compiled)
    assert [path.name for path in top.iterdir() if path.is_file()] == []


def test_no_header_takes_the_place_of_one_of_pytorchs() -> None:
    """cuda-kernels/ comes before PyTorch's own folders where <torch/...> is looked for."""
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    own = {path.relative_to(ROOT / "cuda-kernels") for path in (ROOT / "cuda-kernels").rglob("*.*")}
    folders = [Path(folder) for folder in cpp_extension.include_paths()]
    assert [str(path) for path in sorted(own) for folder in folders if (folder / path).exists()] == []


class TestStepTable:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
    def test_specs_and_files_agree(self, op: Op, backend: Backend) -> None:
        assert step_table.disagreements(op, backend, ROOT) == []

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_missing_and_extra_files_are_named(self, tmp_path: Path, backend: Backend) -> None:
        op = OPS["vector_add"]
        (tmp_path / op.folder(backend)).mkdir(parents=True)
        for name in [*(step.name for step in op.steps_of(backend)[1:]), "v99_surplus"]:
            (tmp_path / op.file(name, backend)).touch()
        missing, extra = step_table.disagreements(op, backend, tmp_path)
        file, told = op.file("v01_scalar", backend), f"write it, or give the Step a no_{backend}"
        assert missing == f"{file} is missing, the spec has the step: {told}"
        assert extra == (
            f"{op.file('v99_surplus', backend)} has no step in the spec: add a Step to "
            f"kernel_twins/ops/{op.family}/{op.name}.py, or delete the file"
        )

    def test_every_cuda_file_is_some_operations(self) -> None:
        assert {path.parent.name for path in ROOT.glob("cuda-kernels/*/*/v*.cu")} <= OPS.keys()

    def test_lists_each_launcher_with_what_it_needs_and_takes_once(self) -> None:
        """Those of the ladder look for it, until it is imported."""

        def looking(op: Op, name: str) -> str:
            (found,) = re.findall(
                rf'\[\].*launch_from_ladder\("{op.name}", {op.name}_steps, "{name}", args\); }}', text
            )
            return str(found)

        text = step_table.render(OPS.values(), DIVIDED.public)
        for op in OPS.values():
            for step in op.steps_of("cuda"):
                is_public = (op.name, step.name) in DIVIDED.public
                launcher = f"{op.name}_{step.name}" if is_public else looking(op, step.name)
                fp32_out = "true" if step.fp32_out else "false"
                assert text.count(f'{{"{step.name}", {launcher}, "{step.arch}", {fp32_out}}},') == 1
                assert text.count(f'{{"{op.name}", "{step.name}"}},') == is_public
            for name in parts.compiled_baselines(op):
                assert text.count(f'{{"{name}", {looking(op, name)}, ">=8.0", false}},') == 1
            for step in op.steps:
                if "cuda" not in step.backends:
                    assert f"{op.name}_{step.name}" not in text

    def test_lists_the_steps_behind_a_function_in_their_order(self) -> None:
        text = step_table.render(OPS.values(), DIVIDED.public)
        lists = dict(re.findall(r"(\w+)_behind\[\] = \{(.*)\};", text))
        found = {op: tuple(re.findall(r'"(\w+)"', names)) for op, names in lists.items()}
        assert found == {op.name: op.behind["cuda"] for op in OPS.values() if op.behind}
        asked = re.findall(r'if \(op == "(\w+)"\) return (\w+)_behind;', text)
        assert asked == [(op, op) for op in found]

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_only_steps_stand_behind_a_function(self, backend: Backend) -> None:
        (other,) = set(BACKENDS) - {backend}
        alone = next(step.name for op in OPS.values() for step in op.steps if step.backends == (other,))
        op = next(op for op in OPS.values() if any(step.name == alone for step in op.steps))
        for name in ("v99_nothing", alone):
            wrong = replace(op, behind={backend: (name,)})
            (sentence,) = step_table.disagreements(wrong, backend, ROOT)
            assert sentence == f"{name} is behind {op.name}'s function, and no step that the spec has in {backend}"
        if backend == "cuda":
            with pytest.raises(BuildError, match=f"{alone} is behind"):
                step_table.require_agreement([wrong], ROOT)

    def test_a_file_is_left_alone_while_it_says_the_same(self, tmp_path: Path) -> None:
        path = tmp_path / "generated" / "step_table.cpp"
        for text, kept in (("first", False), ("first", True), ("second", False)):
            step_table.write_changed(path, text)
            assert path.read_text() == text
            assert (path.stat().st_mtime == 1) is kept
            os.utime(path, (1, 1))

    def test_disagreeing_files_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BuildError, match=r"vector_add/v01_scalar\.cu is missing"):
            step_table.require_agreement(OPS.values(), tmp_path)

    def test_the_ladders_module_adds_what_it_has_and_declares_it(self) -> None:
        text = step_table.render_ladder([*OPS.values()], DIVIDED.ladder)
        added = re.findall(r'^  kernel_twins::add\("(\w+)", (\w+)_steps, "(\w+)", (\w+)\);$', text, re.MULTILINE)
        assert {(op, step) for op, _, step, _ in added} == DIVIDED.ladder
        assert len(added) == len(DIVIDED.ladder)
        for op, table, step, launcher in added:
            assert (table, launcher) == (op, f"{op}_{step}")
            assert len(re.findall(rf"^void {launcher}\(const \w+Args& args\);$", text, re.MULTILINE)) == 1

    def test_the_module_registers_every_family_that_has_a_torch_side(self) -> None:
        files = [
            Path(f"cuda-kernels/{name}") for name in ("norm/torch.cpp", "norm/torch_backward.cpp", "loss/torch.cpp")
        ]
        text = step_table.render_module(files)
        wanted = ["register_extension", "register_loss", "register_norm"]
        assert re.findall(r"^void (\w+)\(pybind11::module_& module\);", text, re.MULTILINE) == wanted
        assert re.findall(r"^  (\w+)\(module\);", text, re.MULTILINE) == wanted
        families = {op.family for op in OPS.values() if op.steps_of("cuda")}
        assert {path.parent.name for path in sources.operator_files()} == families


PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z24vector_add_v01_kernelPf' for 'sm_90a'
ptxas info    : Function properties for _Z24vector_add_v01_kernelPf
    {frame} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
"""


class TestPtxasGate:
    def test_a_clean_step_passes(self) -> None:
        assert ptxas_gate.complaints(PTXAS_LOG.format(frame=0, stores=0, loads=0), finished=True) == []

    @pytest.mark.parametrize(("stores", "loads"), [(8, 0), (0, 8)])
    def test_spills_fail_a_finished_step_only(self, stores: int, loads: int) -> None:
        log = PTXAS_LOG.format(frame=8, stores=stores, loads=loads)
        (complaint,) = ptxas_gate.complaints(log, finished=True)
        assert "_Z24vector_add_v01_kernelPf spills registers" in complaint
        assert ptxas_gate.complaints(log, finished=False) == []

    @pytest.mark.parametrize(("code", "counts"), [(7507, 0), (7508, 1), (7510, 1), (7515, 1), (7516, 0)])
    def test_performance_warnings_fail_any_step(self, code: int, counts: int) -> None:
        log = f"ptxas info    : (C{code}) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        assert len(ptxas_gate.complaints(log, finished=False)) == counts

    @pytest.mark.slow
    def test_reads_what_the_compiler_really_says(self, tmp_path: Path) -> None:
        try:
            cuda = toolkit.from_index(13)
        except BuildError as error:
            pytest.skip(f"the pinned compiler is not there: {error}")
        # 64 values live across a loop do not fit into the 32 registers that 2048 threads an SM leave each.
        (tmp_path / "spills.cu").write_text(
            "__global__ void __launch_bounds__(1024, 2) spills(float* x, int n) {\n"
            "  float v[64];\n"
            "  for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];\n"
            "  for (int k = 0; k < n; ++k)\n"
            "    for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 7) % 64] + k;\n"
            "  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i];\n"
            "}\n"
        )
        (tmp_path / "clean.cu").write_text("__global__ void clean(float* x) { x[threadIdx.x] = 1; }\n")
        said = {
            name: ptxas_gate.complaints(self.log(cuda, tmp_path / f"{name}.cu"), True) for name in ("spills", "clean")
        }
        assert any("spills registers" in complaint for complaint in said["spills"])
        assert said["clean"] == []

    @staticmethod
    def log(cuda: toolkit.Toolkit, source: Path) -> str:
        """What the build keeps of compiling a file."""
        target = source.with_suffix(".o")
        command = [str(cuda.nvcc), *sources.NVCC_FLAGS, *sources.PTXAS_FLAGS, "-gencode=arch=compute_90a,code=sm_90a"]
        assert compiler.main([*command, "-MD", "-MF", f"{target}.d", "-c", str(source), "-o", str(target)]) == 0
        return compiler.log_of(target).read_text()


@pytest.fixture(scope="module")
def built() -> ModuleType:
    """kernel_twins._C; `make test` has built it and sets REQUIRE_BUILD=1."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA, so there is no extension to build")
    try:
        return importlib.import_module("kernel_twins._C")
    except ImportError as error:
        if os.environ.get("REQUIRE_BUILD") == "1":
            raise
        pytest.skip(f"the extension is not built ({error}): python setup.py build_ext")


def parameters(function: Any) -> list[str]:
    """A built function's parameters, from the signature that pybind11 writes on its docstring's first line."""
    signature = function.__doc__.splitlines()[0]
    return re.findall(r"(\w+): ", signature)


class TestExtension:
    LADDERS = tuple(op for op in OPS.values() if op.steps_of("cuda"))

    @pytest.fixture(params=LADDERS, ids=lambda op: op.name)
    def call(self, request: pytest.FixtureRequest, built: ModuleType) -> tuple[Any, str, list[Any]]:
        """An operation's function, the name of its first input, and good arguments but for lying on the CPU."""
        import torch

        from kernel_twins.ops.tensors import empty_outputs

        op: Op = request.param
        case = next(case for case in op.test_cases if 0 not in case.shape)
        inputs = op.inputs(case, torch.Generator().manual_seed(0))
        function = getattr(built, op.name)
        call = functools.partial(function, out=empty_outputs(op, case, "cpu"))
        return call, parameters(function)[1], [op.steps_of("cuda")[0].name, *inputs]

    def test_has_a_function_for_every_ladder_that_takes_what_its_spec_checks(self, built: ModuleType) -> None:
        for op in self.LADDERS:
            names = parameters(getattr(built, op.name))
            assert names == ["step", *inspect.signature(op.check).parameters]
            assert set(op.options(op.profile_case)) < set(names)

    def test_tensors_off_the_gpu_are_refused(self, call: tuple[Any, str, list[Any]]) -> None:
        function, first, arguments = call
        with pytest.raises(ValueError, match=rf"^{first} is on cpu, must be on a CUDA device"):
            function(*arguments)

    def test_a_wrong_dtype_is_refused(self, call: tuple[Any, str, list[Any]]) -> None:
        function, first, arguments = call
        arguments[1] = arguments[1].double()
        with pytest.raises(TypeError, match=rf"^{first} is torch.float64, must be torch\.\w+"):
            function(*arguments)

    @pytest.mark.parametrize(
        "call", [op for op in LADDERS if "matmul" in op.name], ids=lambda op: op.name, indirect=True
    )
    def test_a_wrong_rank_is_refused(self, call: tuple[Any, str, list[Any]]) -> None:
        function, first, arguments = call
        arguments[1] = arguments[1].flatten()
        with pytest.raises(ValueError, match=rf"^{first} has 1 dimensions, must have 2"):
            function(*arguments)

    def test_what_is_no_tensor_is_refused(self, call: tuple[Any, str, list[Any]]) -> None:
        function, first, arguments = call
        arguments[1] = [1.0, 2.0]
        with pytest.raises(TypeError, match=rf"^{first} is a list, must be a torch.Tensor"):
            function(*arguments)

    def test_what_is_missing_is_refused(self, call: tuple[Any, str, list[Any]]) -> None:
        function, first, arguments = call
        with pytest.raises(TypeError, match=f"missing .*'{first}'"):
            function(arguments[0])
        with pytest.raises(TypeError, match=r"missing .*'out'"):
            function.func(*arguments)

    @pytest.mark.parametrize("call", [OPS["layer_norm_backward"]], ids=["layer_norm_backward"], indirect=True)
    def test_none_is_refused_where_a_tensor_must_be(self, call: tuple[Any, str, list[Any]]) -> None:
        function, _, arguments = call
        for place, name in ((1, "dout"), (2, "x"), (3, "mean"), (4, "rstd")):
            given = [*arguments[:place], None, *arguments[place + 1 :]]
            with pytest.raises(TypeError, match=rf"^{name} is (a NoneType|None), must be a torch.Tensor"):
                function(*given)

    @pytest.mark.parametrize("place", ["input", "out"])
    def test_values_that_do_not_lie_in_memory_are_refused(self, call: tuple[Any, str, list[Any]], place: str) -> None:
        import torch

        function, first, arguments = call
        out = function.keywords["out"]
        name = first if place == "input" else "out[0]" if isinstance(out, tuple) else "out"
        of = arguments[1] if place == "input" else out[0] if isinstance(out, tuple) else out
        remedy = {"input": f"call {first}.*", "out": "allocate it so with torch.empty"}[place]
        for wrong, told in (
            (of.to_sparse(), "has layout torch.sparse_coo"),
            (torch._neg_view(of), "is negated lazily"),
        ):
            outs = (wrong, *out[1:]) if isinstance(out, tuple) else wrong
            given = [*arguments[:1], wrong, *arguments[2:]] if place == "input" else arguments
            with pytest.raises(ValueError, match=rf"^{re.escape(name)} {told}, must .*: {remedy}$"):
                function.func(*given, out=out if place == "input" else outs)

    def test_a_wrong_shape_is_refused(self, call: tuple[Any, str, list[Any]]) -> None:
        function, _, arguments = call
        out = function.keywords["out"]
        first = out[0] if isinstance(out, tuple) else out
        wrong = first.new_empty((*first.shape, 3))
        with pytest.raises(ValueError, match=r"^out(\[0\])? has "):
            function.func(*arguments, out=(wrong, *out[1:]) if isinstance(out, tuple) else wrong)

    def test_an_out_that_overlaps_an_input_is_refused(self, built: ModuleType) -> None:
        import torch

        x = torch.zeros(3, 5)
        with pytest.raises(ValueError, match=r"^out overlaps x in memory"):
            built.softmax("v01_three_passes", x, out=x)
        with pytest.raises(ValueError, match=r"^x is on cpu"):  # of no elements, in the middle of others
            built.softmax("v01_three_passes", x[1:1], out=x[2:2])

    def test_an_out_that_a_step_does_not_write_is_refused(self, built: ModuleType) -> None:
        import torch

        a, out = torch.zeros(8, 8, dtype=torch.float16), torch.zeros(8, 8)
        narrow = [step.name for step in OPS["matmul_bf16"].steps_of("cuda") if not step.fp32_out]
        for name in narrow:
            with pytest.raises(TypeError, match=f"^out is torch.float32, must be torch.float16: matmul_bf16 {name} wr"):
                built.matmul_bf16(name, a, a, out=out)
        wide = OPS["matmul_bf16"].steps_of("cuda")[-1]
        assert wide.fp32_out
        with pytest.raises(ValueError, match=r"^a is on cpu"):
            built.matmul_bf16(wide.name, a, a, out=out)

    def test_an_unknown_step_is_refused(self, built: ModuleType) -> None:
        from kernel_twins import load

        for op in self.LADDERS:
            with pytest.raises(ValueError, match=rf"v99_nothing.*{op.steps[0].name}"):
                load(op.name, "v99_nothing", "cuda")

    @pytest.mark.parametrize(
        ("arch", "capability", "architectures", "expected"),
        [
            (">=8.0", (8, 0), "8.0", True),
            (">=8.0", (8, 9), "8.0;9.0a", True),
            (">=8.0", (8, 0), "8.6", False),
            (">=8.0", (8, 9), "9.0a", False),
            (">=8.0", (9, 0), "8.0", False),
            (">=8.0", (9, 0), "8.0+PTX", True),
            (">=9.0", (9, 0), "8.0+PTX", False),
            (">=9.0", (9, 0), "9.0", True),
            (">=9.0", (9, 0), "8.0;9.0a", True),
            ("==9.0a", (9, 0), "8.0;9.0a", True),
            ("==9.0a", (9, 0), "9.0", False),
            ("==9.0a", (9, 0), "9.0a;9.0+PTX", True),
            ("==9.0a", (12, 0), "9.0a;9.0+PTX", False),
            (">=9.0", (12, 0), "9.0a;9.0+PTX", True),
            (">=8.0", (12, 0), "9.0a+PTX", False),
            (">=8.0", (12, 0), "8.0;9.0a", False),
            (">=9.0", (12, 0), "8.0+PTX;12.0", True),
        ],
    )
    def test_says_what_a_gpu_runs_of_a_build(
        self, built: ModuleType, arch: str, capability: tuple[int, int], architectures: str, expected: bool
    ) -> None:
        assert built.runs(arch, capability, architectures) is expected

    def test_the_committed_stub_agrees(self, built: ModuleType) -> None:
        stub = ast.parse((ROOT / "kernel_twins" / "_C.pyi").read_text())
        stubbed = {
            node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
            for node in stub.body
            if isinstance(node, ast.FunctionDef)
        }
        functions = {name: getattr(built, name) for name in dir(built) if callable(getattr(built, name))}
        assert stubbed == {name: parameters(function) for name, function in functions.items()}
