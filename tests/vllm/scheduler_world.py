"""vLLM's real scheduler with our connector in it; tests say what the workers report."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import base, multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvconnector.ids import new_incarnation
from kvconnector.integrations.vllm.messages import ConnectorStep, Handshake, HandshakeMetadata
from kvconnector.runtime import WorkerMetadata
from kvconnector.session import orders
from kvconnector.topology import GroupGeometry, ModelDescription, PartGeometry, RankGeometry
from tests.vllm.cache_world import DIM, HEADS
from tests.vllm.cache_world import SIZE as BLOCK_SIZE

NUM_BLOCKS = 64
LAYERS = 4
SECRET = "5" * 32
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
TRANSFER = {"transfer_id": "t", "transfer_secret": SECRET}
ADDRESS = {"remote_engine_id": "p", "remote_host": "127.0.0.1", "remote_port": 9}
FOLLOWED = {"do_remote_prefill": True, **ADDRESS, **TRANSFER}
"""Parameters that a router which has named a transfer sends a decode engine while the prompt is computed."""


def offer(num_tokens, **changes):
    """Return a producer's parameters as a router passes them on."""
    blocks = -(-num_tokens // BLOCK_SIZE)
    return {
        "do_remote_prefill": True,
        "remote_request_id": "there",
        "remote_block_ids": [list(range(1, blocks + 1))],
        **ADDRESS,
        "remote_num_tokens": num_tokens,
        "transfer_secret": SECRET,
        **changes,
    }


def vllm_config(
    model,
    role="kv_consumer",
    *,
    policy="recompute",
    beside="",
    is_first=False,
    is_ranged=False,
    engine=None,
    **extra,
):
    """Return the configuration that `vllm serve` would make of these arguments. `beside`: the connector before ours in
    a `MultiConnector`, or after it if ours `is_first`. `is_ranged`: the `MultiConnector` is ours, too.
    """
    transfer = {
        "kv_connector": "KVConnector",
        "kv_connector_module_path": "kvconnector.integrations.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
    if beside:
        other = {
            "kv_connector": beside,
            "kv_connector_module_path": __name__ if beside == "KeepingConnector" else None,
            "kv_role": role,
            "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
        }
        connectors = [transfer, other] if is_first else [other, transfer]
        children = {"kv_connector_extra_config": {"connectors": connectors}}
        transfer = {"kv_connector": "MultiConnector", "kv_role": role, **children}
        if is_ranged:
            transfer["kv_connector_module_path"] = "kvconnector.integrations.vllm"
    arguments = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": 64 << 20,
        "kv_transfer_config": {**transfer, "engine_id": "e", "kv_load_failure_policy": policy},
        **(engine or {}),
    }
    return EngineArgs(model=model, **arguments).create_engine_config()


def state_spec(**options):
    """Return a recurrent layer's spec, with pages as large as the attention's."""
    shapes = ((2 * BLOCK_SIZE * HEADS * DIM,),)
    defaults = {"block_size": 1024, "shapes": shapes, "dtypes": (torch.float32,)}
    return kv_cache_interface.MambaSpec(**{**defaults, **options})


def cache_config(specs):
    groups = [
        kv_cache_interface.KVCacheGroupSpec(
            layer_names=[f"model.layers.{LAYERS * number + layer}.attn" for layer in range(LAYERS)],
            kv_cache_spec=spec,
        )
        for number, spec in enumerate(specs)
    ]
    return kv_cache_interface.KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups
    )


def handshake(infos, pp_rank=0, tp_rank=0, role="kv_consumer"):
    heads = {"total_heads": HEADS, "head_start": 0, "head_stop": HEADS}
    parts = tuple(PartGeometry(name=n, head_dim=DIM, item_size_bytes=4, **heads) for n in "kv")
    groups = tuple(
        GroupGeometry(
            block_size=1 if info.keeps == "state" else BLOCK_SIZE // info.kernel_blocks,
            layers=tuple(range(LAYERS * number, LAYERS * number + LAYERS)),
            parts=parts,
        )
        for number, info in enumerate(infos)
    )
    return HandshakeMetadata.of(
        Handshake(
            worker=WorkerMetadata(
                engine_id="e",
                geometry=RankGeometry(pp_rank=pp_rank, tp_rank=tp_rank, groups=groups),
                model=ModelDescription(model="m", dtype="float32", num_layers=LAYERS * len(infos)),
                control_address="tcp://127.0.0.1:7",
                public_key="",
                incarnation=new_incarnation(),
                role=role.removeprefix("kv_"),
                num_blocks=tuple(NUM_BLOCKS * info.kernel_blocks for info in infos),
            ),
            groups=infos,
        )
    )


class News:
    """A step's orders by kind."""

    def __init__(self, step):
        def of(kind):
            return [order for order in step.orders if isinstance(order, kind)]

        self.holds, self.wants = of(orders.LeaseOrder), of(orders.WantRequest)
        self.loads = of(orders.LoadRequest)
        self.withdrawn = [order.request_id for order in of(orders.WithdrawRequest)]
        self.dropped = [order.request_id for order in of(orders.DropRequest)]


class KeepingConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """A child of a `MultiConnector` that keeps every finished request's blocks, as if it saved them, until
    `finished_sending` names the request. It has the first `loads` tokens of each prompt, and no recurrent state.
    """

    loads = 0
    is_async = True
    results = base.KVConnectorTransferResults()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        tokens = max(0, self.loads - num_computed_tokens)
        return tokens, tokens > 0 and self.is_async

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        """Do nothing."""

    def get_transfer_results(self, finished_req_ids):
        results, self.results = self.results, base.KVConnectorTransferResults()
        return results

    def build_connector_meta(self, scheduler_output):
        return base.KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return True, None


# the rest of the interface is for workers, of which there are none
KeepingConnector.__abstractmethods__ = frozenset()


OF_REQUEST = {
    "abort_immediately",
    "cache_salt",
    "lora_request",
    "mm_features",
    "resumable",
    "trace_headers",
}
"""Arguments of vLLM's `Request` that tests give."""


class World:
    """An engine without a model: every scheduled request whose prompt is complete samples token 7, after its draft
    tokens, which are all accepted.
    """

    def __init__(self, config, kv_caches, handshakes, *, is_async=False):
        block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(kv_caches, config)
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(hash_block_size, sha256)
        config.cache_config.num_gpu_blocks = kv_caches.num_blocks
        config.scheduler_config.async_scheduling = is_async
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.handshakes = handshakes
        self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self._count = 0

    def add(self, num_tokens, params=None, prompt=None, trace_headers=None, forms=None, **sampling):
        """Queue a request. Requests with one `prompt` number share their tokens. `forms`: the prompt as vLLM's
        `Request` takes it.
        """
        return self.add_with(
            num_tokens, params or None, prompt, trace_headers=trace_headers, forms=forms, **sampling
        )

    def add_with(self, num_tokens, params, prompt=None, *, forms=None, **options):
        """Queue a request with any object as parameters. `options` are those of `SamplingParams` or of `Request`."""
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = {"max_tokens": 4, "ignore_eos": True, "extra_args": extra, **options}
        own = {name: sampling.pop(name) for name in OF_REQUEST.intersection(sampling)}
        self._count += 1
        tokens = [(500 * (prompt or self._count) + i) % 997 for i in range(num_tokens)]
        request = Request(
            request_id=f"r{self._count}",
            sampling_params=SamplingParams(**sampling),
            pooling_params=None,
            block_hasher=self._hasher,
            **own,
            **(forms or {"prompt_token_ids": tokens}),
        )
        self.scheduler.add_request(request)
        return request

    def part_of(self, request, tokens, *, resumable):
        """Return the next part of a prompt that comes in parts; its end if it is not `resumable`."""
        return Request(
            request_id=request.request_id,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
            pooling_params=None,
            resumable=resumable,
        )

    def abort(self, request_id):
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self, **finished):
        """Take a step in which the workers report `finished`. Returns their orders and the requests' outputs."""
        planned = self.scheduler.schedule()
        return self.news(planned), self.complete(planned, **finished)

    def news(self, planned):
        step = planned.kv_connector_metadata
        # each child of a MultiConnector has its own
        children = getattr(step, "metadata", [step])
        (ours,) = (child for child in children if isinstance(child, ConnectorStep))
        return News(ours.decode())

    def complete(self, planned, reported=None, **finished):
        """End a planned step, whose workers' aggregated output is `reported`, or who report `finished`. Returns the
        requests' outputs.
        """
        if finished:
            reported = KVConnectorOutput(**finished)
        requests = list(planned.num_scheduled_tokens)
        drafts = planned.scheduled_spec_decode_tokens
        sampled = [
            [*drafts.get(request, ()), 7] if self._has_prompt(request) else []
            for request in requests
        ]
        output = ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: index for index, request in enumerate(requests)},
            sampled_token_ids=sampled,
            kv_connector_output=reported,
        )
        results = self.scheduler.update_from_output(planned, output)
        return [result for outputs in results.values() for result in outputs.outputs]

    def _has_prompt(self, request_id):
        request = self.scheduler.requests.get(request_id)
        return request is not None and request.num_computed_tokens >= request.num_prompt_tokens

    @property
    def used_blocks(self):
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def close(self):
        self.connector.shutdown()


class TierStep:
    """A step of an engine beside vLLM's `OffloadingConnector`, whose workers carry out their orders. `news`: our
    orders; `tier`: the tier's loads; `extra`: the number of children that a worker waits for besides the last one, by
    request; `outputs`: the requests' outputs.
    """

    def __init__(self, engine, report=None, **finished):
        planned = engine.scheduler.schedule()
        metadata = planned.kv_connector_metadata
        tier = metadata.metadata[0]
        jobs = OffloadingWorkerMetadata(dict.fromkeys([*tier.store_jobs, *tier.load_jobs], 1))
        done = multi_connector.MultiKVConnectorWorkerMetadata((jobs, report))
        self.news, self.tier = engine.news(planned), list(tier.load_jobs.values())
        self.extra = getattr(metadata, "extra_async_loads", {})
        self.computed = planned.num_scheduled_tokens
        self.outputs = engine.complete(planned, kv_connector_worker_meta=done, **finished)
