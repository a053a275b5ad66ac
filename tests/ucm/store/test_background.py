"""Background threads are not bound to the one processor that their starter is bound to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from ucm.store.pool import Pool

#: In a process of its own: what is bound stays bound. One thread has been started before, as by any library.
PROGRAM = """
import os, threading
from tests.ucm.store.test_background import processors_of_a_job
over = threading.Event()
threading.Thread(target=over.wait).start()
first = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {first})
print(*sorted(processors_of_a_job()))
over.set()
"""


def processors_of_a_job() -> set[int]:
    """Where a pool's thread may run."""
    found: set[int] = set()
    pool = Pool("test", 1, 1)
    pool.submit([lambda: found.update(os.sched_getaffinity(threading.get_native_id()))])
    pool.close()
    return found


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind threads to processors")
def test_a_bound_starter_does_not_bind_its_threads() -> None:
    given = os.sched_getaffinity(0)
    if len(given) < 2:
        pytest.skip("there is one processor only")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert {int(word) for word in done.stdout.split()} == given


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind threads to processors")
def test_a_process_keeps_to_what_it_was_given() -> None:
    given = os.sched_getaffinity(0)
    program = (
        "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); "
        "from tests.ucm.store.test_background import processors_of_a_job; print(*processors_of_a_job())"
    )
    for one in sorted(given)[:2]:
        done = subprocess.run([sys.executable, "-c", program, str(one)], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(one)]
