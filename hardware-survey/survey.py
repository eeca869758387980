"""What this GPU is, where it stands among others, and its measured ceilings.

    python hardware-survey/survey.py

Writes the survey as JSON, and as Markdown beside it: that of the reference GPU to hardware-survey/results/, that of
another one to runs/, which git ignores. Without a GPU it shows the datasheet table and the published surveys.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))  # a clone works without being installed

import datasheets  # noqa: E402
from render import render  # noqa: E402

from kernel_twins.harness.ceilings import PRIVATE, PUBLISHED, REFERENCE_GPU  # noqa: E402
from kernel_twins.harness.load import why_no_gpu  # noqa: E402

NO_GPU = 77  # the exit status by which automake and meson know a skipped run


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    if reason := why_no_gpu():
        return _without_gpu(reason, wanted=bool(options.json or options.publish))

    import measure

    from kernel_twins.errors import UnavailableError

    try:
        survey = measure.survey()
    except UnavailableError as error:
        print(f"no survey: {error}", file=sys.stderr)
        return 1
    if options.json == "-":
        print(_json(survey), end="")
        return 0
    gpu = survey["gpu"]
    public = options.publish or gpu == REFERENCE_GPU
    path = Path(options.json or (PUBLISHED / f"{gpu}.json" if public else PRIVATE / f"survey-{gpu}.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_json(survey))
    path.with_suffix(".md").write_text(render(survey))
    _show(render(survey))
    print(f"written to {path} and {path.with_suffix('.md').name}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="survey.py"
    )
    parser.add_argument(
        "--json", metavar="PATH", help="write the JSON there and the Markdown beside it; - prints the JSON alone"
    )
    parser.add_argument(
        "--publish", action="store_true", help="write to hardware-survey/results/ on any GPU, to be committed"
    )
    return parser


def _without_gpu(reason: str, wanted: bool) -> int:
    """Show what is known without measuring; the exit status says whether a survey was explicitly asked for."""
    if wanted:
        print(f"no survey: {reason}", file=sys.stderr)
        return NO_GPU
    _show("# GPUs by their datasheets\n\n" + datasheets.table())
    for path in sorted(PUBLISHED.glob("*.json")):
        _show(render(json.loads(path.read_text())))
    print(f"{reason}: nothing was measured here, what is shown is recorded", file=sys.stderr)
    return 0


def _json(survey: dict[str, Any]) -> str:
    return json.dumps(survey, indent=2, ensure_ascii=False) + "\n"


def _show(markdown: str) -> None:
    """Print a document, laid out by rich on a terminal that has it."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(markdown))
    else:
        print(markdown)


if __name__ == "__main__":
    sys.exit(main())
