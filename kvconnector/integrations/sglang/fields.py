"""The fields of a request that a client controls. SGLang passes them on as they come, and its schedulers compute with
them: a missing host or a room that no tensor holds would end the scheduler, and with it every request. Pure.
"""

from __future__ import annotations

from typing import Any

from kvconnector.control.address import HostPort, parse_address
from kvconnector.errors import ConfigError

MAX_ROOM = (1 << 63) - 1
"""SGLang keeps rooms in tensors of 64 bit integers, in which 0 means that no metadata have arrived."""
MAX_ENGINE_ID = 512
"""Characters of an engine's name in a message (`ids.Id`)."""
UNKNOWN_ELSEWHERE = {
    "return_logprob": "log probabilities of the first token",
    "return_hidden_states": "the prompt's hidden states",
    "return_sampling_mask": "the first token's sampling mask",
    "return_routed_experts": "the prompt's routed experts",
    "multimodal_inputs": "images or other media, which are not compared",
    "input_embeds": "embeddings, which are not compared",
}
"""Fields of a request for which the first token is not enough, and what they ask for."""
MAX_TOP_LOGPROBS = 128
"""Log probabilities of the first token that SGLang's metadata have room for. More would end a prefill engine."""
MAX_SHOWN = 80
"""Characters of a client's value that an error shows."""


def named_engine(text: str) -> str:
    """Return the engine that `ENGINE@host:port` names, "" without one.

    An engine of another kind has no registry of SGLang's. For such a one a router sends `ENGINE@HOST` as
    `bootstrap_host`, and the port of its directory service as `bootstrap_port`.
    """
    return text.rpartition("@")[0]


def bootstrap_address(text: str) -> HostPort:
    """Split `host:port`, as SGLang joins both; an engine that is named before it is left out. Raises ConfigError: it is
    not that.
    """
    host, _, port = text.rpartition("@")[2].rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return parse_address(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")


def problem_of(
    request: Any, *, is_prefill: bool, max_top_logprobs: int = MAX_TOP_LOGPROBS
) -> str | None:
    """Return why a request cannot be served, in words for its client, or None if it can.

    Args:
        request: SGLang's request, with `bootstrap_room`, `bootstrap_host`, `bootstrap_port` and
            `disagg_prefill_dp_rank` of any types.
        is_prefill: True on a prefill engine, which uses only the room.
        max_top_logprobs: How many of a token's log probabilities a row of metadata holds.
    """
    room, rank = request.bootstrap_room, request.disagg_prefill_dp_rank
    if type(room) is not int or not 1 <= room <= MAX_ROOM:
        return f"bootstrap_room must be an integer from 1 to {MAX_ROOM}, not {_shown(room)}"
    if problem := _too_much(request, max_top_logprobs):
        return problem
    if is_prefill:
        return None
    host, port = request.bootstrap_host, request.bootstrap_port
    if not isinstance(host, str) or type(port) is not int:
        return (
            "bootstrap_host must be a prefill engine's host, and bootstrap_port its port,"
            f" not {_shown(host)} and {_shown(port)}"
        )
    try:
        bootstrap_address(
            f"[{host}]:{port}" if ":" in host and "[" not in host else f"{host}:{port}"
        )
    except ConfigError:
        return f"bootstrap_host and bootstrap_port name no address: {_shown(host)}, {_shown(port)}"
    if rank is not None and (type(rank) is not int or not 0 <= rank <= MAX_ROOM):
        return f"disagg_prefill_dp_rank must be a rank from 0 on, not {_shown(rank)}"
    engine = named_engine(host)
    if len(engine) > MAX_ENGINE_ID or not engine.isprintable():
        return f"bootstrap_host names an engine that cannot be: {_shown(host)}"
    return _unknown_elsewhere(request) if engine else None


def _too_much(request: Any, max_top_logprobs: int) -> str | None:
    """Return what SGLang's two engines cannot move of a request, although they admit it."""
    asked = getattr(getattr(request, "logprob", None), "top_logprobs_num", 0)
    if asked and asked > max_top_logprobs:
        return f"top_logprobs_num is at most {max_top_logprobs} with two engines, not {asked}"
    count = getattr(getattr(request, "sampling_params", None), "n", 1)
    if count == 1:
        return None
    return (
        f"n={count} with one bootstrap_room, which SGLang gives to every sample and which names one transfer: send a"
        " request for each sample"
    )


def _unknown_elsewhere(request: Any) -> str | None:
    """Return why a request cannot be served with a prefill engine of another kind, which sends only the first token."""
    # an older release does not have all of these fields
    needs = [
        what
        for name, what in UNKNOWN_ELSEWHERE.items()
        if getattr(request, name, None) not in (None, False)
    ]
    if not needs:
        return None
    engine = _shown(request.bootstrap_host)
    return (
        f"the prefill engine {engine} is of another kind, and the request needs {', '.join(needs)}"
    )


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > 1 << 64:  # Python refuses to print longer ones
        return "a number of more than 64 bits"
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
