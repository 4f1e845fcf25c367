"""`kvconnector doctor`: checks whether this machine can run the connector, with one verdict on each line."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from kvconnector import __version__
from kvconnector.bench.environment import cpu_name, gpus, has_cuda_driver, installed_version
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.shapes import EngineShape, ModelShape, element_type, engine_geometry
from kvconnector.bench.sizes import format_bytes, parse_numbers
from kvconnector.cli.console import (
    PATH,
    Finding,
    Verdict,
    attempt,
    host_and_port,
    json_flag,
    print_json,
)
from kvconnector.cli.doctor_rdma import network, rdma_places
from kvconnector.cli.model_config import named_model
from kvconnector.cli.statuses import EXIT_FAULT
from kvconnector.config import ConnectorConfig
from kvconnector.control.security import AUTHORIZED_CLIENTS_FILE, SECRET_KEY_FILE, CurveKeys
from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.errors import ConfigError, KVConnectorError
from kvconnector.session.events import DIRECT_PATH
from kvconnector.topology import EngineGeometry
from kvconnector.transport.ucx import AUTO, load_library
from kvconnector.transport.ucx.library import automatic_order
from kvconnector.transport.ucx.ports import active_rdma_ports
from kvconnector.transport.ucx.rdma import offered
from kvconnector.transport.ucx.stacks import Stack, examine_stacks

if TYPE_CHECKING:
    from kvconnector.bench.engines import EnginePair

HELLO_TIMEOUT_S = 3.0
LEAST_FILES, FEW_FILES = 128, 1024
"""Files that a process of the self-test may need, and those of an engine with few peers."""
SHARED_MEMORY = Path("/dev/shm")
KEYS = ("KVCONNECTOR_CONTROL_SECRET_KEY_FILE", "KVCONNECTOR_CONTROL_AUTHORIZED_CLIENTS_FILE")
DEFAULTS = ConnectorConfig.from_mapping({"engine_id": "doctor", "control": {"insecure": True}})
"""Settings for the other checks where those of the environment cannot be used."""
text_option = partial(click.option, default="", show_default=False)


def _device(text: str) -> str:
    """Return "cpu", "cuda" or "cuda:N" unchanged. Raises ConfigError: it is something else."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ConfigError("a device must be cpu, cuda or cuda:N", given=text)
    return text


@click.command()
@click.option(
    "--keys", type=PATH, help="Directory of key files; default: those that the environment names."
)
@click.option(
    "--device",
    type=_device,
    metavar="DEVICE",
    default="cpu",
    help="Where the test caches are: cpu, cuda or cuda:N.",
)
@text_option("--tls", help="UCX_TLS for the test transfer.")
@click.option(
    "--peer",
    type=host_and_port,
    metavar="HOST:PORT[,KEY]",
    help="Check a running engine instead: the address of its directory service (remote_host and remote_port of its"
    " kv_transfer_params), and its public key if that differs from this engine's.",
)
@click.option(
    "--model",
    help="With --peer: compare its caches with those of this model: a name that `plan` knows, or a config.json.",
)
@text_option("--dtype", help="With --model: the caches' element type.")
@text_option(
    "--decode", help="With --model: this engine's shape, as in `plan`: tp=2,dtype=bfloat16."
)
@text_option(
    "--name", help="With --model: this engine's name for it. Without --name, names may differ."
)
@click.option(
    "--params",
    type=PATH,
    help="A file with one request's kv_transfer_params: report why they cannot be used.",
)
@click.option(
    "--engine",
    is_flag=True,
    help="Check the installed vLLM and SGLang instead: whether they have everything that the integrations use.",
)
@json_flag
def doctor(
    *,
    keys: Path | None,
    device: str,
    tls: str,
    peer: str | None,
    model: str | None,
    dtype: str,
    decode: str,
    name: str,
    params: Path | None,
    engine: bool,
    json: bool,
) -> int:
    """Check this host: versions, keys, UCX, GPUs and RDMA; and move a small cache between two processes.

    With --peer, greet a running prefill engine as a decode engine on this host would, without touching its requests.
    The report says whether the two engines are compatible, their round trip and bandwidth, and which path transfers
    will take and why. The exit status is 1 if there is a fault.
    """
    if not peer and (model or dtype or decode or name):
        raise ConfigError("--model, --dtype, --decode and --name are used only with --peer")
    if sum(map(bool, (peer, params, engine))) > 1:
        raise ConfigError("--peer, --params and --engine are checks of their own: give one of them")
    found = examine_host(keys=keys, device=device, tls=tls)
    if peer:
        local = _local_engine(model, dtype, decode, name) if model else None
        from kvconnector.cli.doctor_peer import examine_peer

        found = attempt("peer", lambda: examine_peer(peer, _config(keys, tls), device, local))
    if params is not None:
        from kvconnector.cli.doctor_peer import examine_params

        found = attempt("params", lambda: examine_params(params, _config(keys, tls), device))
    if engine:
        found = attempt("engine", _engines)
    return _print(found, as_json=json)


def _engines() -> Iterator[Finding]:
    from kvconnector.integrations.installed import installed_engines

    engine = None
    for engine in installed_engines():
        text = f"{engine.version} is {'a tested' if engine.is_known else 'no tested'} release"
        yield Finding(
            engine.name, "note", f"{text}; checking its files for everything that kvconnector uses"
        )
        differences = engine.differences()
        yield from (Finding(engine.name, "FAIL", each) for each in differences)
        if not differences:
            yield Finding(engine.name, "ok", "it has everything that kvconnector uses")
    if engine is None:
        yield Finding("engine", "warn", "neither vLLM nor SGLang is installed here")


def _print(found: Iterator[Finding], *, as_json: bool) -> int:
    """Print each finding as soon as it is known. Returns the exit status, 1 if there is a fault."""
    findings = []
    for finding in found:
        findings.append(finding)
        if not as_json:
            click.echo(f"{finding.verdict:>4}  {finding.subject:<12} {finding.text}")
    faults = [finding.subject for finding in findings if finding.verdict == "FAIL"]
    if as_json:
        print_json({"findings": findings, "faults": faults})
    else:
        click.echo(f"faults: {', '.join(faults)}" if faults else "no faults found")
    return EXIT_FAULT if faults else 0


def _local_engine(model: str, dtype: str, decode: str, name: str) -> EngineGeometry:
    shape = named_model(model)
    if shape.groups:
        raise ConfigError(
            "engines differ in how they group the layers of such a model: run the comparison without --model",
            model=shape.name,
            kinds=[group.kind for group in shape.groups],
        )
    shape = msgspec.structs.replace(
        shape, name=name, dtype=element_type(dtype) if dtype else shape.dtype
    )
    return engine_geometry(shape, EngineShape.parse(decode), "here")


def _config(keys: Path | None, tls: str) -> ConnectorConfig:
    """Return the environment's settings, as an engine here would have them, with a name for this process. Options
    override them. Raises ConfigError: settings do not exist, or do not fit together.
    """
    environment = {**os.environ, **({"KVCONNECTOR_UCX_TLS": tls} if tls else {})}
    if keys is not None:
        files = (SECRET_KEY_FILE, AUTHORIZED_CLIENTS_FILE)
        environment |= {name: str(keys / file) for name, file in zip(KEYS, files, strict=True)}
    base: dict[str, object] = {
        "control": {} if environment.keys() & {*KEYS} else {"insecure": True},
        "peer": {"hello_timeout_s": HELLO_TIMEOUT_S},
    }
    named = {"KVCONNECTOR_ENGINE_ID": f"doctor-{platform.node()}-{os.getpid()}"}
    return ConnectorConfig.from_env({**environment, **named, "KVCONNECTOR_ROLE": "consumer"}, base)


def examine_host(*, keys: Path | None, device: str, tls: str) -> Iterator[Finding]:
    """Yield every finding as soon as it is known."""
    yield from _versions()
    yield from _gpus()
    if named := sorted(name for name in os.environ if name.startswith(("KVCONNECTOR_", "UCX_"))):
        yield Finding("environment", "note", ", ".join(named))
    try:
        config = _config(keys, tls)
    except KVConnectorError as error:
        yield Finding("environment", "FAIL", str(error))
        config = DEFAULTS
    yield from _keys(config)
    needed = [_shared_memory(), _open_files()]
    yield from needed
    is_tried = all(each.verdict != "FAIL" for each in needed)
    if (yield from _ucx(config, device)) and is_tried:
        yield from attempt("self-test", lambda: _self_test(device, tls))


def _versions() -> Iterator[Finding]:
    yield Finding("kvconnector", "ok", f"{__version__}, Python {platform.python_version()}")
    yield Finding("host", "note", f"{cpu_name()}, {len(os.sched_getaffinity(0))} usable cores")
    gpu_only: Verdict = "warn" if has_cuda_driver() else "note"
    lacking: tuple[tuple[str, str, Verdict], ...] = (
        ("numpy", "the planner needs it", "FAIL"),
        ("msgspec", "the wire needs it", "FAIL"),
        ("pyzmq", "the control channel needs it", "FAIL"),
        ("torch", "a cache on a GPU needs it", gpu_only),
        ("triton", "a cache on a GPU needs it", gpu_only),
    )
    for package, needed, verdict in lacking:
        if version := installed_version(package):
            yield Finding(package, "ok", version)
        else:
            yield Finding(package, verdict, f"not installed; {needed}: pip install {package}")


def _shared_memory() -> Finding:
    """Report whether processes of this host can share memory, without which nothing else is tried."""
    try:
        with tempfile.TemporaryFile(dir=SHARED_MEMORY):
            free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        text = (
            f"{SHARED_MEMORY} cannot be written ({error.strerror or error}): UCX and caches in CPU memory need it."
            " Mount a tmpfs there, in a pod an emptyDir with medium: Memory"
        )
        return Finding("/dev/shm", "FAIL", text)
    return Finding("/dev/shm", "ok", f"{format_bytes(free)} free")


def _open_files() -> Finding:
    """Report how many files a process may open, without which nothing else is tried: libzmq ends a process without."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"a process may have {limit} (ulimit -n); a decode rank needs five for each prefill rank it reads from"
    verdict: Verdict = "ok" if limit >= FEW_FILES else "warn" if limit >= LEAST_FILES else "FAIL"
    if verdict == "FAIL":
        text += f": below {LEAST_FILES} sockets cannot be made, and processes end"
    return Finding("open files", verdict, text)


def _gpus() -> Iterator[Finding]:
    found = gpus()
    if not found:
        yield Finding("gpu", "note", "torch finds no usable GPU")
    for index, gpu in enumerate(found):
        peers = ", ".join(map(str, gpu.peers)) or "none"
        text = f"cuda:{index} {gpu.name}, {format_bytes(gpu.memory_bytes)}; reads the memory of: {peers}"
        yield Finding("gpu", "ok", text)
        yield from attempt("  memory", partial(_gpu_memory, index))


def _gpu_memory(index: int) -> list[Finding]:
    """Report how pools can be shared whose memory is mapped segment by segment. Raises TransportError: see driver."""
    kinds = CudaDriver().handle_kinds(index)
    text = "other processes map memory by IPC handles"
    if kinds:
        text += (
            f", and memory of expandable segments, sleep mode and the like by {' or '.join(kinds)}"
        )
    return [Finding("  memory", "ok", text)]


def _keys(config: ConnectorConfig) -> Iterator[Finding]:
    paths = Path(config.control.secret_key_file), Path(config.control.authorized_clients_file)
    if not config.control.secret_key_file:
        text = "none configured: the control channel may use only loopback addresses"
        yield Finding("keys", "note", text)
        return
    for path in filter(Path.is_file, paths):
        mode = stat.S_IMODE(path.stat().st_mode)
        yield Finding("keys", "note", f"{path} has mode {mode:04o}")
    yield from attempt("keys", lambda: [_usable_keys(*paths)])


def _usable_keys(secret: Path, clients: Path) -> Finding:
    keys = CurveKeys.from_files(secret_key_file=secret, authorized_clients_file=clients)
    text = f"public key {keys.public_key}, {len(keys.authorized_clients)} authorised"
    if keys.public_key in keys.authorized_clients:
        return Finding("keys", "ok", text)
    text += "; this engine's own key is not among them, so its ranks refuse each other"
    return Finding("keys", "warn", text)


def _ucx(config: ConnectorConfig, device: str) -> Generator[Finding, None, bool]:
    """Yield the findings about UCX. Returns True if it can be used."""
    for stack in examine_stacks():
        yield _stack(stack)
    source = config.ucx.library
    try:
        library = load_library(source)
        names = sorted({transport for transport, _ in offered(library, {})})
    except KVConnectorError as error:
        yield Finding("ucx", "FAIL", error.statement)
        return False
    why = "ucx.library names it" if source != AUTO else _why_first(library.source)
    yield Finding("ucx", "ok", f"{library}: {why}")
    yield Finding("transports", "ok", ", ".join(names))
    if gpus() and "cuda_ipc" not in names:
        text = (
            "no cuda_ipc: between GPUs UCX will copy through host memory;"
            ' pip install "kvconnector[ucx-cu12]", or ucx-cu13 by the driver\'s CUDA version'
        )
        yield Finding("transports", "warn", text)
    yield from attempt("rdma", rdma_places)
    yield from attempt("network", lambda: [network(library, device, config)])
    return True


def _stack(stack: Stack) -> Finding:
    if stack.error:
        return Finding(f"ucx {stack.source}", "note", stack.error)
    rdma = f"; RDMA by {', '.join(stack.rdma_devices)}" if stack.rdma_devices else ""
    text = f"{stack.library} has {', '.join(stack.components)}{rdma}"
    return Finding(f"ucx {stack.source}", "ok", text)


def _why_first(source: str) -> str:
    ports = active_rdma_ports()
    order = " before ".join(automatic_order(ports))
    reason = f"RDMA ports are active ({', '.join(ports)})" if ports else "no RDMA port is active"
    return f"{reason}, so auto tries {order}; {source} is the first that can be used"


MODEL = ModelShape(name="selftest", num_layers=4, num_kv_heads=2, head_dim=64)
NUM_TOKENS = 1000
STAGING = {"staging": {"chunk_bytes": 1 << 18, "budget_bytes": 1 << 23}}


def _self_test(device: str, tls: str) -> Iterator[Finding]:
    """Move a request between two processes with different blocks, by the environment's settings: packed, then directly.
    Raises KVConnectorError: it failed.
    """
    from kvconnector.bench.deployment import Deployment
    from kvconnector.bench.engines import EnginePair

    kind, _, index = device.partition(":")
    gpus = (parse_numbers(index) or (0,)) if kind == "cuda" else ()
    options = BenchOptions(
        model=MODEL,
        tokens=(NUM_TOKENS,),
        prefill=EngineShape(block=16, layout="HND"),
        decode=EngineShape(block=64, layout="NHD"),
        device=kind,
        gpus=(gpus, gpus),
        tls=tls,
    )
    deployment = Deployment(options)
    transfer = deployment.transfer(NUM_TOKENS)
    with EnginePair(deployment, STAGING | {"paths": {"direct": "never"}}) as pair:
        seconds = pair.verify(transfer)
        yield from packed_findings(pair, tls)
    text = (
        f"{format_bytes(MODEL.token_bytes * NUM_TOKENS)} on {device}, blocks of 16 HND to 64 NHD, all bytes equal,"
        f" {seconds * 1e3:.0f} ms with connection set-up"
    )
    yield Finding("self-test", "ok", text)
    if os.environ.get("KVCONNECTOR_PATHS_DIRECT") == "never":
        yield Finding("direct reads", "note", "off, because paths.direct is never")
        return
    try:
        with EnginePair(deployment, STAGING | {"paths": {"direct": "always"}}) as pair:
            pair.verify(transfer)
            yield direct_finding(pair)
    except (KVConnectorError, ImportError) as error:
        yield Finding("direct reads", "note", f"none, all blocks are sent: {error}")


def packed_findings(pair: EnginePair, tls: str) -> Iterator[Finding]:
    """Report the path of a request, and the lanes by which UCX sent it."""
    verdict: Verdict = "warn" if pair.warnings else "ok"
    taken = f"path of the test request: {'+'.join(sorted(pair.paths))}"
    yield Finding("data path", verdict, "; ".join([taken, *pair.warnings]))
    if not pair.lanes:  # chunks are copied through host memory, as the warning above says
        return
    lanes = "+".join(text.rpartition(" ")[2] for text in pair.lanes)
    if not tls and {lane.partition("/")[0] for lane in lanes.split("+")} <= {"tcp"}:
        text = f"{lanes}: processes of this host share no memory; see UCX_TLS, and that /dev/shm can be written"
        yield Finding("lanes", "warn", text)
    else:
        yield Finding("lanes", "ok", f"{lanes} between two processes of this host")


def direct_finding(pair: EnginePair) -> Finding:
    """Check that engines of this host can read each other's pools."""
    if pair.paths == {DIRECT_PATH}:
        return Finding("direct reads", "ok", "engines of this host can read each other's pools")
    text = f"none; path of a request between two processes: {'+'.join(sorted(pair.paths))}"
    return Finding("direct reads", "note", "; ".join([text, *pair.warnings]))
