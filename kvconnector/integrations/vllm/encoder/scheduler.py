"""The scheduler half of `EncoderConnector`: which outputs are kept, fetched, offered and copied."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import vllm
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from kvconnector.errors import (
    ConfigError,
    KVConnectorError,
    LocalError,
    MemoryInUseError,
    RemoteError,
    RemoteProtocolError,
    TransferTimeoutError,
)
from kvconnector.integrations.vllm.encoder.options import EncoderOptions, PositiveCount
from kvconnector.integrations.vllm.encoder.pool import EncoderMemory, Output, Outputs, PoolShape
from kvconnector.runtime import Scheduler, Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

try:
    from vllm.distributed.ec_transfer.ec_connector.encoder_output_width import (
        get_encoder_output_width,
    )
except ImportError as error:
    raise ConfigError(
        "EncoderConnector needs vLLM 0.32 or newer, which measures how wide an encoder's outputs are",
        found=str(vllm.__version__),
    ) from error

logger = logging.getLogger(__name__)

SHAPE = "shape"
MAX_DECLINED = 4096
"""Offers of one request that are declined, besides those of its images."""
_UNWANTED = frozenset({"FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"})


@dataclass(frozen=True)
class Copy:
    """A copy of an output by the workers. Each has another `number`."""

    number: int
    blocks: list[int]
    shape: tuple[int, int]


@dataclass
class EncoderStep(ECConnectorMetadata):
    """A step's orders for vLLM's workers, by identifier. Outputs to save stay in it until they are saved."""

    number: int
    path: str
    pool: PoolShape
    saves: dict[str, Copy] = field(default_factory=dict)
    loads: dict[str, Copy] = field(default_factory=dict)


@dataclass
class _Want:
    """An output that a request needs and another engine has. It is asked for once, or declined. The request
    `is_waiting` for it since `since`. Once it `is_given_up`, the encoder here makes it.
    """

    since: float
    is_asked: bool = False
    is_waiting: bool = True
    is_given_up: bool = False
    failure: KVConnectorError | None = None


@dataclass(frozen=True)
class _Fetch:
    """A transfer of an output that a request has asked for, from this offer."""

    request_id: str
    identifier: str
    offer: str


class EncoderScheduler:
    """The scheduler half, and the worker that moves outputs. All methods are for the scheduler's thread.

    An output is used by requests until its tokens are computed, by the fetch that brings it, by offers of it, and by
    the step in which vLLM's workers copy it; then it is only kept until others need the room.

    Raises:
        ConfigError: an option is unknown or malformed, or the pool would hold nothing.
        TransportError: UCX cannot start, or there is no memory.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        options = EncoderOptions.of(vllm_config)
        self._wait_s = options.wait_s
        self._role = options.config.role
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._shape = PoolShape.within(
            options.pool_bytes,
            model.get_inputs_embeds_size(),
            model.dtype.itemsize,
            # vLLM calls the connector in the first pipeline stage alone
            parallel.tensor_parallel_size * parallel.prefill_context_parallel_size,
        )
        self._resolver = PlaceholderMetadataResolver(model)
        self._memory = EncoderMemory.make(self._shape, model.dtype)
        self._outputs = Outputs(self._shape.num_blocks)
        self._worker = Worker(options.config, rank=(0, 0), model=options.model_name)
        self._worker.register({0: (self._memory.rows,)}, total_heads=1)
        self._connector = Scheduler(options.config, [self._worker.handshake()])
        self._widths: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._step = self._last_sent = 0
        self._saves: dict[str, Copy] = {}
        self._loads: dict[str, Copy] = {}
        self._wanted: dict[tuple[str, str], _Want] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._offers: dict[str, Output] = {}
        self._leaving: deque[tuple[int, str, Output, object]] = deque()
        """Uses that end once all ranks have executed a step: its number, the output and the use."""
        self._is_current = False
        self.lost: set[str] = set()
        """Requests that cannot get an output which they need."""

    def has(self, identifier: str) -> bool:
        """Returns True if vLLM may load this output instead of encoding."""
        output = self._outputs.get(identifier) if self._role != "producer" else None
        return output is not None and output.is_ready

    def admit(self, request: Request, num_computed_tokens: int) -> bool:
        """Returns True if a request needs no output that is still on its way. Begins to fetch those that it needs."""
        if not self._is_current:
            self._progress()
        if self._role != "consumer":
            for feature in request.mm_features:
                # what another engine has is fetched: while it waits for that, nothing would make it here
                if self._role == "producer" or self._offer_of(request, feature.identifier) is None:
                    self._expect(request.request_id, feature)
        if self._role == "producer":
            return True
        is_there = True
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length <= num_computed_tokens:
                continue
            try:
                is_there &= self._is_there(request, feature)
            except KVConnectorError as error:
                if not self._can_encode(request, feature, error):
                    return False
        return is_there

    def load(self, request: Request, identifier: str) -> None:
        """Have vLLM's workers load an output in the next step, if it is there."""
        output = self._outputs.get(identifier)
        if self._role == "producer" or output is None or not output.is_ready:
            return
        copy = self._loads[identifier] = Copy(next(self._numbers), output.blocks, output.shape)
        output.uses.add(copy.number)
        self._leaving.append((self._step + 1, identifier, output, copy.number))

    def release(self, request: Request, index: int) -> None:
        """Let an output of a request go, whose tokens are computed, unless a later place in its prompt has it, too."""
        features = request.mm_features
        identifier = features[index].identifier
        output = self._outputs.get(identifier)
        is_later = any(each.identifier == identifier for each in features[index + 1 :])
        # what is still to be saved stays until the request is over: see `finish`
        if output is not None and output.is_ready and not is_later:
            output.uses.discard(request.request_id)

    def build_step(self, num_tokens: int) -> EncoderStep:
        """Return the orders for vLLM's workers of a step that computes `num_tokens`. Without any it may not reach
        them.
        """
        self._progress()
        self._is_current = False
        self._step += 1
        saves: dict[str, Copy] = {}
        if num_tokens:
            self._last_sent, saves = self._step, dict(self._saves)
        loads, self._loads = self._loads, {}
        return EncoderStep(self._step, self._memory.path, self._shape, saves, loads)

    def finish(self, request: Request) -> dict[str, Any] | None:
        """Forget a request. Returns `ec_transfer_params` with offers of its outputs, unless nobody wants them."""
        self._progress()
        is_wanted = not (request.status.name in _UNWANTED or self._role == "consumer")
        items = collect_ec_item_metadata(request.mm_features, self._resolver) if is_wanted else {}
        for identifier in {feature.identifier for feature in request.mm_features}:
            if is_wanted:
                # what cannot be fetched needs the media: the metadata alone would take its place
                items[identifier].update(self._offered(identifier) or {"metadata": {}})
            output = self._outputs.get(identifier)
            if output is not None and identifier in self._saves:
                # a step that saves it may be on the way
                self._leaving.append((self._last_sent, identifier, output, request.request_id))
            elif output is not None:
                output.uses.discard(request.request_id)
        self._decline_unread(request)
        self._pump()
        return items or None

    def close(self) -> None:
        """End all transfers, and free the pool."""
        self._connector.close()
        try:
            self._worker.close()
        except MemoryInUseError as error:
            logger.warning("the memory for encoder outputs stays mapped: %s", error)
        self._memory.close()

    # -- outputs of other engines --

    def _is_there(self, request: Request, feature: MultiModalFeatureSpec) -> bool:
        """Returns True if an output is here, or if no other engine has it. Begins to fetch it if that has not begun.
        Raises: KVConnectorError: it cannot be fetched.
        """
        identifier, name = feature.identifier, (request.request_id, feature.identifier)
        output = self._outputs.get(identifier)
        announced = self._offer_of(request, identifier)
        want = self._wanted.get(name)
        if output is not None and output.is_ready:
            output.uses.add(request.request_id)
            if want is not None:
                want.is_waiting = False
            return True
        if announced is None:
            return True
        if want is None:
            want = self._wanted[name] = _Want(time.monotonic())
        self._check_wait(identifier, output, want)
        if output is None:
            self._fetch(request, feature, announced, want)
        else:
            output.uses.add(request.request_id)
        return False

    def _check_wait(self, identifier: str, output: Output | None, want: _Want) -> None:
        """Raises KVConnectorError: a request has waited for too long, or would wait for what does not come."""
        if want.failure is not None:
            raise want.failure
        if output is None and want.is_asked:
            raise RemoteError(
                "an encoder's output was evicted to make room for others", output=identifier
            )
        if not want.is_waiting:  # it was there, and the request is to be computed again
            want.since, want.is_waiting = time.monotonic(), True
        if time.monotonic() - want.since > self._wait_s:
            raise TransferTimeoutError(
                "an encoder's output did not arrive in time", output=identifier, wait_s=self._wait_s
            )

    def _offer_of(self, request: Request, identifier: str) -> dict[str, Any] | None:
        """Return the offer of an output that came with a request, which has not given it up."""
        want = self._wanted.get((request.request_id, identifier))
        is_given_up = want is not None and want.is_given_up
        return None if is_given_up else _announced(request, identifier)

    def _fetch(
        self,
        request: Request,
        feature: MultiModalFeatureSpec,
        announced: dict[str, Any],
        want: _Want,
    ) -> None:
        """Begin to fetch an output, if there is room for it. Raises KVConnectorError: it cannot be fetched."""
        identifier = feature.identifier
        shape = _checked_shape(announced, feature.mm_position.get_num_embeds())
        is_its_own = str(announced["remote_request_id"]).startswith(_name_of(identifier, shape))
        # an offer that names its transfer apart is read under that name
        if not is_its_own or "transfer_id" in announced:
            raise RemoteProtocolError(
                "ec_transfer_params have another output's offer for this one, or another shape",
                output=identifier,
                shape=shape,
            )
        num_blocks = self._shape.blocks_for(shape)
        if num_blocks > self._shape.num_blocks:
            raise ConfigError(
                "an encoder's output is larger than the pool: raise ec_cpu_bytes",
                shape=shape,
                blocks=num_blocks,
                pool_blocks=self._shape.num_blocks,
            )
        output = self._outputs.add(identifier, num_blocks, shape)
        if output is None:
            return
        want.is_asked = True
        fetch = f"{request.request_id}-{next(self._numbers)}"
        try:
            self._connector.on_new_request(fetch, announced)
            rows = self._shape.rows_for(shape)
            self._connector.load(fetch, blocks=[output.blocks], num_tokens=rows)
        except KVConnectorError:
            self._connector.finish(fetch)
            self._outputs.drop(identifier)
            raise
        output.uses |= {request.request_id, fetch}
        offer = str(announced["remote_request_id"])
        self._fetches[fetch] = _Fetch(request.request_id, identifier, offer)
        self._pump()

    def _decline_unread(self, request: Request) -> None:
        """Let producers free the outputs that this request was offered and has not asked for, no matter why."""
        params = request.ec_transfer_params
        if self._role == "producer" or not isinstance(params, dict):
            return
        # several completions of a prompt come with one offer, which another one of them may be reading
        read = {fetch.offer for fetch in self._fetches.values()}
        named = [feature.identifier for feature in request.mm_features]
        for identifier in dict.fromkeys([*named, *itertools.islice(params, MAX_DECLINED)]):
            want = self._wanted.pop((request.request_id, identifier), None)
            announced = _announced(request, identifier)
            if announced is None or (want is not None and want.is_asked):
                continue
            if str(announced["remote_request_id"]) not in read:
                self._decline(request, announced)

    def _decline(self, request: Request, announced: dict[str, Any]) -> None:
        declined = f"{request.request_id}-{next(self._numbers)}"
        try:
            self._connector.on_new_request(declined, announced)
            self._connector.load(declined, blocks=[[]], num_tokens=0)
        except KVConnectorError as error:
            logger.warning("an offer of an encoder's output is malformed: %s", error)
        self._connector.finish(declined)

    def _can_encode(
        self, request: Request, feature: MultiModalFeatureSpec, error: KVConnectorError
    ) -> bool:
        """Returns True if the request has what its encoder needs, and then has it encode. Otherwise it is lost."""
        has_input = False
        if feature.data is not None:
            known = self._resolver.fields_for(feature.modality)
            has_input = any(
                each.data is not None for key, each in feature.data.items() if key not in known
            )
        text = "the encoder runs here" if has_input else "the request fails: it has no input"
        logger.warning("request %s: %s; %s", request.request_id, error, text)
        if has_input:
            want = self._wanted[request.request_id, feature.identifier]
            want.is_given_up, want.is_waiting = True, False
        else:
            self.lost.add(request.request_id)
        return has_input

    # -- own outputs --

    def _expect(self, request_id: str, feature: MultiModalFeatureSpec) -> None:
        """Have vLLM's workers save an output once they have it, if there is room."""
        output = self._outputs.get(feature.identifier)
        if output is None:
            width = self._width_of(feature.modality)
            shape = feature.mm_position.get_num_embeds(), width
            num_blocks = self._shape.blocks_for(shape)
            output = (
                self._outputs.add(feature.identifier, num_blocks, shape) if num_blocks else None
            )
            if output is None:
                return
            copy = Copy(next(self._numbers), output.blocks, shape)
            self._saves[feature.identifier] = copy
        output.uses.add(request_id)

    def _width_of(self, modality: str) -> int:
        """Return the width of an encoder's outputs; 0 if vLLM has not measured it, and then none is offered."""
        if modality not in self._widths:
            try:
                self._widths[modality] = get_encoder_output_width(self._vllm_config, modality)
            except ValueError as error:
                logger.warning("no output of %s is offered: %s", modality, error)
                self._widths[modality] = 0
        return self._widths[modality]

    def _offered(self, identifier: str) -> dict[str, Any] | None:
        """Return an offer of an output for one engine; None if it is not in the pool."""
        output = self._outputs.get(identifier)
        if output is None or not output.is_ready:
            return None
        offer = _name_of(identifier, output.shape) + str(next(self._numbers))
        params = self._connector.offer(
            offer, blocks=[output.blocks], num_tokens=self._shape.rows_for(output.shape)
        )
        output.uses.add(offer)
        self._offers[offer] = output
        return {**params, SHAPE: list(output.shape)}

    # -- progress --

    def _pump(self) -> None:
        self._worker.start_step(self._connector.build_step())

    def _progress(self) -> None:
        """Take what has ended since the last call: fetches, offers, and copies of vLLM's workers."""
        self._is_current = True
        self._pump()
        ended = self._worker.poll()
        self._connector.update(ended)
        for offer in ended.finished_sending & self._offers.keys():
            self._offers.pop(offer).uses.discard(offer)
        for fetch in ended.finished_recving & self._fetches.keys():
            self._fetched(fetch, ended.failed_recving.get(fetch))
        for identifier, copy in list(self._saves.items()):
            output = self._outputs.get(identifier)
            if output is not None and self._memory.saved(copy.blocks[0]) == copy.number:
                output.is_ready = True
                del self._saves[identifier]
        executed = self._memory.executed
        while self._leaving and self._leaving[0][0] <= executed:
            _, identifier, output, use = self._leaving.popleft()
            output.uses.discard(use)
            if not output.is_ready and self._is_left(output, identifier):
                # its encoder has not run, and no step can save it any more
                self._saves.pop(identifier, None)
                self._outputs.drop(identifier)

    def _is_left(self, output: Output, identifier: str) -> bool:
        """Returns True if nothing uses an output but requests that wait for it."""
        wants = [self._wanted.get((str(use), identifier)) for use in output.uses]
        return all(want is not None and want.is_waiting for want in wants)

    def _fetched(self, fetch: str, reason: str | None) -> None:
        ended = self._fetches.pop(fetch)
        identifier = ended.identifier
        self._connector.finish(fetch)
        output = self._outputs.get(identifier)
        if output is None:
            raise LocalError("an output was dropped while it was fetched", output=identifier)
        output.uses.discard(fetch)
        if reason is None:
            output.is_ready = True
            return
        self._outputs.drop(identifier)
        want = self._wanted.get((ended.request_id, identifier))
        if want is not None:
            want.failure = RemoteError(f"an encoder's output was not loaded: {reason}")


def _name_of(identifier: str, shape: tuple[int, int]) -> str:
    """Return how the names of an output's offers begin, so that none is taken for another output's or another shape's:
    its producer knows it by this name only. The consumer cannot tell how wide an output must be, and its model would
    end the engine over another width.
    """
    digest = hashlib.sha256(identifier.encode()).hexdigest()[:32]
    return f"{digest}-{shape[0]}x{shape[1]}-"


def _announced(request: Request, identifier: str) -> dict[str, Any] | None:
    """Return the offer of an output that came with a request, whose sender may have written anything."""
    params = request.ec_transfer_params
    found = params.get(identifier) if isinstance(params, dict) else None
    return found if isinstance(found, dict) and "remote_request_id" in found else None


def _checked_shape(announced: dict[str, Any], num_embeddings: int) -> tuple[int, int]:
    """Return an output's shape. The prompt says how many embeddings it has, the producer how wide they are.

    Raises:
        RemoteProtocolError: they are not two such numbers.
    """
    shape = announced.get(SHAPE)
    try:
        embeddings, width = msgspec.convert(shape, tuple[int, PositiveCount])
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(
            "an offer does not state the shape of its output", shape=shape
        ) from error
    if embeddings != num_embeddings or not embeddings:
        raise RemoteProtocolError(
            "an offer has a different number of embeddings than the prompt",
            offered=embeddings,
            prompt=num_embeddings,
        )
    return embeddings, width
