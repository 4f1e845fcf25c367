"""The OpenAI-style completions API: requests, responses, stream events, errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
from aiohttp import web

from kvconnector.errors import retry_of
from minillm import tokenizer
from minillm.messages import SampledToken

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
MAX_ANSWERS = 16
"""Most answers to one prompt."""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/completions. Fields that this engine does not know are ignored, as clients send many."""

    prompt: list[int] | str
    encoder_prompt: list[int] | str = []
    """The encoder's input, for a model that has one."""
    max_tokens: int = 16
    stream: bool = False
    return_token_ids: bool = False
    logprobs: int | None = None
    stop_token_ids: list[int] = []
    temperature: float = 0.0
    n: int = 1
    """Number of answers: the i-th begins with the i-th likeliest token and continues greedily."""
    model: str = ""
    cache_salt: str = ""
    """Only requests with the same salt reuse each other's blocks, so that tenants cannot probe each other's prompts."""
    kv_transfer_params: dict[str, Any] | None = None

    def token_ids(self, vocab_size: int) -> tuple[list[int], list[int]]:
        """Return the prompt, and the encoder's, as tokens.

        Raises:
            ApiError: a token outside the vocabulary.
        """
        prompt, encoder_prompt = (
            tokenizer.encode(each) if isinstance(each, str) else each
            for each in (self.prompt, self.encoder_prompt)
        )
        for token in chain(prompt, encoder_prompt):
            if not 0 <= token < vocab_size:
                raise ApiError(400, f"token id {token} is outside the vocabulary of {vocab_size}")
        return prompt, encoder_prompt


class ApiError(Exception):
    """An error with its HTTP status. `cause` is the class of the connector's error behind it, if there is one."""

    def __init__(self, status: int, message: str, cause: str = "") -> None:
        self.status = status
        self.message = message
        self.cause = cause
        super().__init__(message)

    @classmethod
    def of_load(cls, reason: str) -> ApiError:
        """The error for a failed load, by the reason that the connector gave."""
        return cls(502, reason, reason.partition(":")[0])

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object as a mapping. With a cause it says where the request may be sent again."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error: dict[str, Any] = {
            "message": self.message,
            "type": kind,
            "param": None,
            "code": self.status,
        }
        if self.cause:
            error |= {"cause": self.cause, "retry": retry_of(self.cause)}
        return {"error": error}

    def response(self) -> web.Response:
        """OpenAI's error object."""
        return web.json_response(self.body, status=self.status)


async def read_completion_request(request: web.Request) -> CompletionRequest:
    """Return the validated body.

    Raises:
        ApiError: not JSON, a field of the wrong type, or sampling that a greedy engine cannot do.
    """
    try:
        body = msgspec.json.decode(await request.read(), type=CompletionRequest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"invalid completion request: {error}") from error
    if body.temperature != 0.0:
        raise ApiError(400, "this engine is greedy: temperature must be 0")
    if not 1 <= body.n <= MAX_ANSWERS:
        raise ApiError(400, f"n must be from 1 to {MAX_ANSWERS}")
    return body


def completion_choice(
    body: CompletionRequest,
    answer: int,
    tokens: Sequence[SampledToken],
    finish_reason: str | None,
) -> dict[str, Any]:
    """Return one answer, or the part of it that is in one stream event."""
    token_ids = [token.token_id for token in tokens]
    choice: dict[str, Any] = {
        "index": answer,
        "text": tokenizer.decode(token_ids),
        "finish_reason": finish_reason,
        "logprobs": None,
    }
    if body.logprobs is not None:
        choice["logprobs"] = {"token_logprobs": [token.logprob for token in tokens]}
    if body.return_token_ids:
        choice["token_ids"] = token_ids
    return choice


def completion_body(
    body: CompletionRequest, completion_id: str, choices: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return a response, or one stream event."""
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or "minillm",
        "choices": list(choices),
    }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object. `cached_tokens` of the prompt were found in this engine's cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def sse(payload: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


@web.middleware
async def error_middleware(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every error leaves as OpenAI's error object."""
    try:
        response: web.StreamResponse = await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        return ApiError(error.status, error.text or error.reason).response()
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return ApiError(500, "internal error; the server's log has the details").response()
    return response
