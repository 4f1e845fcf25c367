"""What vLLM's own layers say that they cache: models are built of a `config.json` without weights, and asked.

Run as a program, since it sets up vLLM's parallel state for good: it reads a JSON object of configurations, and writes
for each a list of `[layer, kind, extent, bytes]`, or the error's text.
"""

import contextlib
import json
import math
import re
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.v1.kv_cache_interface import MambaSpec


def cached(name, spec):
    """Return a layer's number, what it keeps, its window or chunk, and bytes of a token or of its state."""
    layer = int(re.search(r"\d+", name)[0])
    if isinstance(spec, MambaSpec):
        sizes = (
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        return [layer, "state", 0, sum(sizes)]
    window = getattr(spec, "sliding_window", None)
    chunk = getattr(spec, "attention_chunk_size", None)
    kind = "window" if window else "chunk" if chunk else "all"
    return [layer, kind, window or chunk or 0, spec.real_page_size_bytes // spec.block_size]


def specs(config, folder):
    """Build the model without memory. Returns what each layer caches, in the layers' order."""
    (folder / "config.json").write_text(json.dumps(config))
    arguments = EngineArgs(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        enforce_eager=True,
        block_size=32,
    )
    whole = arguments.create_engine_config()
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with set_current_vllm_config(whole), torch.device("meta"):
            initialize_model(vllm_config=whole)
            layers = whole.compilation_config.static_forward_context.items()
            found = [
                cached(name, spec)
                for name, layer in layers
                if isinstance(layer, AttentionLayerBase)
                and not getattr(layer, "kv_sharing_target_layer_name", None)
                and (spec := layer.get_kv_cache_spec(whole)) is not None
            ]
    finally:
        torch.set_default_dtype(default)
    return sorted(found)


def main():
    """Answer one list for each configuration."""
    # vLLM looks at each model's class in a process of its own, which imports all of vLLM again, to keep CUDA untouched
    registry._run_in_subprocess = lambda call: call()
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        init_distributed_environment(1, 0, store, 0, backend="gloo")
        initialize_model_parallel(1, 1)
        answers = {}
        for name, config in json.load(sys.stdin).items():
            with contextlib.redirect_stdout(sys.stderr):  # some models print
                try:
                    answers[name] = specs(config, Path(folder))
                except Exception as error:
                    answers[name] = f"{type(error).__name__}: {error}"
                    traceback.print_exc()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
