"""Engines of vLLM and SGLang in processes forked from this one, which has imported what they need."""

import ctypes
import getpass
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
STOP_TIMEOUT_S = 20.0


class EngineProcess:
    """An engine's first process, which leads the process group of all processes that it starts. To other engines `kill`
    looks like the loss of its host. It also removes what an engine that is killed leaves: temporary files, such as its
    sockets, which have a folder of their own, and shared memory.

    Args:
        spec: The processes print to its `log`, and have its `environment` in addition to this process's.
        run: The function that the process calls with `arguments`.
    """

    def __init__(self, spec, run, *arguments):
        context = multiprocessing.get_context("fork")
        # a short path: names of sockets are at most 107 characters long
        self._folder = tempfile.mkdtemp(prefix="engine-")
        self._shared: set[Path] = set()
        self._process = context.Process(target=_main, args=(spec, self._folder, run, arguments))
        self._process.start()
        with suppress(OSError):  # the child may have done it already, or have ended
            os.setpgid(self._process.pid, self._process.pid)

    @property
    def has_ended(self):
        """Returns True once its first process is gone."""
        return not self._process.is_alive()

    def pause(self):
        """Stop all of its processes."""
        self._signal(signal.SIGSTOP)

    def resume(self):
        self._signal(signal.SIGCONT)

    def pause_first(self):
        """Stop its first process alone, until `resume`."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def note_shared_memory(self):
        """Take note of the shared memory that `kill` is to remove; call this before the processes are told to end."""
        self._shared |= _shared_memory_of(self._process.pid)

    def kill(self):
        """End all of its processes without a message to peers, also those that outlived the first."""
        self.note_shared_memory()
        self._signal(signal.SIGKILL)
        self._process.join(STOP_TIMEOUT_S)
        for path in self._shared - _shared_memory_of():
            path.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, kind):
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, kind)


def _shared_memory_of(group=None):
    """Return the files in /dev/shm that processes have mapped, those of a process group or all."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if group in (None, os.getpgid(int(pid))):
                maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                found |= {Path(name) for name in re.findall(r" (/dev/shm/\S+)\n", maps)}
    return found


def end_with_parent():
    """Let the kernel kill this process when the one that forked it ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _main(spec, folder, run, arguments):
    try:
        os.setpgid(0, 0)
        end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # what it compiles serves the next engine, too
        cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        os.environ.update(spec.environment)
        with spec.log.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        run(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        # the engine's threads must not keep the process alive
        os._exit(1)
