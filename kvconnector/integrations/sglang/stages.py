"""Lets the pipeline stages of a decode engine end a request alike: hooks around two methods of SGLang's scheduler.

In each pass the stages agree on the requests whose transfers have ended, well or not. The first stage lists their ids,
each further stage takes out those that have not ended there, and the last stage's list goes round: each stage releases
what is in it and tells the next stage what it has released. This has two gaps. Each stage goes by its own result: if a
transfer failed in one stage alone, the others compute the request, while that stage takes part in none of its steps,
and the engine stops. And a stage passes on only what it released after a success, so the stages behind it keep a failed
request's pages for ever.

With the hooks a stage lists a request twice if its transfer was a success: as `id` and as `(id,)`. SGLang's code takes
both for ids. So `(id,)` goes round only if the transfer was a success in every stage, and a stage that gets `id` alone
fails the request, even if it has read its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvconnector.integrations.sglang.transfers import LoadedPrompt, Stage

Listed = str | tuple[str]
"""A request that has ended, or that it was a success. No id that a client chooses is a tuple."""


def list_successes(
    original: Callable[..., Any], scheduler: Any, requests: Any, is_send: bool, *wanted: Any
) -> Any:
    """List which transfers of a decode engine were a success, beside those that have ended: a hook around `get_rids`.

    Args:
        original: Returns, for each element of `wanted`, the ids of the requests in one of its stages.
        scheduler: SGLang's.
        requests: A queue of requests.
        is_send: True for those of a prefill engine.
        wanted: Sequences of `Stage`. A single one asks for the transfers that have ended.
    """
    if is_send or len(wanted) != 1:
        return original(scheduler, requests, is_send, *wanted)
    done, failed = original(scheduler, requests, is_send, [Stage.DONE], [Stage.FAILED])
    return [*done, *failed, *((rid,) for rid in done)]


def release_alike(
    original: Callable[..., Any], scheduler: Any, listed: Sequence[Listed] | None
) -> list[Listed] | None:
    """Fail what was no success in every stage, and tell the next stage of all that has left the queue here: a hook
    around `process_decode_transfer_queue`.

    Args:
        original: Takes the listed requests out of the queue, and returns the ids of those that were a success.
        scheduler: SGLang's.
        listed: What has ended in all stages, as `list_successes` lists it; None before the first list has gone round.

    Returns:
        What the next stage is to release.
    """
    if listed is None:
        original(scheduler, listed)
        return None
    queue, ended = scheduler.disagg_decode_transfer_queue, {*listed}
    held = [each for each in queue.queue if each.req.rid in ended]
    for each in held:
        if (each.req.rid,) not in ended and isinstance(each.kv_receiver, LoadedPrompt):
            each.kv_receiver.fail_with_another_stage()
    released = original(scheduler, listed)
    left = {id(each) for each in queue.queue}
    gone: list[Listed] = [each.req.rid for each in held if id(each) not in left]
    return gone + [(rid,) for rid in released]
