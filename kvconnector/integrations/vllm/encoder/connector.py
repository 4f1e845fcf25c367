"""vLLM's interface to both halves of `EncoderConnector`, and the half of its workers, which copies."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from kvconnector.errors import LocalError
from kvconnector.folded_log import FoldedLog
from kvconnector.integrations.vllm import check_version
from kvconnector.integrations.vllm.connector import share_vllm_handlers
from kvconnector.integrations.vllm.encoder.pool import EncoderMemory
from kvconnector.integrations.vllm.encoder.scheduler import EncoderScheduler, EncoderStep

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


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
            raise LocalError("a connector with the role of a worker has no scheduler half")
        return self._scheduler_half

    @property
    def _copies(self) -> EncoderCopies:
        if self._copies_half is None:
            raise LocalError("a connector with the role of a scheduler has no worker half")
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

    def update_state_after_free(self, request: Request, index: int) -> None:
        self._scheduler.release(request, index)

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
        self._device = vllm_config.device_config.device_type
        """Without a number it is the one that vLLM has chosen for this process."""
        self._memory: EncoderMemory | None = None
        self._refused = FoldedLog(logger)

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
            # every step repeats the order, for as long as a request needs the output
            self._refused.warn(
                f"width {output.shape[-1]}",
                f"the output {identifier} is not offered: its shape is {tuple(output.shape)}, and not {copy.shape} as"
                " vLLM measured at the start",
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
                    cache[identifier] = self._opened(step).load(
                        copy.blocks, copy.shape, self._device
                    )

    def end(self, step: EncoderStep) -> None:
        """Report that a step's copies are done."""
        if self._rank < step.pool.num_ranks:
            self._opened(step).report_step(self._rank, step.number)

    def close(self) -> None:
        """Forget the pool."""
        if self._memory is not None:
            self._memory.close()
