"""Runs `examples/launchers/ray_serve.py` on CPUs until terminated: `python -m tests.vllm.harness.ray_app`."""

import argparse
import os
import signal
import sys
from pathlib import Path

import prometheus_client
import ray
from ray import serve
from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.serve.llm import LLMConfig, build_pd_openai_app

from launchers import ray_serve
from tests.vllm.harness.launchers import MODEL, SIDES

ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 4096,
    "block_size": 64,
    "kv_cache_memory_bytes": 128 << 20,
    "disable_log_stats": False,
}


class Metrics(CallbackBase):  # type: ignore[misc] # Ray is not where types are checked
    """Serves one engine's metrics on a separate port, since Ray's own export needs its dashboard and more packages."""

    async def on_before_node_init(self):
        prometheus_client.start_http_server(self.kwargs["port"])


def main():
    arguments = parse()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    ray_serve.KEYS = str(arguments.keys)
    if arguments.address:
        ray.init(address=arguments.address)
    else:
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=200 << 20,
            _temp_dir=str(arguments.folder),
        )
    try:
        ray_serve.register()
        sides = {
            f"{side}_config": LLMConfig(**engine(arguments, side, role))
            for side, role in SIDES.items()
        }
        serve.start(
            http_options={"location": "HeadOnly", "host": arguments.host, "port": arguments.port}
        )
        serve.run(build_pd_openai_app(sides))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        serve.shutdown()
    finally:
        ray.shutdown()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1", help="address that clients ask")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics", type=int, required=True, help="port of the decode engine's")
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="for Ray's files; its path must be short")
    parser.add_argument("--address", help="of Ray nodes that have the resources prefill and decode")
    return parser.parse_args()


def engine(arguments, side, role):
    """The example's engine, made small enough for this machine."""
    config = ray_serve.engine(MODEL, role)
    config["model_loading_config"]["model_source"] = arguments.model
    config["accelerator_config"] = {"kind": "cpu"}
    config["engine_kwargs"] |= ENGINE
    config["engine_kwargs"]["kv_transfer_config"]["kv_load_failure_policy"] = "fail"
    if side == "decode":
        config["log_engine_metrics"] = False  # set by Ray
        config["callback_config"] = {
            "callback_class": f"{__spec__.name}.Metrics",
            "callback_kwargs": {"port": arguments.metrics},
        }
    config["runtime_env"]["env_vars"] |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.environ["PYTHONPATH"],
    }
    if arguments.address:
        config["placement_group_config"] = {"bundles": [{"CPU": 1, side: 1}]}
    return config


if __name__ == "__main__":
    main()
