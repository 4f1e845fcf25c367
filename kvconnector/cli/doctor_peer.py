"""`kvconnector doctor --peer`: a running engine, as a decode engine on this host would find it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvconnector import __version__
from kvconnector.bench import file_errors, read_file
from kvconnector.cli.console import Finding
from kvconnector.cli.peer_greeting import PeerGreeting, reason_for_silence, resolve, whole_engine
from kvconnector.config import ConnectorConfig
from kvconnector.control.address import HostPort, parse_address
from kvconnector.errors import (
    AuthenticationError,
    ConfigError,
    IncompatiblePeerError,
    KVConnectorError,
    PeerLostError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from kvconnector.integrations.sglang.registry import Asker, route_of
from kvconnector.runtime.params import TransferParams, has_secret, wants_remote_prefill
from kvconnector.topology import EngineGeometry, TpKVTopology
from kvconnector.topology.conversion import numbers_differ, obstacle
from kvconnector.wire import messages as m

MAX_ENGINES = 64
"""Data-parallel ranks of one server that are compared."""


def examine_peer(
    peer: str,
    config: ConnectorConfig,
    device: str,
    local: EngineGeometry | None,
    *,
    is_registered: bool = False,
) -> Iterator[Finding]:
    """Compare the engine at `peer`, HOST:PORT[,KEY], with `local`. If SGLang's registry answers there, compare each of
    the engines that it names; these are `is_registered`. Raises KVConnectorError: it cannot be reached.
    """
    address, _, key = peer.partition(",")
    if why := resolve(parse_address(f"tcp://{address}").host):
        text = f"the host's name does not resolve ({why}): see its spelling and DNS, or give its IP address"
        yield Finding("peer", "FAIL", f"{address}: {text}")
        return
    with PeerGreeting(config, device, f"tcp://{address}", key) as greeting:
        try:
            directory = greeting.ask()
        except (
            AuthenticationError,
            PeerLostError,
            PeerUnreachableError,
            RemoteProtocolError,
        ) as error:
            engines = [] if is_registered else _registered_at(address)
            for rank, directory_address in enumerate(engines):
                name = f"data-parallel rank {rank} of {len(engines)}"
                text = f"SGLang's registry at {address}: {name} is at {directory_address}"
                yield Finding("registry", "ok", text)
                at = f"{directory_address},{key}"
                yield from examine_peer(at, config, device, local, is_registered=True)
            if not engines:
                yield Finding("peer", "FAIL", f"{address}: {_reason_for_no_answer(error, address)}")
            return
        theirs = directory.geometry.unpack()
        yield from _engine(address, directory, theirs, config)
        yield from _differences(theirs, config, local)
        try:
            yield from greeting.greet(directory)
        except PeerUnreachableError as error:
            hint = "an engine that was never asked for anything greets nobody: send it a request"
            yield Finding("peer", "FAIL", f"{error.statement}; {hint}")


def _registered_at(address: str) -> list[str]:
    """Return the directory services, HOST:PORT, of the engines that SGLang's registry at `address` names, by their
    data-parallel ranks; none if no registry answers there.
    """
    asker = Asker(parse_address(f"tcp://{address}"))
    try:
        size = int(asker.ask("GET", route_of(-1, -1))["dp_size"])
        places = [asker.ask("GET", route_of(rank, 0)) for rank in range(min(size, MAX_ENGINES))]
        found = [
            HostPort(str(each["rank_ip"]).strip("[]"), int(each["rank_port"])) for each in places
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    finally:
        asker.close()
    return [str(each).removeprefix("tcp://") for each in found]


def examine_params(path: Path, config: ConnectorConfig, device: str) -> Iterator[Finding]:
    """Find out why one request's `kv_transfer_params`, in a file, cannot be used here: what they say, and whether the
    engine that they name answers. Raises KVConnectorError: they cannot be read, or are not a producer's.
    """
    with file_errors("cannot read kv_transfer_params", path):
        found = msgspec.json.decode(read_file(path))
    params = found.get("kv_transfer_params", found) if isinstance(found, dict) else found
    if not isinstance(params, dict):
        raise ConfigError("kv_transfer_params must be a JSON object", got=type(params).__name__)
    if not wants_remote_prefill(params):
        text = "do_remote_prefill is not true: a decode engine computes the prompt itself"
        yield Finding("params", "FAIL", text)
        return
    if not has_secret(params) and "remote_engine_id" in params:
        text = (
            "another connector's parameters, such as NixlConnector's: they have no transfer_secret, so"
            " the prefill engine does not run kvconnector"
        )
        yield Finding("params", "FAIL", text)
        return
    offer = TransferParams.from_mapping(params)
    text = (
        "streamed while it is computed"
        if offer.is_followed
        else f"{offer.remote_num_tokens} tokens in {[*map(len, offer.remote_block_ids)]} blocks"
    )
    text = f"request {offer.remote_request_id} of engine {offer.remote_engine_id}: {text}"
    yield Finding("params", "ok", text)
    text = (
        "not checked whether its blocks are still held, because asking would end the lease, which lasts for"
        " that engine's lease.duration_s after the last heartbeat"
    )
    yield Finding("lease", "note", text)
    address = offer.engine.address.removeprefix("tcp://")
    for finding in examine_peer(f"{address},{offer.remote_public_key}", config, device, None):
        yield finding
        if finding.subject == "peer" and f"engine {offer.remote_engine_id} at" not in finding.text:
            text = "another engine answers there: a router, or an address that was given away since"
            yield Finding("params", "FAIL", text)
            return


def _reason_for_no_answer(error: KVConnectorError, address: str) -> str:
    """Return the reason why the directory service does not answer, and its remedy."""
    if isinstance(error, AuthenticationError):
        return f"not authorised: {error}, or give its key, as in --peer {address},KEY"
    if isinstance(error, PeerUnreachableError):
        return reason_for_silence(f"tcp://{address}")
    return f"{error.statement}: see whether that port is its directory service's, and its log"


def _engine(
    address: str, directory: m.Directory, theirs: EngineGeometry, config: ConnectorConfig
) -> Iterator[Finding]:
    version = directory.library_version or "before 0.1.0"
    yield Finding(
        "peer",
        "ok" if version == __version__ else "warn",
        f"engine {theirs.engine_id} at {address}, kvconnector {version} (here {__version__}),"
        f" wire {directory.wire_version}",
    )
    groups = []
    for group in theirs.ranks[0].groups:
        parts = ", ".join(
            f"{part.name} {part.total_heads} x {part.head_dim} x {part.item_size_bytes} bytes"
            f"{f' of {part.element}' if part.element else ''}"
            for part in group.parts
        )
        shared = f" shared by {group.dcp_size} ranks" if group.dcp_size > 1 else ""
        groups.append(f"blocks of {group.block_size} tokens{shared} with {parts}")
    model = theirs.model
    yield Finding(
        "model",
        "ok",
        f"{model.model}, {model.dtype}, {model.num_layers} layers; tp {theirs.tp_size}, pp {theirs.pp_size};"
        f" {'; '.join(groups)}",
    )
    if model.position_encodings:
        texts = (f"{kind} {text}".strip() for kind, text in model.position_encodings)
        yield Finding("positions", "ok", ", ".join(texts))
    if model.revision:
        yield Finding("revision", "ok", model.revision)
    if model.config:
        fields = ", ".join(f"{name} {value}" for name, value in model.config)
        yield Finding("config", "ok", fields)
    if directory.stream != config.stream:
        side = "here" if config.stream else "there"
        yield Finding("stream", "note", f"on only {side}: prompts move only once they are complete")


def _differences(
    theirs: EngineGeometry, config: ConnectorConfig, local: EngineGeometry | None
) -> Iterator[Finding]:
    ours = local or whole_engine(theirs, config.engine_id)
    model = ours.model
    if not model.model:  # without a name, names are not compared
        model = msgspec.structs.replace(model, model=theirs.model.model)
    ours = msgspec.structs.replace(
        ours, model=model, verify=config.verify, converts=config.convert == "auto"
    )
    topology = TpKVTopology(ours, ours.ranks[0].rank)
    try:
        topology.check_compatible(theirs)
    except IncompatiblePeerError as error:
        for name, values in error.context.items():
            if isinstance(values, dict):
                here, there = values[ours.engine_id], values[theirs.engine_id]
                # names of a configuration's fields and of a repository are the reader's own
                is_own = name.startswith("config.") or " of " in name
                subject = name if is_own else name.replace("_", " ")
                yield Finding(subject, "FAIL", f"{here} here, {there} there")
            elif name not in ("engine", "peer"):
                yield Finding("tokens", "FAIL", f"{error.message}: {name} {values}")
        for index in range(ours.num_common(theirs)):
            if numbers_differ(ours, theirs, index) and (why := obstacle(ours, theirs, index)):
                yield Finding("conversion", "FAIL", why)
        return
    if local is None:
        text = f"verify={config.verify} on both sides; give --model to compare caches"
    else:
        text = f"these engines can exchange blocks; this one relative to the other: {topology.describe(theirs)}"
    yield Finding("agreement", "ok", text)
