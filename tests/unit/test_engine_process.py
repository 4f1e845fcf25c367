"""Engines of vLLM and SGLang that tests kill leave no files and no shared memory."""

import multiprocessing
import os
import tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

from tests.support.engine_process import EngineProcess
from tests.support.waiting import DEADLINE_S


def _use_files(pipe):
    """Be an engine: tell of a temporary file, and of shared memory."""
    handle, path = tempfile.mkstemp()
    os.close(handle)
    memory = SharedMemory(create=True, size=4096)
    pipe.send((path, f"/dev/shm/{memory.name}"))
    pipe.recv()


def test_a_killed_engine_leaves_no_files_and_no_shared_memory(tmp_path):
    pipe, theirs = multiprocessing.Pipe()
    spec = SimpleNamespace(log=tmp_path / "engine.log", environment={})
    engine = EngineProcess(spec, _use_files, theirs)
    assert pipe.poll(DEADLINE_S)
    paths = [Path(each) for each in pipe.recv()]
    assert all(path.exists() for path in paths)
    engine.kill()
    assert not any(path.exists() for path in paths)
    assert not paths[0].parent.exists()
