"""The directory service, in which a producer engine's scheduler names its workers to consumers."""

from __future__ import annotations

import logging
import threading
import warnings

import msgspec

from kvconnector._version import __version__
from kvconnector.control.base import PeerHandle, Received
from kvconnector.control.zmq import ControlChannel
from kvconnector.errors import (
    ConfigError,
    IncompatiblePeerError,
    KVConnectorError,
    RemoteError,
    one_line,
)
from kvconnector.folded_log import Refusals
from kvconnector.runtime.own_process import OwnProcess
from kvconnector.session.containment import failure_of
from kvconnector.wire import decode, encode, version_of, versions
from kvconnector.wire import messages as m

logger = logging.getLogger(__name__)

LISTEN_S = 0.5
STOP_TIMEOUT_S = 3.0
MAX_UNASKED = 64
"""An engine of at most this many workers names all of them at once, which saves a second request."""


def answer_to(request: m.DirectoryRequest, directory: m.Directory) -> m.Directory:
    """Return the directory that a consumer needs: for a large engine only the requested workers."""
    workers, theirs = directory.workers, request.world_size
    ours = len(workers)
    if request.ranks is None or ours <= MAX_UNASKED:
        return directory
    shares = [(rank * ours, (rank + 1) * ours) for rank in {*request.ranks} if rank < theirs]
    chosen = {
        worker for start, stop in shares for worker in range(start // theirs, -(-stop // theirs))
    }
    return msgspec.structs.replace(directory, workers=tuple(workers[i] for i in sorted(chosen)))


def _check_length(control: ControlChannel, directory: m.Directory) -> None:
    """Raise ConfigError: no message can carry the answer to the consumer that asks for the fewest workers."""
    few = directory.workers[: 1 if len(directory.workers) > MAX_UNASKED else None]
    nbytes = len(encode(msgspec.structs.replace(directory, workers=few)))
    if nbytes > control.max_message_bytes:
        raise ConfigError(
            "control.max_message_bytes is too small for this engine to name its workers: raise it on both sides",
            needed_bytes=nbytes,
            max_message_bytes=control.max_message_bytes,
            workers=len(directory.workers),
        )


class DirectoryService:
    """Answers `DirectoryRequest`s on `control`: one `turn` at a time or, after `start`, in a thread until `close`.

    Raises:
        ConfigError: the directory is longer than a message may be.
    """

    def __init__(self, control: ControlChannel, directory: m.Directory) -> None:
        try:
            _check_length(control, directory)
        except ConfigError:
            control.close()
            raise
        self.control = control
        self._engine_id = directory.geometry.engine_id
        # an engine's workers have the settings of its scheduler
        limit = control.max_message_bytes
        self._directory = msgspec.structs.replace(directory, max_message_bytes=limit)
        self._refusals = Refusals(logger)
        self._process = OwnProcess("directory service")
        self._stopping = threading.Event()
        name = f"kvconnector-{self._engine_id}-directory"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __repr__(self) -> str:
        state = "stopping" if self._stopping.is_set() else "answering"
        return f"<DirectoryService {self._engine_id} at {self.control.address}, {state}>"

    def start(self) -> DirectoryService:
        """Begin to answer. Raises RuntimeError: the system starts no thread; the port is free again."""
        try:
            self._thread.start()
        except BaseException:
            self.control.close()
            raise
        return self

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for requests, and answer them."""
        dropped: set[PeerHandle] = set()
        for event in self.control.poll(timeout_s):
            if isinstance(event, Received) and event.handle not in dropped:
                try:
                    reply = self._reply_to(decode(event.payload))
                    version = version_of(event.payload)
                    if isinstance(reply, m.Directory):
                        version = reply.wire_version
                    self.control.send(event.handle, encode(reply, version))
                except Exception as error:
                    peer = self.control.peer_of(event.handle)
                    self._refusals.note(f"a request of {peer}", type(error).__name__, error)
                    if not isinstance(error, KVConnectorError):
                        logger.warning("this is a bug, please report it", exc_info=error)
                    self._refuse(event.handle, error)
                    self.control.disconnect(event.handle)
                    dropped.add(event.handle)

    def _refuse(self, handle: PeerHandle, error: Exception) -> None:
        """Tell the engine that asks why there is no answer: it would wait for one until its own timeout."""
        refusal = m.Refusal.INTERNAL
        if isinstance(error, RemoteError):
            is_incompatible = isinstance(error, IncompatiblePeerError)
            refusal = m.Refusal.INCOMPATIBLE if is_incompatible else m.Refusal.NOT_GREETED
        text = f"engine {self._engine_id}: {failure_of(error).statement}"
        refused = m.DirectoryRefused(refusal=refusal, text=one_line(text)[: m.MAX_TEXT])
        try:
            # refusals are read in any version, and `version_of` may be what failed
            self.control.send(handle, encode(refused, versions.SPOKEN.oldest))
        except Exception as another:
            logger.debug("a refusal is not sent", exc_info=another)

    def _reply_to(self, message: m.Message) -> m.Directory | m.DirectoryRefused:
        if not isinstance(message, m.DirectoryRequest):
            return m.DirectoryRefused(
                refusal=m.Refusal.NOT_GREETED,
                text=f"a directory service takes no {type(message).__name__}",
            )
        if message.engine_id != self._engine_id and not message.any_engine:
            return m.DirectoryRefused(
                refusal=m.Refusal.INCOMPATIBLE,
                text=f"engine {self._engine_id!r} is here, not {message.engine_id!r}"[: m.MAX_TEXT],
            )
        try:
            agreed = versions.SPOKEN.common(
                versions.WireVersions(message.oldest_version, message.newest_version)
            )
        except IncompatiblePeerError as error:
            text = f"{error} (this is kvconnector {__version__})"
            return m.DirectoryRefused(refusal=m.Refusal.INCOMPATIBLE, text=text)
        directory = msgspec.structs.replace(self._directory, wire_version=agreed)
        answer = answer_to(message, directory)
        nbytes, theirs = len(encode(answer, agreed)), message.max_message_bytes
        limit = min(self.control.max_message_bytes, theirs or self.control.max_message_bytes)
        if nbytes <= limit:
            return answer
        side = "the engine that asks" if limit == theirs else f"engine {self._engine_id}"
        text = (
            f"the answer, {len(answer.workers)} workers of an engine of {len(directory.workers)}, has {nbytes} bytes:"
            f" raise control.max_message_bytes of {side}, which is {limit}"
        )
        self._refusals.note("a request for the directory", "AnswerTooLong", text)
        return m.DirectoryRefused(refusal=m.Refusal.INCOMPATIBLE, text=text[: m.MAX_TEXT])

    def close(self) -> None:
        """Stop answering and free the port. Idempotent."""
        self._stop()
        self._thread.join(STOP_TIMEOUT_S)

    def abandon(self) -> None:
        """Stop without waiting: the scheduler was collected without `close`. In a forked child, do nothing."""
        if self._stopping.is_set() or not self._process.is_here:
            return
        self._stop()
        warnings.warn(
            f"a kvconnector scheduler ({self._engine_id}) was not closed: call close(), or use it in a with statement",
            ResourceWarning,
            stacklevel=2,
        )

    def _stop(self) -> None:
        self._stopping.set()
        self.control.wake()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.turn(LISTEN_S)
        except Exception:
            logger.exception("the directory service failed; no new consumer can find this engine")
        finally:
            self.control.close()
