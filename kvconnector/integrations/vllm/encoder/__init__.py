"""`EncoderConnector`: an encoder's outputs, moved from engines that encode to engines that prefill.

    {"ec_connector": "EncoderConnector", "ec_connector_module_path": "kvconnector.integrations.vllm.encoder",
     "ec_role": "ec_producer", "ec_connector_extra_config": {"ec_cpu_bytes": 1073741824}}

vLLM's scheduler asks for everything, in its own thread: `ensure_cache_available` begins to fetch an output and has the
request wait until it is there, `request_finished` offers outputs to others. Its process also runs the worker that moves
them, whose thread goes on while the engine is idle. vLLM's workers only copy between the shared pool and their own
encoder caches, within a step. Nothing here blocks except these copies.

A router passes `ec_transfer_params` on as it does for vLLM's own connectors. Each entry has the address of an offer,
which one engine may read once, within its lease.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import vllm
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from kvconnector.config import ConnectorConfig, Role, is_loopback
from kvconnector.errors import (
    ConfigError,
    KVConnectorError,
    LocalError,
    MemoryInUseError,
    RemoteError,
    RemoteProtocolError,
    TransferTimeoutError,
)
from kvconnector.integrations.vllm import check_version
from kvconnector.integrations.vllm.connector import share_vllm_handlers
from kvconnector.integrations.vllm.encoder_pool import EncoderMemory, Output, Outputs, PoolShape
from kvconnector.integrations.vllm.settings import (
    PositiveSeconds,
    names_no_keys,
    of_rank,
    port_of,
    take,
)
from kvconnector.runtime import Scheduler, Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
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

ROLES: Mapping[str, Role] = {
    "ec_producer": "producer",
    "ec_consumer": "consumer",
    "ec_both": "both",
}
HOST_VARIABLE, PORT_VARIABLE = "VLLM_EC_SIDE_CHANNEL_HOST", "VLLM_EC_SIDE_CHANNEL_PORT"
OF_CACHES = ("KVCONNECTOR_ENGINE_ID", "KVCONNECTOR_ROLE", "KVCONNECTOR_CONTROL_PORT")
"""Settings in the environment that are for the engine's other connector, of KV caches."""
POOL_BYTES, WAIT_S = 1 << 30, 60.0
"""Defaults of `ec_cpu_bytes`, and of `wait_s`, for which a request waits for one output."""
LEASE = {"duration_s": 120.0, "reclaim_above": 0.5}
"""An engine asks for an output when it is about to compute a request, however long its queue is. No request says
whether its outputs will be asked for at all, so all are offered, and offers that nobody reads must not fill the pool.
"""
SHAPE = "shape"
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
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


class EncoderConnector(ECConnectorBase):
    """vLLM's interface to both halves, of which each process has one."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        check_version(str(vllm.__version__), "ENCODER")
        share_vllm_handlers()
        is_scheduler = role is ECConnectorRole.SCHEDULER
        self._scheduler_half = EncoderScheduler(vllm_config) if is_scheduler else None
        self._copies_half = None if is_scheduler else EncoderCopies(vllm_config)

    @property
    def _scheduler(self) -> EncoderScheduler:
        if self._scheduler_half is None:
            raise LocalError("a worker's connector has no scheduler half")
        return self._scheduler_half

    @property
    def _copies(self) -> EncoderCopies:
        if self._copies_half is None:
            raise LocalError("a scheduler's connector has no worker half")
        return self._copies_half

    # -- worker --

    def start_save_caches(self, **kwargs: Any) -> None:
        """Save what vLLM's cache has from earlier steps."""
        cache, step = kwargs["encoder_cache"], self._get_connector_metadata()
        for identifier in step.saves.keys() & cache.keys():
            self._copies.save(step, identifier, cache[identifier])

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        self._copies.save(self._get_connector_metadata(), mm_hash, encoder_cache[mm_hash])

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self._copies.load(self._get_connector_metadata(), encoder_cache)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """End a step: no request waits for this connector's own reports."""
        if self._copies_half is not None:
            self._copies_half.end(self._get_connector_metadata())
        return None, None

    # -- scheduler --

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.has(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self._scheduler.admit(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        found, self._scheduler.lost = self._scheduler.lost, set()
        return found

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._scheduler.load(request, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EncoderStep:
        return self._scheduler.build_step(scheduler_output.total_num_scheduled_tokens)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finish(request)

    def shutdown(self) -> None:
        for half in (self._scheduler_half, self._copies_half):
            if half is not None:
                half.close()


class EncoderCopies:
    """The worker half: copies between the pool and vLLM's encoder cache."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._dtype = vllm_config.model_config.dtype
        self._rank = vllm_config.parallel_config.rank
        self._memory: EncoderMemory | None = None

    def _opened(self, step: EncoderStep) -> EncoderMemory:
        if self._memory is None:
            self._memory = EncoderMemory.open(step.path, step.pool, self._dtype)
        return self._memory

    def save(self, step: EncoderStep, identifier: str, output: torch.Tensor) -> None:
        """Copy an output into the pool, on the first rank: all of them have the same."""
        copy = step.saves.get(identifier)
        if copy is None or self._rank:
            return
        if tuple(output.shape) != copy.shape:
            logger.error(
                "the output %s is not offered: its shape is %s, and not %s as vLLM measured at the start",
                identifier,
                tuple(output.shape),
                copy.shape,
            )
            return
        memory = self._opened(step)
        # a later step repeats the order until the scheduler has seen the report
        if memory.saved(copy.blocks[0]) != copy.number:
            with gpu_sync_allowed():
                memory.save(copy.blocks, output)
            memory.report_saved(copy.blocks[0], copy.number)

    def load(self, step: EncoderStep, cache: dict[str, torch.Tensor]) -> None:
        """Copy outputs from the pool into vLLM's encoder cache."""
        for identifier, copy in step.loads.items():
            if identifier not in cache:
                with gpu_sync_allowed():
                    cache[identifier] = self._opened(step).load(copy.blocks, copy.shape, _device())

    def end(self, step: EncoderStep) -> None:
        """Report that a step's copies are done."""
        if self._rank < step.pool.num_ranks:
            self._opened(step).report_step(self._rank, step.number)

    def close(self) -> None:
        """Forget the pool."""
        if self._memory is not None:
            self._memory.close()


@dataclass
class _Want:
    """An output that a request needs and another engine has. It is asked for once, or declined."""

    since: float
    is_asked: bool = False
    failure: KVConnectorError | None = None


class EncoderScheduler:
    """The scheduler half, and the worker that moves outputs. All methods are for the scheduler's thread.

    An output is used by requests that wait for it, by the fetch that brings it, by offers of it, and by the step in
    which vLLM's workers copy it; then it is only kept until others need the room.

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
        self._fetches: dict[str, tuple[str, str]] = {}
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
                if self._role == "producer" or _announced(request, feature.identifier) is None:
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
            want = self._wanted.pop((request.request_id, identifier), None)
            if want is None or not want.is_asked:
                self._decline(request, identifier)
            output = self._outputs.get(identifier)
            if output is not None and identifier in self._saves:
                # a step that saves it may be on the way
                self._leaving.append((self._last_sent, identifier, output, request.request_id))
            elif output is not None:
                output.uses.discard(request.request_id)
        self._pump()
        return items or None

    def close(self) -> None:
        """End all transfers, and free the pool."""
        self._connector.close()
        try:
            self._worker.close()
        except MemoryInUseError as error:
            logger.warning("the memory of encoders' outputs stays mapped: %s", error)
        self._memory.close()

    # -- outputs of other engines --

    def _is_there(self, request: Request, feature: MultiModalFeatureSpec) -> bool:
        """Returns True if an output is here, or is nowhere else either. Begins to fetch it if nothing does.

        Raises:
            KVConnectorError: it cannot be had.
        """
        identifier, name = feature.identifier, (request.request_id, feature.identifier)
        output = self._outputs.get(identifier)
        announced = _announced(request, identifier)
        if output is not None and output.is_ready:
            output.uses.add(request.request_id)
            return True
        if announced is None:
            return True
        want = self._wanted.setdefault(name, _Want(time.monotonic()))
        if want.failure is not None:
            raise want.failure
        if time.monotonic() - want.since > self._wait_s:
            raise TransferTimeoutError(
                "an encoder's output did not come in time", output=identifier, wait_s=self._wait_s
            )
        if output is None and not want.is_asked:
            self._fetch(request, feature, announced, want)
        elif output is not None:
            output.uses.add(request.request_id)
        return False

    def _fetch(
        self,
        request: Request,
        feature: MultiModalFeatureSpec,
        announced: dict[str, Any],
        want: _Want,
    ) -> None:
        """Begin to fetch an output, unless others leave no room yet. Raises KVConnectorError: it cannot be had."""
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
        self._fetches[fetch] = request.request_id, identifier
        self._pump()

    def _decline(self, request: Request, identifier: str) -> None:
        """Let a producer free an output that this request was offered and has not read."""
        announced = _announced(request, identifier)
        if announced is None or self._role == "producer":
            return
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
            params = dict(request.ec_transfer_params)
            del params[feature.identifier]
            request.ec_transfer_params = params
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
            if not output.is_ready and not output.uses and self._outputs.get(identifier) is output:
                # its encoder has not run, and no step can save it any more
                self._saves.pop(identifier, None)
                self._outputs.drop(identifier)

    def _fetched(self, fetch: str, reason: str | None) -> None:
        request_id, identifier = self._fetches.pop(fetch)
        self._connector.finish(fetch)
        output = self._outputs.get(identifier)
        if output is None:
            raise LocalError("an output was dropped while it was fetched", output=identifier)
        output.uses.discard(fetch)
        if reason is None:
            output.is_ready = True
            return
        self._outputs.drop(identifier)
        want = self._wanted.get((request_id, identifier))
        if want is not None:
            want.failure = RemoteError(f"an encoder's output was not loaded: {reason}")


@dataclass(frozen=True)
class EncoderOptions:
    """The settings of `ec_transfer_config`."""

    config: ConnectorConfig
    pool_bytes: int
    wait_s: float
    model_name: str

    @classmethod
    def of(
        cls, vllm_config: VllmConfig, environ: Mapping[str, str] | None = None
    ) -> EncoderOptions:
        """Read `ec_transfer_config` and the environment, as `Settings.of` reads those of KV caches. Settings that only
        one of an engine's two connectors can have are not taken from `KVCONNECTOR_*`.

        Raises:
            ConfigError: an option is unknown or malformed.
        """
        environ = os.environ if environ is None else environ
        environ = {name: each for name, each in environ.items() if name not in OF_CACHES}
        transfer = vllm_config.ec_transfer_config
        options = dict(transfer.ec_connector_extra_config)
        where = "ec_connector_extra_config"
        pool_bytes = take(options, "ec_cpu_bytes", PositiveCount, POOL_BYTES, where)
        wait_s = take(options, "wait_s", PositiveSeconds, WAIT_S, where)
        name = take(options, "model_name", str, str(vllm_config.model_config.model), where)
        lease = {**LEASE, **take(options, "lease", dict, {}, where)}
        control = dict(take(options, "control", dict, {}, where))
        control.setdefault("host", environ.get(HOST_VARIABLE, "localhost"))
        if PORT_VARIABLE in environ:
            control.setdefault("port", port_of(environ, PORT_VARIABLE))
        if names_no_keys(control, environ) and is_loopback(control["host"]):
            control.setdefault("insecure", True)
        base = {
            "engine_id": transfer.engine_id,
            "role": ROLES[transfer.ec_role],
            **options,
            "lease": lease,
            "control": control,
        }
        config = ConnectorConfig.from_env(environ, base)
        index = vllm_config.parallel_config.data_parallel_index
        return cls(of_rank(config, index), pool_bytes, wait_s, f"{name} encoder")


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
        raise RemoteProtocolError("an offer has no shape of its output", shape=shape) from error
    if embeddings != num_embeddings or not embeddings:
        raise RemoteProtocolError(
            "an offer has another number of embeddings than the prompt",
            offered=embeddings,
            prompt=num_embeddings,
        )
    return embeddings, width


def _device() -> str:
    """Return the device of this process's rank."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    return (
        f"{kind}:{current_platform.current_device()}" if current_platform.is_cuda_alike() else kind
    )
