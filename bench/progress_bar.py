"""A bar that says how far a run is, on stderr, and lines of text that do not run into it.

    with Bar(total=12) as bar:
        bar.step("a case")          # is shown until the next; nothing is where stderr is no terminal
        say("its result")           # on stdout, above the bar
"""

import shutil
import sys
import time

WIDTH = 24
ERASE = "\r\x1b[K"


class Bar:
    """How many of some things are done, and about how long the rest takes."""

    shown = None  # the bar that is on the screen

    def __init__(self, total, stream=None, clock=time.monotonic):
        self.total, self.stream, self.clock = total, stream or sys.stderr, clock
        self.begun, self.done, self.text = clock(), -1, ""

    def __enter__(self):
        Bar.shown = self if self.stream.isatty() else None
        return self

    def __exit__(self, *error):
        self.erase()
        Bar.shown = None

    def step(self, what):
        """The one before is done, ``what`` begins."""
        self.done += 1
        full = WIDTH * self.done // max(self.total, 1)
        seconds = self.clock() - self.begun
        left = f", {seconds / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        self.text = f"[{'#' * full}{'.' * (WIDTH - full)}] {self.done}/{self.total}{left}: {what}"
        self.draw()

    def draw(self):
        """Put it on the screen."""
        if Bar.shown is self:
            self.stream.write(ERASE + self.text[: shutil.get_terminal_size().columns - 1])  # a second line would stay
            self.stream.flush()

    def erase(self):
        """Take it away."""
        if Bar.shown is self:
            self.stream.write(ERASE)
            self.stream.flush()


def say(text):
    """Print a line, in place of the bar, which is drawn again below."""
    bar = Bar.shown
    if bar:
        bar.erase()
    print(text, flush=True)
    if bar:
        bar.draw()
