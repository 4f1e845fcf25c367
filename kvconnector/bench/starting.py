"""What it takes of an engine's thread to start a request; planning is the driver's, and not in it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvconnector.bench.contract import BenchOptions, CaseResult, Measurement
from kvconnector.bench.loopback import LoopbackPair
from kvconnector.bench.pools import choose_blocks
from kvconnector.bench.shapes import EngineShape

TOKENS = 8192
DEFAULT_ITERATIONS = 100


def measure(options: BenchOptions) -> CaseResult:
    """One request of `TOKENS`, or of the first and smaller size that the options name, between engines of one rank.

    Each is withdrawn as soon as it has been started, so that the next one finds idle drivers.

    Raises:
        TransportError: there is no UCX. TransferTimeoutError: a withdrawn request did not end.
    """
    tokens = min([TOKENS, *options.tokens[:1]])
    default = EngineShape()
    shapes = ((options.prefill or default).on_one_rank, (options.decode or default).on_one_rank)
    counts = [shape.num_blocks(tokens) for shape in shapes]
    rng = np.random.default_rng(options.seed)
    blocks = [choose_blocks(count, count, scattered=options.scattered, rng=rng) for count in counts]
    device = "cpu" if options.device == "cpu" else "cuda:0"
    iterations = options.iterations or DEFAULT_ITERATIONS
    names = [f"request-{index}" for index in range(options.warmup + iterations)]
    with LoopbackPair(options.model, shapes, (counts[0], counts[1]), device=device) as pair:
        held = [_held(pair, name, blocks[0], tokens) for name in names]
        started = [
            _started(pair, name, params, blocks[1], tokens=tokens, timeout_s=options.timeout_s)
            for name, (params, _) in zip(names, held, strict=True)
        ]
    times = {
        "D: build_step and start_step": [step_s for step_s, _ in started],
        "D: from on_new_request to start_step": [whole_s for _, whole_s in started],
        "P: from request_finished to start_step": [held_s for _, held_s in held],
    }
    return CaseResult(
        case=f"starting a request of {tokens} tokens in {counts[1]} blocks on the engine's thread",
        measurements=tuple(
            Measurement(
                contender=contender,
                part="variant" if index else "ours",
                samples_s=tuple(samples[options.warmup :]),
            )
            for index, (contender, samples) in enumerate(times.items())
        ),
    )


def _held(
    pair: LoopbackPair, request_id: str, block_ids: list[int], tokens: int
) -> tuple[dict[str, Any], float]:
    """The request's parameters, and seconds on the producer."""
    began_s = time.perf_counter()
    params = pair.hold(request_id, block_ids, tokens)
    return params, time.perf_counter() - began_s


def _started(
    pair: LoopbackPair,
    request_id: str,
    params: dict[str, Any],
    block_ids: list[int],
    *,
    tokens: int,
    timeout_s: float,
) -> tuple[float, float]:
    """Seconds on the consumer, of its step alone and with what its scheduler did before."""
    began_s = time.perf_counter()
    pair.schedule(request_id, params, block_ids, tokens)
    scheduled_s = time.perf_counter()
    pair.start()
    ended_s = time.perf_counter()
    pair.withdraw(request_id, time.monotonic() + timeout_s)
    return ended_s - scheduled_s, ended_s - began_s
