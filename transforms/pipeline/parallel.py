"""Run a function for several releases on all CPUs; results come in order, and progress is shown."""

from __future__ import annotations

import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

Job = TypeVar("Job", bound="tuple[object, ...]")
Result = TypeVar("Result")


def each_release(
    function: Callable[[Job], Result], jobs: Sequence[Job], console: Console, title: str = "release"
) -> Iterator[Result]:
    """Yield the function's result for each job, in the order of the jobs.

    Args:
        function: Must be importable: it runs in another process if there is more than one job.
        jobs: The first item of each names its release.
        console: Shows the progress.
        title: The text before the release's name.
    """
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task(f"{title} {jobs[0][0] or 'from the given sources'}", total=len(jobs))
        for job, result in zip(jobs, _results(function, jobs), strict=True):
            progress.update(task, advance=1, description=f"{title} {job[0] or 'from the given sources'}")
            yield result


def _results(function: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[Result]:
    # Syntax trees are hundreds of thousands of objects without cycles, so garbage collection only costs time.
    if len(jobs) == 1:
        gc.disable()
        try:
            yield function(jobs[0])
        finally:
            gc.enable()
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=context, initializer=gc.disable) as pool:
        yield from pool.map(function, jobs)
