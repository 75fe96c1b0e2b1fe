"""One line that shows how long something has been awaited and what it last said."""

import shutil
import sys

LOG_EVERY_S = 5.0


class WaitLine:
    """Prints "label: 12 s  last line": rewritten in place on a terminal, else a new line every 5 s."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._printed_s: float | None = None

    def __call__(self, elapsed_s: float, line: str) -> None:
        stream = sys.stderr
        text = f"{self.label}: {elapsed_s:3.0f} s  {line.strip()}"
        if stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            stream.write(f"\r\x1b[K{text[:width]}")
        elif self._printed_s is None or not 0 <= elapsed_s - self._printed_s < LOG_EVERY_S:
            self._printed_s = elapsed_s
            stream.write(f"{text[:160]}\n")
        stream.flush()

    def done(self, text: str) -> None:
        """Closes the line with its outcome."""
        stream = sys.stderr
        stream.write(("\r\x1b[K" if stream.isatty() else "") + f"{self.label}: {text}\n")
        stream.flush()
        self._printed_s = None


print_wait = WaitLine("waiting for the SGLang server")
