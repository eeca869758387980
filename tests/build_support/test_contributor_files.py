"""The files by which editors, git and services know the repository: they parse, and say what other files say."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from build_support import sources

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
YAML = [
    *(ROOT / name for name in (".clangd", ".pre-commit-config.yaml", "CITATION.cff")),
    *sorted((ROOT / ".github").rglob("*.yml")),
]


def parsed(text: str) -> Any:
    return pytest.importorskip("yaml").safe_load(text)


@pytest.mark.parametrize("file", YAML, ids=lambda file: file.name)
def test_yaml_parses(file: Path) -> None:
    assert isinstance(parsed(file.read_text()), dict)


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_an_issue_template_has_a_name_and_says_what_it_is_for(file: Path) -> None:
    _, head, body = file.read_text().split("---\n", 2)
    assert {"name", "about"} <= parsed(head).keys()
    assert body.strip()


def test_the_devcontainer_asks_make_for_a_target_that_there_is() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    make, target = container["postCreateCommand"].split()
    assert make == "make"
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_pre_commit_installs_the_pinned_versions() -> None:
    pins = set((ROOT / "requirements.txt").read_text().splitlines())
    named = re.findall(r"additional_dependencies: \[(.*)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert {name.partition("==")[0] for name in named} == {"ruff", "clang-format"}
    assert {*named} <= pins


def test_pre_commit_installs_nothing_else() -> None:
    repos = parsed((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    assert all(hook["additional_dependencies"] for repo in repos for hook in repo["hooks"])


def test_the_workflow_runs_what_anybody_can_run() -> None:
    jobs = parsed((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == ["bash .ci/run"]
    assert (ROOT / ".ci" / "run").is_file()


def test_the_site_is_published_by_what_it_needs_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["site"]]
    steps = parsed((ROOT / ".github" / "workflows" / "pages.yml").read_text())["jobs"]["build"]["steps"]
    install, build = (step["run"] for step in steps if "run" in step)
    assert install.split() == [
        *["python", "-m", "pip", "install", "-c", "requirements.txt"],
        *(re.match(r"[\w-]+", name)[0] for name in needed),  # type: ignore[index]
    ]
    assert build == "make site NO_VENV=1 PYTHON=python"


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = parsed((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])


def test_clangd_is_given_no_flag_that_nvcc_alone_knows() -> None:
    removed = parsed((ROOT / ".clangd").read_text())["CompileFlags"]["Remove"]
    left = [flag for flag in sources.NVCC_FLAGS if not any(fnmatch(flag, pattern) for pattern in removed)]
    assert left == ["-std=c++20", "-O3"]
