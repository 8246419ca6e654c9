"""What a person sees while a comparison runs: a line for each step, and within it the last line of the step's log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape

Show = Callable[[str], None]


class Progress:
    """Steps on a console; on one that is no terminal, a line when each begins and ends."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(escape(text), soft_wrap=True)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[Show]:
        """Show that a step is going on until the block ends; yields what shows a line of its log."""
        begin = time.monotonic()
        if not self.console.is_terminal:
            self.say(f"... {text}")
        with self.console.status(escape(text)) as status:

            def show(line: str) -> None:
                seconds = time.monotonic() - begin
                status.update(escape(f"{text} ({seconds:.0f} s) {line[: self.console.width // 2]}"))

            yield show
        self.say(f"ok  {text}: {time.monotonic() - begin:.0f} s")
