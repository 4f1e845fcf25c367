"""A case with one connector, from the start of two engines to their end."""

import importlib.metadata
import importlib.util
import os
from contextlib import closing
from math import prod

from tests.hosts.network import missing
from tests.support.ports import free_ports
from tests.vllm.harness.engine import EngineSpec
from tests.vllm.harness.model import DEEPSEEK, make_model
from tests.vllm.harness.pair import Pair
from tests.vllm.harness.report import Outcome, complaints_to
from tests.vllm.harness.scenarios import restarted

CANDIDATES = 40
OUR_MODULE = "kvconnector.integrations.vllm"
BY_NAME = ("name", "multi")
"""The value of `found_by` with which vLLM finds our connector by its plugin."""
BESIDE_TIER = ("ranges", "first-hit")


def side_channel(connector, *, is_port_kept=False):
    """Variables for the address at which an engine listens for peers. NixlConnector needs a port, ours finds one."""
    host = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    if connector != "nixl" and not is_port_kept:
        return host
    return host | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports())}


def transfer_config(case, connector, device, names, tier_bytes):
    """Return the `--kv-transfer-config` of an engine with `names` for role and id."""
    config = {
        "kv_connector": "NixlConnector" if connector == "nixl" else "KVConnector",
        "kv_role": names["kv_role"],
        "kv_load_failure_policy": case.policy,
        "kv_connector_extra_config": case.options,
    }
    if connector != "nixl" and case.found_by not in BY_NAME:
        config["kv_connector_module_path"] = OUR_MODULE
    if case.found_by not in ("path", "name"):
        others = [_tier(device, tier_bytes)] if case.found_by in BESIDE_TIER else []
        children = {"kv_connector_extra_config": {"connectors": [*others, config]}}
        path = OUR_MODULE if case.found_by == "ranges" else None
        own = {"kv_connector": "MultiConnector", "kv_connector_module_path": path}
        config = {**config, **own, **children}
    return config | names


def _tier(device, num_bytes):
    """Return vLLM's own tier, which copies blocks only on GPUs."""
    copies = {"spec_name": "HostTierSpec", "spec_module_path": "tests.vllm.harness.host_tier"}
    options = {"cpu_bytes_to_use": num_bytes, **(copies if device.kind == "cpu" else {})}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {**config, "kv_connector_extra_config": options}


def world_size(options):
    return prod(options.get(f"{kind}_size", 1) for kind in ("tp", "pp", "dp"))


def why_skipped(case, device):
    """Returns the reason for which a case cannot run on a device; "" if it can."""
    for need in case.needs:
        if need == "gpus":
            why = "vLLM's CPU code has none of it" if device.kind == "cpu" else ""
        elif need == "cpus":
            why = "" if device.kind == "cpu" else "vLLM's attention on GPUs takes no fp8_e5m2"
        elif need == "hosts":
            why = missing()
        else:
            is_there = importlib.util.find_spec(need) is not None
            why = (
                ""
                if is_there
                else f"{need} is missing: `scripts/test_vllm --launchers` installs it"
            )
        if why:
            return why
    if case.model.get("kind") in DEEPSEEK and importlib.util.find_spec("cutlass") is None:
        return "vLLM's kernels of this model need nvidia-cutlass-dsl"
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if case.found_by in BY_NAME and "kvconnector" not in plugins.names:
        return "kvconnector is not installed: vLLM finds it by its plugin"
    wanted, found = max(map(world_size, (case.prefill, case.decode))), len(device.units)
    # ranks may share cores, but not GPUs
    is_lacking = device.kind == "cuda" and wanted > found
    return f"an engine needs {wanted} GPUs, there are {found}" if is_lacking else ""


def model_paths(case, folder):
    """Make a case's model and its draft. Returns their paths, "" without a draft."""
    model = str(make_model(folder / "models", **case.model))
    draft = case.decode.get("draft", "") or case.prefill.get("draft", "")
    if draft == "eagle":
        return model, str(make_model(folder / "models", kind="eagle", layers=1))
    return model, model if draft else ""


def specs_of(case, connector, folder, device):
    model, draft_model = model_paths(case, folder)
    first = 0
    halves = zip(("prefill", "decode"), (case.prefill, case.decode), case.roles, strict=True)
    for half, options, role in halves:
        arguments = device.arguments(is_pipeline="pp_size" in options)
        if "draft" in options:
            draft = {"method": options["draft"], "model": draft_model}
            arguments["speculative_config"] = draft | {"num_speculative_tokens": 3}
        environment = {
            **device.environment(first, world_size(options)),
            **side_channel(connector, is_port_kept=case.scenario is restarted),
            **options.get("environment", {}),
        }
        names = {"kv_role": role, "engine_id": f"{half}-{case.name}"}
        tier_bytes = max(256 << 20, options.get("cache_bytes", 0))
        common = {
            "model": model,
            "transfer": transfer_config(case, connector, device, names, tier_bytes),
            "log": folder / "logs" / f"{case.name}-{connector}-{half}.log",
            "dtype": case.gpu_dtype if device.kind == "cuda" else "float32",
        }
        arguments |= options.get("arguments", {})
        own = {name: value for name, value in options.items() if name != "draft"}
        made = {"arguments": arguments, "environment": environment}
        yield EngineSpec(**common | own | made)
        # on the CPU the engines share cores as if each had one rank
        first += world_size(options) if device.kind == "cuda" else 1


def run_case(case, connector, folder, device):
    """Run a case; every error becomes a complaint."""
    outcome = Outcome()
    with complaints_to(outcome):
        if case.servers is not None:
            # their models and logs are the case's own
            own = folder / "servers" / case.name
            (own / "logs").mkdir(parents=True, exist_ok=True)
            case.servers(own, outcome, device)
        else:
            _run_pair(case, connector, folder, outcome, device)
    return outcome


def _run_pair(case, connector, folder, outcome, device):
    prefill, decode = specs_of(case, connector, folder, device)
    is_rounded = device.kind == "cuda" and decode.dtype != "float32"
    with closing(Pair(prefill, decode, CANDIDATES if is_rounded else 1)) as pair:
        pair.wait_until_ready()
        case.scenario(pair, outcome)
        if case.leaves_nothing:
            outcome.complaints += pair.leftovers()


def preload(device):
    """Import what every engine needs, once. Nothing here may touch CUDA: engines are forked from this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "OMP_NUM_THREADS": "1",
    }
    cpu = ("vllm.v1.worker.cpu_model_runner", "kvconnector.runtime", "ucxx")
    cuda = (
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.attention.backends.flash_attn",
        "kvconnector.integrations.vllm.connector",
    )
    for module in (
        "vllm.entrypoints.llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.model_executor.models.llama",
        *(cpu if device.kind == "cpu" else cuda),
    ):
        importlib.import_module(module)
