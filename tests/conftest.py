"""Which tests there are: those of a GPU are collected where there is one, or with --collect-gpu, which runs none.

REQUIRE_GPU=1 collects them all the same, and they fail where there is no GPU; such a run is recorded. Nothing that
makes a machine slow decides a test: Hypothesis has neither a deadline nor a health check of time.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import platform
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_support import kept
from kernel_twins.errors import UnavailableError
from kernel_twins.harness.load import extension, why_no_gpu

ROOT = Path(__file__).resolve().parents[1]
KEPT_BYTES = 2**30
collect_ignore = ["fixtures"]  # tests of the example that copies are made of
REQUIRED = os.environ.get("REQUIRE_GPU") == "1"

# A shell has its background jobs, and so whatever they start, ignore Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--collect-gpu", action="store_true", help="collect GPU tests without a GPU; they are skipped")
    parser.addoption(
        "--no-cache", action="store_true", help="run and compile everything: earlier runs are not believed"
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if _collects_gpu(config) else f"GPU tests are not collected: {why_no_gpu()} (--collect-gpu lists them)"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of GPU tests alone is not even imported: there are ten times as many of them as of all others."""
    return True if collection_path.name.endswith("_gpu.py") and not _collects_gpu(config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _collects_gpu(config):
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def _collects_gpu(config: pytest.Config) -> bool:
    return REQUIRED or config.option.collect_gpu or not why_no_gpu()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        if REQUIRED:
            pytest.fail(f"REQUIRE_GPU=1, but {reason}", pytrace=False)
        pytest.skip(reason)
    if "torch" in sys.modules:
        _choose_anew(not item.get_closest_marker("gpu"))


def _choose_anew(anew: bool) -> None:
    """What a test without a GPU makes up of one is not what "auto" keeps for the next test."""
    with contextlib.suppress(UnavailableError):
        if hasattr(built := extension(), "ask_anew"):
            built.ask_anew(anew)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Leave the GPU's memory to the processes beside this one: torch keeps what it has had."""
    if item.get_closest_marker("gpu") and not why_no_gpu():
        import torch

        if torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One test at a time of those that need a good part of the GPU's memory, however many processes run tests."""
    with (tmp_path_factory.getbasetemp().parent / "alone").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        import torch

        torch.cuda.empty_cache()
        yield


class _Record:
    """Counts the outcomes of GPU tests and writes them, with what they ran on, to tests/records/<gpu>.json."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu" in report.keywords and (report.when == "call" or report.outcome != "passed"):
            is_expected = report.skipped and hasattr(report, "wasxfail")
            self.outcomes["xfailed" if is_expected else report.outcome] += 1

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        partial = session.config.option.keyword or session.shouldstop
        if not self.outcomes or partial or why_no_gpu():
            return
        import torch
        import triton

        from kernel_twins import OPS
        from kernel_twins.harness.ceilings import gpu_slug
        from kernel_twins.harness.sensors import identity as gpu_identity
        from kernel_twins.report.rows import identity

        gpu = torch.cuda.get_device_name()
        record = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "outcomes": dict(sorted(self.outcomes.items())),
            "gpu": gpu,
            "driver": gpu_identity().get("driver"),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "code": {
                f"{op.name}/{step.name}": {b: identity.source_digest(op.name, step.name, b) for b in step.backends}
                for op in OPS.values()
                for step in op.steps
            },
        }
        path = ROOT / "tests" / "records" / f"{gpu_slug(gpu)}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.no_cache and not hasattr(config, "workerinput"):  # workers inherit what is set before them
        empty = tempfile.TemporaryDirectory()
        config.add_cleanup(empty.cleanup)
        os.environ |= {"XDG_CACHE_HOME": empty.name, "TRITON_CACHE_DIR": f"{empty.name}/triton"}
        os.environ.pop(kept.OFF, None)  # what one test made another may use
    if config.pluginmanager.has_plugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("any machine")
    if REQUIRED and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Record())
