"""`inferencex`: bursts of requests with the caches of DeepSeek-V4-Pro, after the suite `kv-transfer` of InferenceX.

A decode engine admits several requests in one step, so all requests of a burst are asked for before any is waited for.
Their blocks are disjoint parts of one random permutation. Pages have 16 or 64 tokens. The limit moves as many bytes in
one piece. The consumer reads, which the suite calls "pull".
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec

from kvconnector.bench.deployment import SPARE_FACTOR, Deployment
from kvconnector.bench.environment import free_memory_bytes
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.peers import PEERS
from kvconnector.bench.results import CaseResult, ShowProgress
from kvconnector.bench.shapes import DEEPSEEK_V4_PRO, EngineShape
from kvconnector.bench.sizes import format_bytes
from kvconnector.bench.transfer import compare
from kvconnector.errors import ConfigError

MODEL = msgspec.structs.replace(
    DEEPSEEK_V4_PRO,
    groups=tuple(
        msgspec.structs.replace(group, keeps="window") if group.keeps == "chunk" else group
        for group in DEEPSEEK_V4_PRO.groups
    ),
)
"""Its prompts fill pages, so they end with a row of 128 tokens, whose states an engine would no longer read; the other
libraries read whole blocks."""
SHARE_OF_MEMORY = 0.5
"""Share of the free memory for the pools of all contenders together; larger bursts are left out."""


class BurstOptions(BenchOptions, frozen=True, kw_only=True):
    """`pages` are tokens of a page, `bursts` requests at once."""

    pages: tuple[int, ...] = (16, 64)
    bursts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)


def run(options: BurstOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Yield a case for each length, page size and burst. The contenders take turns, as in `transfer`.

    Raises:
        ConfigError: A length is no multiple of the largest page, or not even one request fits into the memory.
    """
    options = msgspec.structs.replace(options, model=MODEL)
    if any(tokens % 128 for tokens in options.tokens):
        raise ConfigError("prompts fill pages: give multiples of 128", tokens=list(options.tokens))
    num_contenders = 1 + sum(peer.library in options.peers for peer in PEERS)
    budget = SHARE_OF_MEMORY * _free_bytes(options.device) / (2 * num_contenders * SPARE_FACTOR)
    cases = list(product(options.tokens, options.pages, options.bursts))
    for number, (tokens, page, burst) in enumerate(cases):
        nbytes = burst * options.model.request_bytes(tokens)
        name = f"{tokens} tokens, pages of {page}, {burst} at once, {format_bytes(nbytes)}"
        if nbytes > budget:
            progress(f"{name}: left out, this machine has memory for {format_bytes(int(budget))}")
            if burst == min(options.bursts):
                raise ConfigError(
                    "no request of this length fits the memory: give shorter --tokens",
                    tokens=tokens,
                    wanted=format_bytes(nbytes),
                    budget=format_bytes(int(budget)),
                )
            continue
        shape = EngineShape(block=page)
        share = number / len(cases)
        cut = msgspec.structs.replace(options, prefill=shape, decode=shape, tokens=(tokens,))
        deployment = Deployment(cut, in_flight=burst)
        requests = [deployment.transfer(tokens, index) for index in range(burst)]
        yield from compare(
            deployment,
            {name: [requests] * options.iterations},
            lambda *_, at=(name, share): progress(*at),
            must_run=False,
            num_following=0,
            figures={"prompt_tokens": tokens, "page_tokens": page, "requests": burst},
        )


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return free_memory_bytes()
    import torch

    return int(torch.cuda.mem_get_info()[0])
