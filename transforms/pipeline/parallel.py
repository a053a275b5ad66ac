"""Do one thing for several releases: on all processors, in order, with progress."""

from __future__ import annotations

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
    function: Callable[[Job], Result], jobs: Sequence[Job], console: Console, title: str = "vLLM"
) -> Iterator[Result]:
    """The function's result for each job, in the order of the jobs.

    Args:
        function: Runs in another process where there is more than one job, so it must be importable.
        jobs: The first item of each names its release.
        console: Where progress is shown while it runs.
        title: What stands before the release's name.
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
    if len(jobs) == 1:
        yield function(jobs[0])
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=context) as pool:
        yield from pool.map(function, jobs)
