"""One case with one connector, from two engines' start to their end, within a bound."""

import importlib.metadata
import multiprocessing
import os

from tests.support.ports import free_ports
from tests.vllm.harness.device import EXACT
from tests.vllm.harness.engine import EngineSpec
from tests.vllm.harness.model import make_model
from tests.vllm.harness.pair import Pair
from tests.vllm.harness.scenarios import Outcome, restarted

CANDIDATES = 40
DRAFT_TOKENS = 3


def side_channel(connector, *, is_port_kept=False):
    """Where an engine listens for its peers. NixlConnector must be told a port, ours finds one for itself."""
    host = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    if connector != "nixl" and not is_port_kept:
        return host
    return host | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports())}


def transfer_config(case, connector, role):
    """`--kv-transfer-config` of one engine."""
    config = {
        "kv_connector": "NixlConnector" if connector == "nixl" else "KVConnector",
        "kv_role": role,
        "kv_load_failure_policy": case.policy,
        "engine_id": f"{role}-{case.name}",
        "kv_connector_extra_config": case.options,
    }
    if case.found_by == "multi":
        # children are found by name: ours through its plugin
        child = {name: value for name, value in config.items() if name != "engine_id"}
        wrapper = {**config, "kv_connector": "MultiConnector"}
        return wrapper | {"kv_connector_extra_config": {"connectors": [child]}}
    if connector != "nixl" and case.found_by == "path":
        config["kv_connector_module_path"] = "kvconnector.integrations.vllm"
    return config


def world_size(options):
    """Ranks of an engine."""
    return options.get("tp_size", 1) * options.get("pp_size", 1)


def why_skipped(case, device):
    """Why a case cannot run on a device; empty if it can."""
    if case.needs_gpus and device.kind == "cpu":
        return "vLLM's CPU code has none of it"
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if case.found_by != "path" and "kvconnector" not in plugins.names:
        return "kvconnector is not installed: vLLM finds it by its plugin"
    return next(
        filter(None, (device.lacks(world_size(o)) for o in (case.prefill, case.decode))), ""
    )


def in_own_process(make):
    """Models are made so: it may touch CUDA, which the process that engines are forked from must not."""
    process = multiprocessing.get_context("fork").Process(target=make)
    process.start()
    process.join()


def model_paths(case, folder):
    """Where a case's model is, and its draft's ("" without)."""
    model = str(make_model(folder / "models", **case.model))
    draft = case.decode.get("draft", "")
    if draft == "eagle":
        return model, str(make_model(folder / "models", kind="eagle", layers=1))
    return model, model if draft else ""


def specs_of(case, connector, folder, device):
    """Both engines of a case."""
    model, draft_model = model_paths(case, folder)
    names = ("prefill", "decode")
    specs, first = [], 0
    for number, (name, options) in enumerate(zip(names, (case.prefill, case.decode), strict=True)):
        world = world_size(options)
        arguments = device.arguments(is_pipeline=options.get("pp_size", 1) > 1)
        if draft_model:
            draft = {"method": options["draft"], "model": draft_model}
            arguments["speculative_config"] = draft | {"num_speculative_tokens": DRAFT_TOKENS}
        transfer = transfer_config(case, connector, case.roles[number])
        transfer["engine_id"] = f"{name}-{case.name}"
        environment = {
            **device.environment(first, world),
            **EXACT,
            **side_channel(connector, is_port_kept=case.scenario is restarted),
            **options.get("environment", {}),
        }
        arguments |= options.get("arguments", {})
        specs.append(
            EngineSpec(
                model=model,
                transfer=transfer,
                log=folder / "logs" / f"{case.name}-{connector}-{name}.log",
                **{"dtype": dtype_of(case, device)}
                | {name: value for name, value in options.items() if name != "draft"}
                | {"arguments": arguments, "environment": environment},
            )
        )
        # on the CPU the engines share cores as if each had one rank
        first += world if device.kind == "cuda" else 1
    return specs[0], specs[1]


def dtype_of(case, device):
    """Of a case's model, unless an engine names another."""
    return device.dtype or (case.gpu_dtype if device.kind == "cuda" else "float32")


def run_case(case, connector, folder, device):
    """One case with one connector; what goes wrong is a complaint."""
    outcome = Outcome()
    try:
        if case.servers is not None:
            case.servers(folder, outcome, device)
        else:
            _run_pair(case, connector, folder, outcome, device)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        outcome.complaints.append(f"{type(error).__name__}: {text[-1]}")
    return outcome


def _run_pair(case, connector, folder, outcome, device):
    prefill, decode = specs_of(case, connector, folder, device)
    is_rounded = device.kind == "cuda" and decode.dtype != "float32"
    with Pair(prefill, decode, CANDIDATES if is_rounded else 1) as pair:
        case.scenario(pair, outcome)
        if case.leaves_nothing:
            outcome.complaints += pair.leftovers()


def preload(device):
    """Import what every engine imports, once. Nothing here may touch CUDA: engines are forked from this process."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
    }
    cpu = ("vllm.v1.worker.cpu_model_runner", "kvconnector.runtime", "ucxx")
    cuda = (
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.attention.backends.flash_attn",
        "kvconnector.integrations.vllm.connector",
    )
    for module in (
        "vllm",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.model_executor.models.llama",
        *(cpu if device.kind == "cpu" else cuda),
    ):
        importlib.import_module(module)
