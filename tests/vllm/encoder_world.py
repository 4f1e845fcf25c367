"""Engines of vLLM's real scheduler with our encoder connector. Their encoder makes an output of its identifier."""

from __future__ import annotations

import time
import zlib
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin as Mixin

from kvconnector.integrations.vllm.encoder import EncoderConnector
from kvconnector.integrations.vllm.messages import GroupInfo
from tests.vllm.cache_world import SIZE as BLOCK_SIZE
from tests.vllm.cache_world import attention
from tests.vllm.harness.encoder import HIDDEN, IMAGE_TOKENS
from tests.vllm.scheduler_world import cache_config, handshake

TIMEOUT_S = 30.0


def transfer(role, engine_id="e", **extra):
    return ECTransferConfig(
        ec_connector="EncoderConnector",
        ec_connector_module_path="kvconnector.integrations.vllm.encoder",
        ec_role=role,
        engine_id=engine_id,
        ec_connector_extra_config={"ec_cpu_bytes": 1 << 20, **extra},
    )


def vllm_config(model, role, engine_id="e", *, kv_role=None, **extra):
    """`kv_role`: the engine also has our connector of KV caches."""
    caches = {
        "kv_connector": "KVConnector",
        "kv_connector_module_path": "kvconnector.integrations.vllm",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
        "engine_id": "e",
    }
    config = EngineArgs(
        kv_transfer_config=caches if kv_role else None,
        model=model,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=8,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=64 << 20,
        ec_transfer_config=transfer(role, engine_id, **extra),
    ).create_engine_config()
    config.scheduler_config.async_scheduling = False
    return config


def encoded(identifier, embeddings, width):
    """Return what the encoder makes of an image."""
    source = torch.Generator().manual_seed(zlib.crc32(identifier.encode()))
    return torch.randn(embeddings, width, generator=source)


def feature(identifier, embeddings=IMAGE_TOKENS, offset=0, *, has_media=True):
    data = None
    if has_media:
        pixels = MultiModalFieldElem(data=torch.zeros(3), field=MultiModalBatchedField())
        data = MultiModalKwargsItem({"pixel_values": pixels})
    return MultiModalFeatureSpec(
        data=data,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=embeddings),
        mm_hash=identifier,
    )


class Engine:
    """An engine without a model: it encodes what its scheduler says, and samples token 7 after each prompt.

    `encodes` are the identifiers that it has encoded, `errors` the requests that failed.
    """

    def __init__(self, model, role, engine_id, width=HIDDEN, **extra):
        config = vllm_config(model, role, engine_id, **extra)
        config.ec_transfer_config.mm_encoder_output_widths = {"image": width}
        caches = cache_config([attention()])
        config.cache_config.num_gpu_blocks = caches.num_blocks
        size, hash_size = kv_cache_utils.resolve_kv_cache_block_sizes(caches, config)
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(hash_size, sha256)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
            hash_block_size=hash_size,
            log_stats=True,
        )
        if config.kv_transfer_config:
            infos = (GroupInfo(vllm_group=0, kernel_blocks=1),)
            shake = handshake(infos, role=config.kv_transfer_config.kv_role)
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): shake})
        self.connector = self.scheduler.ec_connector
        self._worker = EncoderConnector(config, ECConnectorRole.WORKER)
        self._width, self._count = width, 0
        self.cache, self.encodes, self.errors, self.params = {}, [], [], {}
        self.kv_params = {}

    @property
    def half(self):
        return self.connector._scheduler

    def add(self, *features, params=None, kv_params=None, tokens=None, max_tokens=1):
        """Queue a request whose prompt begins with these images. Returns its id."""
        self._count += 1
        request_id = f"{self._count}"
        stop = max(each.mm_position.offset + each.mm_position.length for each in features)
        extra = {"ec_transfer_params": params, "kv_transfer_params": kv_params}
        extra = {name: each for name, each in extra.items() if each is not None}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        ids = [0] * stop + [(500 * self._count + each) % 997 for each in range(tokens or 5)]
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=ids,
                sampling_params=sampling,
                pooling_params=None,
                mm_features=list(features),
                block_hasher=self._hasher,
            )
        )
        return request_id

    def abort(self, request_id):
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self, *, encodes=True, **reports):
        """Take a step as vLLM's runner does. Returns the plan. A step without tokens does not reach the workers.
        `reports`: what workers report of KV caches.
        """
        planned = self.scheduler.schedule()
        if planned.total_num_scheduled_tokens:
            with (
                patch.object(ec_transfer_state, "_EC_CONNECTOR_AGENT", self._worker),
                Mixin.maybe_get_ec_connector_output(planned, self.cache),
            ):
                for request_id, indices in planned.scheduled_encoder_inputs.items():
                    for index in indices if encodes else ():
                        self._encode(self.scheduler.requests[request_id].mm_features[index])
        requests = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={each: index for index, each in enumerate(requests)},
            sampled_token_ids=[[7] if self._has_prompt(each) else [] for each in requests],
            kv_connector_output=KVConnectorOutput(**reports) if reports else None,
        )
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for each in outputs.outputs:
                if str(each.finish_reason) == "error":
                    self.errors.append(each.request_id)
                if each.finish_reason is not None:
                    self.params[each.request_id] = each.ec_transfer_params
                    self.kv_params[each.request_id] = each.kv_transfer_params
        for hash_ in planned.free_encoder_mm_hashes:
            self.cache.pop(hash_, None)
        return planned

    def _encode(self, item):
        embeddings = item.mm_position.get_num_embeds()
        self.cache[item.identifier] = encoded(item.identifier, embeddings, self._width)
        self.encodes.append(item.identifier)
        Mixin.maybe_save_ec_to_connector(self.cache, item.identifier)

    def _has_prompt(self, request_id):
        request = self.scheduler.requests[request_id]
        return request.num_computed_tokens >= request.num_prompt_tokens

    def close(self):
        if self.scheduler.connector is not None:
            self.scheduler.connector.shutdown()
        self.connector.shutdown()
        self._worker.shutdown()


def run(engines, until):
    """Take steps of all engines until a condition holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not until():
        assert time.monotonic() < deadline, "it takes too long"
        for engine in engines:
            engine.step()
        time.sleep(0.001)
