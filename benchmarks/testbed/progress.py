"""What is being measured, how far it is, and how long it will take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """A bar with the time left on a terminal, a line at the start of each piece of work elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Name the work that begins."""
        self._console.print(text)

    @contextmanager
    def count(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Gives a function that is told how many of `total` are done."""
        if not self._console.is_terminal:
            self.say(f"{text}, {total} turns")
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Bar(*columns, console=self._console, disable=not self._console.is_terminal) as bar:
            task = bar.add_task(text, total=total)
            yield lambda done: bar.update(task, completed=done)
