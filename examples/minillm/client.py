"""A client of the completions API that measures what it sees."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec


class CompletionError(Exception):
    """A server refused or broke off a completion; the text is the server's."""


@dataclass(slots=True)
class Completion:
    """A finished completion: tokens, their log-probabilities, timing, and what the server said of its KV transfer.

    Several answers follow one another.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_token_s: float = 0.0
    total_s: float = 0.0
    kv_transfer_stats: dict[str, Any] | None = None

    def largest_logprob_difference(self, other: Completion) -> float:
        """Largest difference over the tokens that both have."""
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    max_tokens: int,
    **more: Any,
) -> Completion:
    """Stream one completion from the server at `url`; `more` are further fields of its body.

    Raises:
        CompletionError: an error status, an error event, or a stream that ends early.
    """
    body = {
        **more,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
        "logprobs": 1,
    }
    result = Completion()
    answers: dict[int, Completion] = {}
    started = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise CompletionError(f"{url} answered {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    result.total_s = time.perf_counter() - started
                    for _, answer in sorted(answers.items()):
                        result.token_ids += answer.token_ids
                        result.logprobs += answer.logprobs
                    return result
                if not answers:
                    result.first_token_s = time.perf_counter() - started
                _book_event(result, answers, msgspec.json.decode(line[6:]))
    except (TimeoutError, aiohttp.ClientError) as error:
        raise CompletionError(f"{url} broke off: {error!r}") from error
    num_tokens = sum(len(answer.token_ids) for answer in answers.values())
    raise CompletionError(f"{url} ended the stream after {num_tokens} tokens")


def _book_event(result: Completion, answers: dict[int, Completion], event: dict[str, Any]) -> None:
    if "error" in event:
        raise CompletionError(str(event["error"]["message"]))
    choice = event["choices"][0]
    answer = answers.setdefault(choice["index"], Completion())
    answer.token_ids.extend(choice["token_ids"])
    answer.logprobs.extend(choice["logprobs"]["token_logprobs"])
    result.kv_transfer_stats = event.get("kv_transfer_stats", result.kv_transfer_stats)
