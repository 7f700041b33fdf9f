"""A progress bar on standard error that stays sane when nobody watches it."""

from __future__ import annotations

import sys
import time
from typing import Final, TextIO

_WIDTH: Final = 28
#: Seconds between two updates on a terminal, and between two lines elsewhere (a log file, a pipe).
_TERMINAL_PERIOD: Final = 0.1
_LOG_PERIOD: Final = 15.0


class Progress:
    """``stage("reading")``, then ``update(done, total)`` as often as one likes, ``close()`` at the end.

    On a terminal one line is redrawn; elsewhere a line is written when a stage begins and every 15 seconds.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._stage, self._began, self._drawn, self._width = "", 0.0, 0.0, 0

    def stage(self, name: str) -> None:
        """Begin a stage of unknown length."""
        self._clear()
        self._stage, self._began = name, time.monotonic()
        self._write(f"{name} ...")

    def update(self, done: int, total: int) -> None:
        """``done`` of ``total`` parts of this stage are done."""
        now = time.monotonic()
        if now - self._drawn < (_TERMINAL_PERIOD if self._terminal else _LOG_PERIOD):
            return
        full = _WIDTH * done // max(total, 1)
        left = (now - self._began) / done * (total - done) if done else 0.0
        bar = "#" * full + "." * (_WIDTH - full)
        self._write(f"{self._stage} [{bar}] {100 * done // max(total, 1):3d} %  {_clock(left)} left")

    def close(self) -> None:
        """Leave nothing behind on a terminal."""
        self._clear()

    def _write(self, text: str) -> None:
        self._drawn = time.monotonic()
        if self._terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def _clear(self) -> None:
        if self._terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
        self._width = 0


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
