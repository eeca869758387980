"""What is kept of earlier runs is believed while all that it was made from is as it was, and never otherwise."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from build_support import compiler, kept
from tests import forks

KEY = ["what", "it", "is"]


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and files that may change while a test runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(kept.OFF, raising=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source"
    file.write_text("one")
    kept.keep("verdicts", KEY, [file], {"said": "right"}, {"object": b"bytes"}, since=time.time_ns())
    return file


def test_what_is_kept_is_found_again(source: Path) -> None:
    assert kept.find("verdicts", KEY) == ({"said": "right"}, {"object": b"bytes"})
    assert kept.find("verdicts", [*KEY, "not"]) is None
    assert kept.find("objects", KEY) is None


def test_a_changed_file_is_noticed_whatever_its_time_says(source: Path) -> None:
    times = source.stat()
    source.write_text("two")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert kept.find("verdicts", KEY) is None
    source.write_text("one")
    assert kept.find("verdicts", KEY) is not None
    source.unlink()
    assert kept.find("verdicts", KEY) is None


def test_a_changed_blob_is_noticed(source: Path, tmp_path: Path) -> None:
    (blob,) = tmp_path.glob("cache/**/object")
    blob.write_bytes(b"other")
    assert kept.find("verdicts", KEY) is None


def test_another_clone_of_the_same_files_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for clone in ("first", "second"):
        (tmp_path / clone).mkdir()
        (tmp_path / clone / "file").write_text("the same")
    monkeypatch.setattr(kept, "ROOT", tmp_path / "first")
    kept.keep("verdicts", KEY, [tmp_path / "first" / "file"], {}, {}, since=time.time_ns())
    monkeypatch.setattr(kept, "ROOT", tmp_path / "second")
    assert kept.find("verdicts", KEY) == ({}, {})
    (tmp_path / "second" / "file").write_text("another")
    assert kept.find("verdicts", KEY) is None


def test_nothing_is_read_or_kept_where_that_is_forbidden(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.OFF, "1")
    assert kept.find("verdicts", KEY) is None
    kept.keep("verdicts", ["new"], [source], {}, {}, since=time.time_ns())
    monkeypatch.delenv(kept.OFF)
    assert kept.find("verdicts", ["new"]) is None


def test_a_folder_that_cannot_be_written_is_no_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))
    kept.keep("verdicts", KEY, [source], {}, {}, since=time.time_ns())
    with kept.alone("verdicts", KEY):
        assert kept.find("verdicts", KEY) is None


def test_nothing_is_kept_of_a_file_that_changed_meanwhile(source: Path) -> None:
    began = time.time_ns()
    source.write_text("two")
    os.utime(source, ns=(0, 0))
    kept.keep("verdicts", ["new"], [source], {}, {}, since=began - 10**9)
    assert kept.find("verdicts", ["new"]) is None
    kept.keep("verdicts", ["new"], [source.with_name("none")], {}, {}, since=time.time_ns())
    assert kept.find("verdicts", ["new"]) is None


class TestCompiler:
    """With one that counts its calls and copies its source."""

    @pytest.fixture
    def command(self, tmp_path: Path) -> list[str]:
        script = tmp_path / "cc"
        script.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && { echo 1.0; exit; }\n'
            f"echo called >> {tmp_path}/calls\ncp $4 $6 || exit 3\n"
            f"echo 'ptxas info    : 0 bytes gmem'; echo 'warning: odd'; echo \"$6: $4 {tmp_path}/header\" > $2\n"
        )
        script.chmod(0o755)
        (tmp_path / "source").write_text("text")
        (tmp_path / "header").write_text("more")
        return [
            str(script),
            "-MF",
            *(str(tmp_path / name) for name in ("d",)),
            "-c",
            f"{tmp_path}/source",
            "-o",
            f"{tmp_path}/o",
        ]

    @staticmethod
    def calls(tmp_path: Path) -> int:
        return len((tmp_path / "calls").read_text().splitlines())

    def test_compiles_once_and_tells_the_same_each_time(
        self, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        for turn in (1, 2):
            assert compiler.main(command) == 0
            assert (tmp_path / "o").read_text() == "text"
            assert "ptxas info" in compiler.log_of(tmp_path / "o").read_text()
            assert str(tmp_path / "header") in (tmp_path / "d").read_text()
            assert capfd.readouterr().err == "warning: odd\n", turn
            (tmp_path / "o").unlink()
        assert self.calls(tmp_path) == 1

    @pytest.mark.parametrize("changed", ["source", "header", "argument", "environment", "version"])
    def test_compiles_again_where_anything_changed(
        self, changed: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert compiler.main(command) == 0
        if changed == "argument":
            command = [*command, "-O3"]
        elif changed == "environment":
            monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
        elif changed == "version":
            script = Path(command[0])
            script.write_text(script.read_text().replace("1.0", "1.1"))
        else:
            (tmp_path / changed).write_text("another")
        assert compiler.main(command) == 0
        assert self.calls(tmp_path) == 2

    def test_a_failure_is_told_and_not_kept(
        self, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "source").unlink()
        for _ in range(2):
            assert compiler.main(command) == 3
            assert "source" in capfd.readouterr().err
        assert self.calls(tmp_path) == 2


def told(path: str) -> int:
    """How often it was called, of which a file keeps count."""
    with open(path, "a") as file:
        file.write("called\n")
    return len(Path(path).read_text().splitlines())


def failed() -> None:
    print("before it failed")
    raise RuntimeError("on purpose")


def test_a_call_in_a_fork_runs_again_only_where_something_changed(tmp_path: Path) -> None:
    count, beside = str(tmp_path / "count"), tmp_path / "beside"
    beside.write_text("one")
    assert [forks.call("tests.build_support.test_kept", "told", count, files=[beside]) for _ in range(2)] == [1, 1]
    beside.write_text("two")
    assert forks.call("tests.build_support.test_kept", "told", count, files=[beside]) == 2


def test_a_failure_in_a_fork_is_told_and_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match=r"before it failed\n[\s\S]*RuntimeError: on purpose"):
            forks.call("tests.build_support.test_kept", "failed")
