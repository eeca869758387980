"""Says how far the compiling of one extension is, from what ninja prints.

On a terminal one line is rewritten in place; in a log there is a line about every tenth of the sources. What compilers
say comes through as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

NINJA_STATUS = "[%f/%t] "
"""What ninja is to print before each command: how many are finished, and of how many."""

_STATUS = re.compile(r"\[(\d+)/(\d+)\] ")
_IDLE = "ninja: no work to do."
_CLEAR = "\r\x1b[K"  # back to the line's beginning, and forget the line


@dataclass
class Progress:
    """Turns ninja's lines into a stage's, such as ``kernel_twins._C: compiling 62 sources for sm_90a: 37/62``."""

    extension: str
    targets: str
    stream: TextIO
    rewrites: bool
    _tenths: int = -1
    _open: bool = False  # a line stands on the terminal without an end

    def take(self, line: str) -> None:
        """One line that ninja, or a compiler that it ran, has printed."""
        if match := _STATUS.match(line):
            self._show(int(match[1]), int(match[2]))
        elif line.rstrip() == _IDLE:
            self._print(f"{self.extension}: every source is compiled")
        else:
            self._print(line.rstrip("\n"))

    def close(self) -> None:
        """End a line that was to be rewritten."""
        if self._open:
            self.stream.write("\n")
            self._open = False
        self.stream.flush()

    def _show(self, done: int, total: int) -> None:
        sources = "1 source" if total == 1 else f"{total} sources"
        text = f"{self.extension}: compiling {sources} for {self.targets}: {done}/{total}"
        if self.rewrites:
            self.stream.write(_CLEAR + text)
            self.stream.flush()
            self._open = True
        elif (tenths := done * 10 // total) > self._tenths:
            self._print(text)
            self._tenths = tenths

    def _print(self, line: str) -> None:
        self.stream.write((_CLEAR if self._open else "") + line + "\n")
        self.stream.flush()
        self._open = False


@contextlib.contextmanager
def shown(extension: str, targets: str) -> Iterator[None]:
    """Pass what is written to standard output, by this process and by those that it starts, through ``Progress``."""
    sys.stdout.flush()
    kept = os.dup(1)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    with open(kept, "w", errors="replace") as stream, open(reading, errors="replace") as lines:
        progress = Progress(extension, targets, stream, rewrites=stream.isatty())

        def pass_on() -> None:
            for line in lines:
                try:
                    progress.take(line)
                except BrokenPipeError:  # nobody reads any more; the build goes on, whose lines must be taken
                    with open(os.devnull, "w") as nowhere:
                        os.dup2(nowhere.fileno(), kept)

        thread = threading.Thread(target=pass_on)
        thread.start()
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)  # which ends the pipe
            thread.join()
            progress.close()
