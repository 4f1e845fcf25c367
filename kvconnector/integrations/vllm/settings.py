"""kvconnector's settings from vLLM's configuration."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from kvconnector.config import ConnectorConfig, Role, is_loopback
from kvconnector.errors import ConfigError
from kvconnector.ids import MAX_PORT
from kvconnector.integrations.model_values import (
    config_fields,
    longrope_length,
    position_encodings,
    revision_of,
)
from kvconnector.topology import ModelDescription

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROLES: Mapping[str, Role] = {
    "kv_producer": "producer",
    "kv_consumer": "consumer",
    "kv_both": "both",
}
HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
OWN_IDS_VARIABLE = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
SNAPSHOT_SERVER = "vllm.snapshot.server"
"""What `vllm snapshot create` runs. Its engine's process has the same main module, however it was started."""
RANK_SUFFIX = re.compile(r"_dp[0-9]+\Z")
"""Ends the id of an engine's data-parallel rank."""

FirstTokenPolicy = Literal["auto", "always", "never"]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]

# options of NixlConnector that KVConnector ignores, so that deployments need not remove them
IGNORED_OPTIONS = frozenset(
    {
        "backends",
        "num_threads",
        "enforce_handshake_compat",
        "push_registration_timeout",
        "engine_ttl",
    }
)


SAME_TYPES: Mapping[str, str] = {"fp8_e4m3": "fp8"}
"""Names of vLLM's for a cache's type, and another one of the same type."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A `ConnectorConfig`, and the integration's own settings, by the names of NixlConnector's options."""

    config: ConnectorConfig
    bidirectional_kv_xfer: bool
    """True if a decode engine keeps a finished request's blocks for the prefill of the conversation's next turn."""
    kv_recompute_threshold: int
    """A prefill engine computes tokens itself if it could read fewer than this from a decode engine."""
    decoder_kv_blocks_ttl_s: float
    """Seconds for which a decode engine keeps the blocks of a finished request for the next turn."""
    first_token: FirstTokenPolicy
    """When a decode engine emits the token that the prefill engine sampled. "always" includes models with sliding
    windows or recurrent states, whose prompts the prefill engine then computes to the end.
    """
    model_name: str
    """The name that peers compare instead of vLLM's model name, which may be a path that differs between hosts."""

    @classmethod
    def of(cls, vllm_config: VllmConfig, environ: Mapping[str, str] | None = None) -> Settings:
        """Read `kv_transfer_config`, its extra options, and the environment, whose `KVCONNECTOR_*` override the others.
        Raises ConfigError: an option is unknown or malformed, or contradicts another one.
        """
        environ = os.environ if environ is None else environ
        transfer = vllm_config.kv_transfer_config
        options = {
            name: value
            for name, value in transfer.kv_connector_extra_config.items()
            if name not in IGNORED_OPTIONS
        }
        bidirectional = take(options, "bidirectional_kv_xfer", bool, False)
        threshold = take(options, "kv_recompute_threshold", int, 64)
        decoder_ttl_s = take(options, "decoder_kv_blocks_ttl", PositiveSeconds, 480.0)
        first_token = take(options, "first_token", FirstTokenPolicy, "auto")
        name = take(options, "model_name", str, str(vllm_config.model_config.model))
        lease: dict[str, float] = {}
        if "kv_lease_duration" in options:
            lease["duration_s"] = take(options, "kv_lease_duration", PositiveSeconds, 0.0)
        role = options.pop("role", ROLES[transfer.kv_role])
        config = config_of(
            vllm_config,
            options,
            environ,
            engine_id=transfer.engine_id,
            role="both" if bidirectional else role,
            lease=lease,
            variables=(HOST_VARIABLE, PORT_VARIABLE),
        )
        return cls(config, bidirectional, threshold, decoder_ttl_s, first_token, name)


def config_of(
    vllm_config: VllmConfig,
    options: dict[str, Any],
    environ: Mapping[str, str],
    *,
    engine_id: str,
    role: Role,
    lease: Mapping[str, Any],
    variables: tuple[str, str],
    where: str = "kv_connector_extra_config",
) -> ConnectorConfig:
    """Return kvconnector's own settings for one of vLLM's connectors, as this data-parallel rank has them.

    Args:
        vllm_config: Has the rank's index.
        options: What the connector's extra options say besides the integration's own ones.
        environ: Its `KVCONNECTOR_*` override the options.
        engine_id: The engine's name, unless the options have another one.
        role: What the engine does, unless the options say otherwise.
        lease: What holds where the options of a lease say nothing.
        variables: The names of vLLM's variables for the host and the port at which peers find the connector.
        where: How messages name the options.

    Raises:
        ConfigError: an option is unknown or malformed, or contradicts another one.
    """
    host, port = variables
    lease = {**lease, **take(options, "lease", dict, {}, where)}
    control = dict(take(options, "control", dict, {}, where))
    control.setdefault("host", environ.get(host, "localhost"))
    if port in environ:
        control.setdefault("port", port_of(environ, port))
    if names_no_keys(control, environ) and is_loopback(control["host"]):
        control.setdefault("insecure", True)
    base = {"engine_id": engine_id, "role": role, **options, "lease": lease, "control": control}
    config = ConnectorConfig.from_env(environ, base)
    return of_rank(config, vllm_config.parallel_config.data_parallel_index)


def of_rank(config: ConnectorConfig, index: int) -> ConnectorConfig:
    """Return the settings of one data-parallel rank, which is an engine of its own: its index is added to the port, if
    one is set, and to the id. vLLM appends the index to its own engine id, but not to the id of a `MultiConnector`'s
    child or to one from our settings. An id that ends with another rank's index is one of these.

    Raises:
        ConfigError: there is no such port.
    """
    suffix, control = f"_dp{index}", config.control
    of_other = RANK_SUFFIX.search(config.engine_id) is not None
    if (index or of_other) and not config.engine_id.endswith(suffix):
        config = msgspec.structs.replace(config, engine_id=config.engine_id + suffix)
    if not index or not control.port:
        return config
    port = control.port + index
    if port > MAX_PORT:
        raise ConfigError(
            "a data-parallel rank listens on the control port plus its index, and this sum exceeds the highest port",
            port=control.port,
            data_parallel_index=index,
        )
    control = msgspec.structs.replace(control, port=port)
    return msgspec.structs.replace(config, control=control)


def names_no_keys(control: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Returns True if neither the options nor the environment name keys for the control channel."""
    return not (
        control.get("secret_key_file")
        or control.get("authorized_clients_file")
        or environ.get("KVCONNECTOR_CONTROL_SECRET_KEY_FILE")
        or environ.get("KVCONNECTOR_CONTROL_AUTHORIZED_CLIENTS_FILE")
    )


def port_of(environ: Mapping[str, str], variable: str) -> int:
    """Return the port that a variable names. Raises ConfigError: it names none."""
    try:
        return int(environ[variable])
    except ValueError as error:
        raise ConfigError(f"{variable} is not a port number", value=environ[variable]) from error


def take(
    options: dict[str, Any],
    name: str,
    kind: Any,
    default: Any,
    where: str = "kv_connector_extra_config",
) -> Any:
    """Remove an option from `options` and return its value. Numbers and truth values may be written as text."""
    if name not in options:
        return default
    value = options.pop(name)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}.{name} is malformed", value=value, reason=str(error)) from error


def model_description(vllm_config: VllmConfig, name: str) -> ModelDescription:
    """Return the values besides shapes on which two engines must agree. Their weights' quantization may differ."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = str(model.dtype).removeprefix("torch.")
    of_cache = SAME_TYPES.get(str(cache.cache_dtype), str(cache.cache_dtype))
    config = model.hf_text_config
    fields = config_fields(config)
    if (factors := _longrope_factors(model)) is not None:
        fields += (("longrope factors", factors),)
    return ModelDescription(
        model=name,
        dtype=dtype if of_cache == "auto" else of_cache,
        num_layers=model.get_total_num_hidden_layers(),
        position_encodings=position_encodings(config),
        revision=revision_of(str(model.model), model.revision),
        config=fields,
    )


def _longrope_factors(model: Any) -> str | None:
    """Return which of LongRoPE's two lists of factors vLLM uses for all prompts, which depends on `--max-model-len`;
    None for other position encodings.
    """
    length = longrope_length(model.hf_text_config)
    if length is None:
        return None
    longest = model.max_model_len
    if model.original_max_model_len == -1:
        # that was fitted to the memory after the model was built for the longest prompts
        longest = model.get_and_verify_max_len(-1)
    return "long_factor" if longest > length else "short_factor"


def check_deployment(
    vllm_config: VllmConfig, role: Role, environ: Mapping[str, str] | None = None
) -> None:
    """Refuse what does not work with kvconnector, before anything is allocated.

    Args:
        vllm_config: vLLM's configuration.
        role: What the engine does with other engines.
        environ: Environment variables; None for those of this process.

    Raises:
        ConfigError: for any engine: the model is a diffusion language model, vLLM takes request ids from clients as
            they are, the engine is to be saved in a snapshot, or each of several ranks has a scheduler of its own. For
            engines that load: answers name the routed experts, videos are pruned in a model with M-RoPE, or each of
            several prefill context parallel ranks holds the whole cache.
    """
    environ = os.environ if environ is None else environ
    model = vllm_config.model_config
    if getattr(model, "is_diffusion", False):
        raise ConfigError(
            "KVConnector does not transfer caches of diffusion language models: they sample no token after a prompt,"
            " and compute a block of an answer many times before its cache is kept",
            model=str(model.model),
        )
    if environ.get(OWN_IDS_VARIABLE, "0") != "0":
        raise ConfigError(
            f"KVConnector keeps the blocks of requests that are over, and a new request with the id of one of them ends"
            f" vLLM's engine: do not set {OWN_IDS_VARIABLE}",
            value=environ[OWN_IDS_VARIABLE],
        )
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is not None and main.name == SNAPSHOT_SERVER:
        raise ConfigError(
            "KVConnector cannot be saved in a snapshot: it has memory registered with the network, and a name by which"
            " other engines notice a restart, and both would be those of the saved process"
        )
    if vllm_config.aux_output_config.enabled and role != "producer":
        raise ConfigError(
            "vLLM has no routed experts of tokens that were computed elsewhere: start engines that load prompts"
            " without --enable-return-routed-experts",
            role=role,
        )
    media = model.multimodal_config
    if media is not None and media.video_pruning_rate and model.uses_mrope and role != "producer":
        raise ConfigError(
            "vLLM learns the positions of what follows a pruned video only when it computes the video's tokens: start"
            " this engine and the prefill engine without --video-pruning-rate, so that both have the same prompts",
            role=role,
            video_pruning_rate=media.video_pruning_rate,
        )
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "with external_launcher each rank has a scheduler of its own, and all must plan the same steps, but"
            " transfers end on one rank before another: use another distributed_executor_backend",
            world_size=parallel.world_size,
        )
    pcp_size = parallel.prefill_context_parallel_size
    if pcp_size > 1 and parallel.decode_context_parallel_size == 1 and role != "producer":
        raise ConfigError(
            "KVConnector loads into one copy of a cache, but prefill context parallelism alone keeps several: use"
            " kv_producer without bidirectional_kv_xfer, or add decode context parallelism",
            role=role,
            prefill_context_parallel_size=pcp_size,
            decode_context_parallel_size=1,
        )


def traces_endpoint(vllm_config: VllmConfig) -> str | None:
    """Return `--otlp-traces-endpoint`, to which vLLM exports spans; None if it is not set."""
    endpoint: str | None = vllm_config.observability_config.otlp_traces_endpoint
    return endpoint
