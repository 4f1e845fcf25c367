"""`transfer` and `request`: long, and short, requests from one engine's processes to another's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from kvconnector.bench import limits
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engine_process import Engine
from kvconnector.bench.engines import EnginePair, PeerPair, Runner
from kvconnector.bench.options import WARMUP, BenchOptions
from kvconnector.bench.peers import PEERS
from kvconnector.bench.processes import CallFailedError
from kvconnector.bench.results import CaseResult, ContenderKind, Measurement, ShowProgress
from kvconnector.bench.shapes import CONVERTIBLE
from kvconnector.errors import ConfigError, KVConnectorError, TransportError
from kvconnector.session.events import DIRECT_PATH

BACK_TO_BACK = 2
"""Bursts of a contender's turn that follow the first one at once."""
Bursts: TypeAlias = Sequence[Sequence[Transfer]]
"""Bursts, each of requests with one length that are asked for at once."""


def run(options: BenchOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Yield the cases of every request size between our engines, and between a peer's if there is one."""
    deployment = Deployment(options)
    if options.peer:
        _refuse_what_peers_cannot(deployment)
    cases = {
        deployment.case_name(num_tokens): [
            (each,) for each in deployment.transfers(num_tokens, options.iterations)
        ]
        for num_tokens in options.tokens
    }
    yield from compare(deployment, cases, progress, must_run=not options.connect)


def compare(
    deployment: Deployment,
    cases: Mapping[str, Bursts],
    progress: ShowProgress,
    *,
    must_run: bool,
    num_following: int = BACK_TO_BACK,
    figures: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[CaseResult]:
    """Move the bursts of each case with our engines, those of the peers, and the limits.

    The contenders and the limits take turns, so that other work on the machine slows down all of them, and none keeps a
    processor's cache to itself. The processes of all but one are stopped, since idle threads differ. The first bursts
    of turns are one case, and the `num_following` that follow each at once another. Peers that do not run are noted
    unless they `must_run`. Every measurement has `figures`.
    """
    with ExitStack() as exits:
        notes: list[str] = []
        progress(f"starting {deployment}")
        pair = exits.enter_context(EnginePair(deployment))
        contenders: list[Runner] = [pair]
        plain = None if deployment.options.connect else deployment.without_conversion()
        if plain is not None:
            contenders.append(exits.enter_context(EnginePair.without_conversion(plain)))
            contenders[-1].pause()
        contenders += _start_peers(exits, deployment, notes, progress, must_run=must_run)
        pair.pause()
        for case, bursts in cases.items():
            lengths = [each.num_tokens for burst in bursts for each in burst]
            with _limits_of(pair, max(lengths)) as limited:
                runners = [*contenders, *limited]
                alone = _ucx_alone(pair, max(lengths))
                taken = _take_turns(runners, bursts, partial(progress, case), num_following)
                alone += _ucx_alone(pair, max(lengths))
            came = [f"kvconnector's path: {path}" for path in sorted(pair.paths)]
            for how, samples in taken.items():
                measured = tuple(
                    Measurement(
                        runner.name,
                        runner.kind,
                        tuple(times),
                        sum(map(runner.request_bytes, lengths)) // len(bursts),
                        {**figures},
                    )
                    for runner, times in zip(runners, samples, strict=True)
                )
                remarks = [*came, *pair.lanes, *notes, *_share_of(alone, measured[0], pair.paths)]
                if plain is not None:
                    remarks.append(_cost_of_conversion(deployment, *measured[:2]))
                yield CaseResult(
                    f"{case}, {how}" if num_following else case, measured, tuple(remarks)
                )


def _start_peers(
    exits: ExitStack,
    deployment: Deployment,
    notes: list[str],
    progress: ShowProgress,
    *,
    must_run: bool,
) -> list[PeerPair]:
    """Return the peers' engines in each of their settings, stopped. Those that do not run here are in `notes`.

    Raises:
        KVConnectorError: a library that `must_run` does not run with its default settings.
    """
    contenders: list[PeerPair] = []
    tried = set[str]()
    for index, peer in enumerate(PEERS):
        if peer.library not in deployment.options.peers:
            continue
        progress(f"starting {peer.name}")
        try:
            pair = exits.enter_context(PeerPair(deployment, index))
            pair.verify(deployment.transfer(min(deployment.options.tokens)))
        except KVConnectorError as error:
            if must_run and peer.library not in tried:
                raise
            notes.append(f"{peer.name} does not run here: {str(error).splitlines()[-1]}")
        else:
            pair.pause()
            contenders.append(pair)
        tried.add(peer.library)
    return contenders


@dataclass(slots=True)
class _Limit(Runner):
    """One limit, which takes its turn among the contenders: `move` moves a given number of bytes. Of a request whose
    elements are converted these are the fewer ones of both engines, which packed reads send.
    """

    name: str
    kind: ContenderKind
    deployment: Deployment
    move: Callable[[int], None]

    def request_bytes(self, num_tokens: int) -> int:
        return min(self.deployment.request_bytes(num_tokens))

    def run(self, *transfers: Transfer) -> float:
        nbytes = sum(self.request_bytes(each.num_tokens) for each in transfers)
        return limits.repeat(lambda: self.move(nbytes), 1, warmup=0)[0]


@contextmanager
def _limits_of(pair: EnginePair, num_tokens: int) -> Iterator[list[_Limit]]:
    """Yield the limits of the pair's devices and transports, for the deployment's number of requests in flight, each of
    at most `num_tokens` tokens.
    """
    deployment = pair.deployment
    options = deployment.options
    nbytes = min(deployment.request_bytes(num_tokens)) * deployment.in_flight
    if options.device != "cpu" and not options.connect:
        copies = limits.copies_of(deployment, num_tokens)
        name = f"plain copy, {len(copies)} at once" if len(copies) > 1 else "plain copy"
        yield [_Limit(name, "limit", deployment, limits.device_copies(copies))]
        return
    host = pair.prefill.host
    # on one host here: while a limit is timed, the engines are stopped
    served = options.connect and pair.prefill.call(Engine.serve_stream, nbytes)
    port = served or limits.serve_stream(host, nbytes)
    with limits.open_stream((host, port), nbytes) as move:
        found = [_Limit("raw TCP socket", "limit", deployment, move)]
        if not options.connect:
            kind: ContenderKind = "limit" if options.share_memory else "variant"
            copy = limits.host_copy(nbytes)
            found.insert(0, _Limit("memcpy, one thread", kind, deployment, copy))
        yield found


def _ucx_alone(pair: EnginePair, num_tokens: int) -> list[float]:
    """Return the bytes a second of `ucx_perftest` between two hosts, with the UCX and the settings of the connector;
    nothing on one host, or if either UCX has no such program.
    """
    options, engine = pair.deployment.options, pair.prefill
    if not options.connect:
        return []
    config = options.config("bench", "consumer")
    nbytes = min(pair.deployment.request_bytes(num_tokens))
    library = config.ucx.library
    with suppress(TransportError, CallFailedError):
        command = limits.find_perftest(library)
        port = engine.call(Engine.serve_perftest, library, limits.ucx_variables(config))
        return [limits.bandwidth(command, (engine.host, port), config, nbytes)]
    return []


def _share_of(alone: list[float], ours: Measurement, paths: Collection[str]) -> Iterator[str]:
    if alone and ours.gigabytes_per_s is not None:
        share = ours.gigabytes_per_s * 1e9 * len(alone) / sum(alone)
        speeds = " and ".join(f"{each / 1e9:.2f}" for each in alone)
        reached = "" if DIRECT_PATH in paths else f"; kvconnector reaches {share:.0%} of it"
        yield f"ucx_perftest tag_bw of the same UCX, host memory, before and after: {speeds} GB/s{reached}"


def _cost_of_conversion(deployment: Deployment, converting: Measurement, plain: Measurement) -> str:
    """Return how long converting reads take, as a note. A plain one reads and writes elements of the prefill engine."""
    theirs, ours = (CONVERTIBLE[shape.dtype] for shape in deployment.shapes.values())
    times = [float(np.median(each.samples_s)) for each in (converting, plain)]
    ratio = times[0] / times[1]
    return (
        f"a converting read takes {ratio:.2f} of a plain one's time, and"
        f" {ratio * 2 * theirs / (theirs + ours):.2f} of it for each byte read and written"
    )


def _take_turns(
    runners: Sequence[Runner], bursts: Bursts, progress: Callable[[float], None], num_following: int
) -> dict[str, list[list[float]]]:
    """Return each runner's seconds for bursts: the first of each turn, and those that follow it at once. Each runner's
    bytes are checked before the first turn and after the last.
    """
    longest = max(bursts, key=lambda burst: burst[0].num_tokens)
    taken: dict[str, list[list[float]]] = {
        how: [[] for _ in runners] for how in ("in turns", "back to back")
    }
    for turn in range(-1, len(bursts) + 1):
        progress((turn + 1) / (len(bursts) + 2))
        for runner, first_s, following_s in zip(runners, *taken.values(), strict=True):
            runner.resume()
            if turn in (-1, len(bursts)):
                runner.verify(longest[-1])
            if turn == -1:
                for _ in range(WARMUP):
                    runner.run(*longest)
            elif turn < len(bursts):
                first_s.append(runner.run(*bursts[turn]))
                for following in range(turn + 1, turn + 1 + num_following):
                    following_s.append(runner.run(*bursts[following % len(bursts)]))
            runner.pause()
    return taken if num_following else {"in turns": taken["in turns"]}


def _refuse_what_peers_cannot(deployment: Deployment) -> None:
    """Raises ConfigError: the engines have different shapes, or a request does not fill its blocks."""
    unit = deployment.options.prefill.virtual_block_tokens
    if deployment.options.prefill != deployment.options.decode:
        raise ConfigError(
            "the peer reads whole blocks: both engines need the same tp, pp, block and layout",
            prefill=str(deployment.options.prefill),
            decode=str(deployment.options.decode),
        )
    if any(tokens % unit for tokens in deployment.options.tokens):
        raise ConfigError(
            "the peer reads whole blocks: requests must fill them",
            tokens=list(deployment.options.tokens),
            block_tokens=unit,
        )
