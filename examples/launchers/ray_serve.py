"""Prefill and decode engines under Ray Serve: `serve run launchers.ray_serve:build model=Qwen/Qwen3-0.6B`.

The control channel's keys have the same path on every node (`kvconnector keygen`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvconnector.integrations.ray_serve import register

KEYS = "/etc/kvconnector"


def engine(model: str, role: str) -> dict[str, Any]:
    """Return the arguments of one side's `ray.serve.llm.LLMConfig`; `role` is kv_producer or kv_consumer."""
    return {
        "model_loading_config": {"model_id": model},
        "engine_kwargs": {"kv_transfer_config": {"kv_connector": "KVConnector", "kv_role": role}},
        "runtime_env": {
            "env_vars": {
                "KVCONNECTOR_CONTROL_SECRET_KEY_FILE": f"{KEYS}/curve.secret",
                "KVCONNECTOR_CONTROL_AUTHORIZED_CLIENTS_FILE": f"{KEYS}/authorized_clients",
            }
        },
    }


def build(arguments: Mapping[str, str]) -> Any:
    """Return the application; `arguments` has `model`."""
    from ray.serve.llm import LLMConfig, build_pd_openai_app

    register()
    sides = {"prefill_config": "kv_producer", "decode_config": "kv_consumer"}
    return build_pd_openai_app(
        {side: LLMConfig(**engine(arguments["model"], role)) for side, role in sides.items()}
    )
