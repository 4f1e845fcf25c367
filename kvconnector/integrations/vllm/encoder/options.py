"""The settings of `EncoderConnector` from vLLM's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvconnector.config import ConnectorConfig, Role
from kvconnector.integrations.vllm.settings import PositiveSeconds, config_of, take

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROLES: Mapping[str, Role] = {
    "ec_producer": "producer",
    "ec_consumer": "consumer",
    "ec_both": "both",
}
VARIABLES = "VLLM_EC_SIDE_CHANNEL_HOST", "VLLM_EC_SIDE_CHANNEL_PORT"
OF_CACHES = ("KVCONNECTOR_ENGINE_ID", "KVCONNECTOR_ROLE", "KVCONNECTOR_CONTROL_PORT")
"""Settings in the environment that are for the engine's other connector, of KV caches."""
POOL_BYTES, WAIT_S = 1 << 30, 60.0
"""Defaults of `ec_cpu_bytes`, and of `wait_s`, for which a request waits for one output."""
LEASE = {"duration_s": 120.0, "reclaim_above": 0.5}
"""An engine asks for an output when it is about to compute a request, however long its queue is. No request says
whether its outputs will be asked for at all, so all are offered, and offers that nobody reads must not fill the pool.
"""
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]


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
        """Read `ec_transfer_config` and the environment. Settings that only one of an engine's two connectors can have
        are not taken from `KVCONNECTOR_*`.

        Raises:
            ConfigError: an option is unknown or malformed.
        """
        environ = os.environ if environ is None else environ
        transfer, where = vllm_config.ec_transfer_config, "ec_connector_extra_config"
        options = dict(transfer.ec_connector_extra_config)
        pool_bytes = take(options, "ec_cpu_bytes", PositiveCount, POOL_BYTES, where)
        wait_s = take(options, "wait_s", PositiveSeconds, WAIT_S, where)
        name = take(options, "model_name", str, str(vllm_config.model_config.model), where)
        config = config_of(
            vllm_config,
            options,
            {name: each for name, each in environ.items() if name not in OF_CACHES},
            engine_id=transfer.engine_id,
            role=ROLES[transfer.ec_role],
            lease=LEASE,
            variables=VARIABLES,
            where=where,
        )
        return cls(config, pool_bytes, wait_s, f"{name} encoder")
