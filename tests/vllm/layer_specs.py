"""What vLLM's own layers say that they cache: models are built of a `config.json` without weights, and asked.

Run as a program, since it sets up vLLM's parallel state for good: it reads a JSON object of `Asked`s by name, and
writes for each a list of `[layer, kind, extent, bytes]`, or the error's text, and under the name with `: encodings`
what is stated of position encodings before and after the model was built, with `: states` what is read of recurrent
layers. For one with `is_saved` it writes the configuration as transformers saves it again, or null if transformers has
no class for it.

There is neither a GPU nor an image library here, so a few things are not vLLM's own: modules that are not installed are
empty, sparse attention takes the CPU's dense backend, the CPU's own limits on types are not applied, and the size and
number of this tensor parallel rank are set without other ranks. None of them is asked what a layer caches.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import re
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Asked(NamedTuple):
    """A configuration, and how it is served."""

    config: dict[str, Any]
    tp: int = 1
    rank: int = 0
    cache_dtype: str = "auto"
    draft_tokens: int = 0
    """Tokens that are drafted at once by the model's MTP layers, which are asked, too."""


ABSENT = [
    name for name in ("cutlass", "quack", "torchvision") if not importlib.util.find_spec(name)
]


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that are absent, and have every name that is asked of them."""

    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__version__ = "0"
        module.__getattr__ = lambda name: _named(module, name)
        return module

    def exec_module(self, module):
        pass


class _Named(type):
    """Classes that take anything, and have every attribute."""

    def __new__(mcs, name, bases=(), names=None):
        return super().__new__(mcs, name, bases, {"__init__": lambda self, *_, **__: None})

    def __init__(cls, name, bases=(), names=None):
        super().__init__(name, bases, {})

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name)


def _named(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    setattr(module, name, _Named(name))
    return getattr(module, name)


sys.meta_path.append(_Empty())

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.distributed.parallel_state import get_tp_group  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.transformers_utils.config import _CONFIG_REGISTRY  # noqa: E402
from vllm.v1.kv_cache_interface import MambaSpec  # noqa: E402

from kvconnector.integrations.model_values import position_encodings  # noqa: E402
from kvconnector.integrations.vllm.caches import is_group_shared, num_inputs  # noqa: E402


def cached(name, spec, draft_tokens):
    """Return a layer's number, what it keeps, its window or chunk, and bytes of a token or of its state, without the
    columns of drafts.
    """
    layer = int(re.search(r"\d+", name)[0])
    if isinstance(spec, MambaSpec):
        (columns, *channels), *others = spec.shapes
        shapes = (columns - draft_tokens, *channels), *others
        sizes = (
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(shapes, spec.dtypes, strict=True)
        )
        return [layer, "state", 0, sum(sizes)]
    window = getattr(spec, "sliding_window", None)
    chunk = getattr(spec, "attention_chunk_size", None)
    kind = "window" if window else "chunk" if chunk else "all"
    return [layer, kind, window or chunk or 0, spec.real_page_size_bytes // spec.block_size]


def know(model_type):
    """Let transformers load a model whose class is code of the model's own: with no defaults."""
    if model_type not in CONFIG_MAPPING and model_type not in _CONFIG_REGISTRY:
        cls = type("Own", (PreTrainedConfig,), {"model_type": model_type})
        AutoConfig.register(model_type, cls)


def saved(config, folder):
    """Return a configuration as transformers writes it, or None if it has no class for the type."""
    if config["model_type"] not in CONFIG_MAPPING:
        return None
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    CONFIG_MAPPING[config["model_type"]].from_pretrained(folder).save_pretrained(folder)
    return json.loads(path.read_bytes())


def specs(asked, folder):
    """Build the model without memory. Returns what each layer caches, in the layers' order, the position encodings that
    are stated before and after, and what registration reads of each kind of recurrent layer: `[type, columns of the
    convolution, those that its kernel needs, True if ranks share B and C]`.
    """
    (folder / "config.json").write_text(json.dumps(asked.config))
    know(asked.config["model_type"])
    drafts = {"method": "mtp", "num_speculative_tokens": asked.draft_tokens}
    arguments = EngineArgs(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        enforce_eager=True,
        block_size=32,
        kv_cache_dtype=asked.cache_dtype,
        tensor_parallel_size=asked.tp,
        distributed_executor_backend="mp" if asked.tp > 1 else None,
        enable_prefix_caching=True,
        speculative_config=drafts if asked.draft_tokens else None,
    )
    whole = arguments.create_engine_config()
    encodings = [position_encodings(whole.model_config.hf_text_config)]
    group, default = get_tp_group(), torch.get_default_dtype()
    try:
        group.world_size, group.rank_in_group = asked.tp, asked.rank
        torch.set_default_dtype(torch.bfloat16)
        with set_current_vllm_config(whole), torch.device("meta"):
            initialize_model(vllm_config=whole)
            if asked.draft_tokens:
                draft = whole.speculative_config.draft_model_config
                initialize_model(vllm_config=whole, model_config=draft)
            kept = [
                (name, layer, spec)
                for name, layer in whole.compilation_config.static_forward_context.items()
                if isinstance(layer, AttentionLayerBase)
                and not getattr(layer, "kv_sharing_target_layer_name", None)
                and (spec := layer.get_kv_cache_spec(whole)) is not None
            ]
            found = [cached(name, spec, asked.draft_tokens) for name, _, spec in kept]
            states = {
                (
                    spec.mamba_type.name,
                    spec.shapes[0][0],
                    num_inputs(whole, name, layer, spec),
                    is_group_shared(layer),
                )
                for name, layer, spec in kept
                if isinstance(spec, MambaSpec)
            }
    finally:
        group.world_size, group.rank_in_group = 1, 0
        torch.set_default_dtype(default)
    encodings.append(position_encodings(whole.model_config.hf_text_config))
    return sorted(found), encodings, sorted(states)


def set_up(folder):
    """Make this process the only rank of an engine, in a folder of its own."""
    # vLLM looks at each model's class in a process of its own, which imports all of vLLM again, to keep CUDA untouched
    registry._run_in_subprocess = lambda call: call()
    # on a processor with AMX vLLM takes a backend for latents that knows no indexer
    torch.cpu._is_amx_tile_supported = lambda: False
    backend_of = CpuPlatform.get_attn_backend_cls.__func__

    def dense_backend_of(cls, selected_backend, attn_selector_config, num_heads=None):
        dense = attn_selector_config._replace(use_sparse=False, kv_cache_dtype="auto")
        return backend_of(cls, selected_backend, dense, num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(dense_backend_of)
    check = CpuPlatform.check_and_update_config.__func__

    def check_all_but_states(cls, vllm_config):
        """The CPU's kernels want recurrent states in float32, and latents in bf16 without a prefix cache."""
        cache = vllm_config.cache_config
        kept = cache.mamba_ssm_cache_dtype, cache.enable_prefix_caching, cache.cache_dtype
        cache.cache_dtype = "auto"
        check(cls, vllm_config)
        cache.mamba_ssm_cache_dtype, cache.enable_prefix_caching, cache.cache_dtype = kept

    CpuPlatform.check_and_update_config = classmethod(check_all_but_states)
    torch.cuda.Stream = torch.cuda.Event = _Named("Absent")
    init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
    initialize_model_parallel(1, 1)


def main():
    """Answer one list for each configuration."""
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
        set_up(folder)
        answers = {}
        for name, asked in json.load(sys.stdin).items():
            with contextlib.redirect_stdout(sys.stderr):  # some models print
                try:
                    if asked.pop("is_saved", False):
                        answers[name] = saved(asked["config"], Path(folder))
                        continue
                    found = specs(Asked(**asked), Path(folder))
                    answers[name], answers[f"{name}: encodings"], answers[f"{name}: states"] = found
                except Exception as error:
                    answers[name] = f"{type(error).__name__}: {error}"
                    traceback.print_exc()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
