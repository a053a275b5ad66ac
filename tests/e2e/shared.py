"""Results that are computed once for all test processes, by the first that needs them."""

from __future__ import annotations

import fcntl
import pickle
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")


class Shared:
    """Results by name; a process waits while another one computes the result.

    Args:
        directory: Their directory, the same for all processes of a run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[str, Any] = {}
        directory.mkdir(exist_ok=True)

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Return a result, or raise its exception; all processes get the same."""
        if name not in self._known:
            file = self.directory / f"{name.replace(' ', '-')}.pickle"
            with locked(file.with_suffix(".lock")):
                if not file.exists():
                    file.write_bytes(pickle.dumps(_outcome(make)))
                self._known[name] = pickle.loads(file.read_bytes())  # noqa: S301 - our own
        found = self._known[name]
        if isinstance(found, BaseException):
            raise found
        value: T = found
        return value


def _outcome(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - it is told to whoever asks
        return error


def publish(draft: Path, directory: Path) -> None:
    """Give a model its name; engines that start after this call trust its files.

    A connector does not trust files that may have changed after its process had started. It knows the times of both to
    some hundredths of a second, and to less on a busy machine.
    """
    draft.rename(directory)
    time.sleep(1.0)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, which is created if missing, against other processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
