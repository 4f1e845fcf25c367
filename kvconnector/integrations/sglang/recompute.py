"""Asks prefill servers to compute retracted prompts again, by HTTP, as a router would.

A decode engine needs that when it has given up the caches of running requests: for new weights
(`pause_generation(mode="retract")`), and with DeepSeek-V4, whose caches SGLang cannot keep in host memory, whenever
pages run out. The prompt is then the request's own, followed by the tokens that were generated so far.

*When.* SGLang's own backends ask once the decode engine has allocated the prompt's pages. With ours it allocates only
once the prefill engine has started the prompt, so we ask as soon as we know where the prefill engine is. Neither engine
then holds memory for a prompt that waits for the other one's.

*Threads.* One, started by the first question, with an event loop in which each question is a task of its own: a server
answers only when the prompt has been read, and SGLang may retract every running request at once.

*Clock.* A connection is made within `ANSWER_S`. An answer has no deadline of its own: it is waited for until the
request ends, or `LINGER_S` longer if that was a success. Closing the connection earlier would let the server abort the
request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from http import HTTPStatus

import aiohttp

from kvconnector.control.address import HostPort
from kvconnector.integrations.sglang.registry import ANSWER_S

LINGER_S = 30.0
MAX_REASON = 300
NO_KEY = "its API needs a key: start the decode server with the prefill server's --api-key"
OTHER_KEY = "its API needs another key than this server's: start both with the same --api-key"


class Recomputer:
    """Asks for prompts to be computed again, and says which of the questions were refused.

    Args:
        api_key: The key of the prefill servers' APIs; "" if they need none.
    """

    def __init__(self, api_key: str = "") -> None:
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}
        """For each open question, why the server refuses it; "" as long as it does not."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """For the loop's thread alone."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_open = True

    def ask(self, request_id: str, address: HostPort, payload: Mapping[str, object]) -> None:
        """Have a prompt computed. Never blocks.

        Args:
            request_id: The name by which `refusal` and `forget` know the question.
            address: The prefill server's HTTP API.
            payload: The body of a `/generate`.
        """
        if not self._is_open:
            return
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(self._loop,), daemon=True, name="kvconnector-recompute"
            )
            self._thread.start()
        with self._lock:
            self._reasons[request_id] = ""
        self._loop.call_soon_threadsafe(self._begin, request_id, address, payload)

    def refusal(self, request_id: str) -> str:
        """Return why the server will not compute a prompt; "" if nothing is known against it."""
        return self._reasons.get(request_id, "")

    def forget(self, request_id: str, *, is_done: bool) -> None:
        """Stop waiting for an answer: at once, so that the server gives the prompt up, or soon, if it has been read."""
        with self._lock:
            is_asked = self._reasons.pop(request_id, None) is not None
        if is_asked and self._loop is not None and self._is_open:
            self._loop.call_soon_threadsafe(self._end, request_id, LINGER_S if is_done else 0.0)

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._is_open and self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2 * ANSWER_S)
        self._is_open = False

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        if left := [*self._tasks.values()]:
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left))
        loop.close()

    def _begin(self, request_id: str, address: HostPort, payload: Mapping[str, object]) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(request_id, address, payload))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    def _end(self, request_id: str, after_s: float) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            asyncio.get_running_loop().call_later(after_s, task.cancel)

    async def _ask(self, request_id: str, address: HostPort, payload: Mapping[str, object]) -> None:
        try:
            reason = await self._reason_against(address, payload)
        except Exception as error:  # whatever it is, only this request fails
            reason = f"{type(error).__name__}: {error}"
        with self._lock:
            if request_id in self._reasons:
                self._reasons[request_id] = reason

    async def _reason_against(self, address: HostPort, payload: Mapping[str, object]) -> str:
        """Ask a server, and return what it has against the question; "" if it has computed the prompt."""
        url = f"http://{str(address).removeprefix('tcp://')}/generate"
        wait = aiohttp.ClientTimeout(total=None, connect=ANSWER_S)
        async with (
            aiohttp.ClientSession(timeout=wait, headers=self._headers) as session,
            # the prompt is for this server alone
            session.post(url, json=payload, allow_redirects=False) as answer,
        ):
            if answer.status == HTTPStatus.OK:
                return ""
            text = (await answer.content.read(MAX_REASON)).decode(errors="replace")
            if answer.status == HTTPStatus.UNAUTHORIZED:
                text = OTHER_KEY if self._headers else NO_KEY
            return f"{url} answers {answer.status} {answer.reason}: {text}"
