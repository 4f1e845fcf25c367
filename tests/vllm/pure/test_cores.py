"""Our threads leave the core to which an engine binds its main thread."""

import os
import threading

import pytest

from kvconnector.integrations.vllm.cores import parents_cores


@pytest.mark.parametrize("has_parent", [True, False])
def test_new_threads_may_run_where_the_parent_process_may(monkeypatch, has_parent):
    """Older threads stay on their cores, and so do new ones if the parent process is gone."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one usable core")
    if not has_parent:
        monkeypatch.setattr(os, "getppid", lambda: (1 << 22) + 1)
    end = threading.Event()
    old, new = threading.Thread(target=end.wait), threading.Thread(target=end.wait)
    try:
        os.sched_setaffinity(0, mine := {min(before)})
        old.start()
        with parents_cores():
            new.start()
        found = [os.sched_getaffinity(number or 0) for number in (0, old.native_id, new.native_id)]
        assert found == [mine, mine, os.sched_getaffinity(os.getppid()) if has_parent else mine]
    finally:
        os.sched_setaffinity(0, before)
        end.set()
        old.join()
        new.join()
