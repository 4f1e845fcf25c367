"""Threads of ours do not stay on the core to which an engine binds its main thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from kvconnector.integrations.vllm.cores import parents_cores


@pytest.fixture
def bound() -> Iterator[set[int]]:
    """The main thread is bound to one core of several; those that the parent process has."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one usable core")
    os.sched_setaffinity(0, {min(before)})
    yield os.sched_getaffinity(os.getppid())
    os.sched_setaffinity(0, before)


@pytest.fixture
def start() -> Iterator[Callable[[], int]]:
    """Starts a thread that lives until the test is over, and tells its id."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def start_one() -> int:
        threads.append(threading.Thread(target=stop.wait))
        threads[-1].start()
        number = threads[-1].native_id
        assert number is not None
        return number

    yield start_one
    stop.set()
    for thread in threads:
        thread.join()


def test_new_threads_may_run_where_the_parent_process_may(
    bound: set[int], start: Callable[[], int]
) -> None:
    mine = os.sched_getaffinity(0)
    old = start()
    with parents_cores():
        new = start()
    assert os.sched_getaffinity(new) == bound
    assert os.sched_getaffinity(old) == os.sched_getaffinity(0) == mine


def test_threads_stay_where_they_are_if_the_parent_cannot_be_asked(
    bound: set[int], start: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: (1 << 22) + 1)
    with parents_cores():
        new = start()
    assert os.sched_getaffinity(new) == os.sched_getaffinity(0)
