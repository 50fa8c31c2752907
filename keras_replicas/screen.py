# SPDX-License-Identifier: Apache-2.0
"""One screen for several workers: the chief's output, shown and logged."""

import os
import pty
import re
import select
import sys
import termios
import time
from pathlib import Path
from typing import TextIO


class Screen:
    """Shows the chief's output as it arrives, and writes it to the chief's log line by line."""

    def __init__(self, log: Path):
        self.log = log
        # By our end of a stream: where it is shown, and its last, incomplete line.
        self.streams: dict[int, tuple[TextIO, bytes]] = {}

    def open(self) -> tuple[int, int]:
        """The chief's ends of its output, a terminal if ours is one, for the progress bar, and of its errors."""
        output, chiefs_output = pty.openpty() if sys.stdout.isatty() else os.pipe()
        if sys.stdout.isatty():
            termios.tcsetwinsize(chiefs_output, termios.tcgetwinsize(sys.stdout))
        errors, chiefs_errors = os.pipe()
        self.streams = {output: (sys.stdout, b""), errors: (sys.stderr, b"")}
        return chiefs_output, chiefs_errors

    def copy(self, seconds: float) -> None:
        """Copies pending output, or waits that long for some."""
        if not self.streams:
            time.sleep(seconds)
        while self.streams and (ready := select.select(self.streams, [], [], seconds)[0]):
            for stream in ready:
                try:
                    new = os.read(stream, 2**16)
                except OSError:  # how a terminal signals its end
                    new = b""
                shown_on, line = self.streams.pop(stream)
                if not new:
                    os.close(stream)
                    continue
                shown_on.buffer.write(new)
                shown_on.flush()
                *lines, line = (line + new).split(b"\n")
                self.streams[stream] = shown_on, line
                with self.log.open("ab") as log:
                    log.writelines(as_left_on_screen(line) + b"\n" for line in lines)
            seconds = 0


def as_left_on_screen(line: bytes) -> bytes:
    """A line without the earlier states of a progress bar, and without colours."""
    return re.sub(rb".*[\r\b]|\x1b\[[0-9;]*m", b"", line.rstrip(b"\r"))
