"""Defaults of transformers' configuration classes, which `kvconnector plan` needs where a `config.json` names no value.

    python -m tests.vllm.model_defaults            fails if this release of transformers has others than
                                                   kvconnector/cli/model_defaults.json says of it
    python -m tests.vllm.model_defaults --write    makes it current, and adds the models that the installed vLLM knows

A class that makes `layer_types` itself is asked for those of several numbers of layers: the file has the pattern that
repeats, or the word "irregular".
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from kvconnector.cli.model_config import ATTENTION_FIELDS, NESTED, SAME

FILE = Path(__file__).parents[2] / "kvconnector" / "cli" / "model_defaults.json"
SIZES = {
    *(name for names in SAME for name in names),
    *("decoder_layers", "num_decoder_layers", "d_kv", "max_source_positions", "is_encoder_decoder"),
    *("expand", "n_groups", "conv_kernel", "mtp_num_hidden_layers", "num_mtp_modules"),
}
BORING = re.compile(
    r"(?!qk_rope).*(?:bias|drop|norm|rope|rotary|expert|moe|router|token|init|scal|multiplier|act$|activation|softcap|implementation)"
    r"|encoder_|chunk_size_feed_forward|mlp_layer_types|layer_types|chunk_size$|mamba_chunk_size|index_n_heads"
    r"|use_mamba|parallel_attn|relative_attention|linear_allow|decoder_sparse_step"
)
MORE = [
    "bamba",
    "bart",
    "dots1",
    "ernie4_5_vl_moe",
    "minimax",
    "phi4_multimodal",
    "phimoe",
    "qwen2_5_omni_text",
    "qwen3_omni_moe_text",
    "t5",
    "whisper",
]
"""Types whose models have another name in vLLM, or run in SGLang only."""
LENGTHS = (24, 25, 36)


def fields_of(model_type):
    """Return the defaults of a class that may say what its layers cache, and the type of its text model."""
    cls = CONFIG_MAPPING[model_type]
    found = {
        field.name: field.default
        for field in dataclasses.fields(cls)
        if isinstance(field.default, bool | int | str)
        and (field.name in SIZES or ATTENTION_FIELDS.search(field.name))
        and not BORING.match(field.name)
    }
    if "mamba" in model_type:
        found["intermediate_size"] = getattr(cls, "intermediate_size", None)
    one = cls()
    text = one.get_text_config(decoder=True)
    nested = [name for name in NESTED if getattr(one, name, None) is text and text is not one]
    if nested:
        return {"text_config": text.model_type}, text.model_type
    if names := pattern(cls):
        found["layer_types"] = names
    if not found.get("is_encoder_decoder"):
        found.pop("is_encoder_decoder", None)
    return {name: each for name, each in sorted(found.items()) if each is not None}, None


def pattern(cls):
    """Return the names of layers that repeat, "irregular" if none do, and nothing if the class names none."""
    whole = []
    for length in LENGTHS:
        try:
            one = cls(num_hidden_layers=length)
        except Exception:  # a class that wants a list for this number
            one = cls()
        whole.append(getattr(one, "layer_types", None))
    if not any(whole):
        return None
    for period in range(1, 13):
        if all(names == (names[:period] * len(names))[: len(names)] for names in whole):
            return whole[0][:period]
    return "irregular"


def model_types():
    """Yield the types of models that generate text and that vLLM has."""
    from vllm.model_executor.models.registry import ModelRegistry

    known = set(ModelRegistry.get_supported_archs())
    kinds = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM")
    for kind in kinds:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").items():
            if known & {*([names] if isinstance(names, str) else names)}:
                yield model_type
    yield from MORE


def defaults(wanted):
    """Return the defaults of these types, and of their text models."""
    found, wanted = {}, [*wanted]
    while wanted:
        model_type = wanted.pop()
        if model_type not in found and model_type in CONFIG_MAPPING:
            found[model_type], text = fields_of(model_type)
            wanted += [text] if text else []
    return dict(sorted(found.items()))


def main():
    """Compare or write the file."""
    current = json.loads(FILE.read_bytes()) if FILE.exists() else {"models": {}}
    more = [*model_types()] if "--write" in sys.argv else []
    models = defaults([*current["models"], *more])
    if "--write" in sys.argv:
        lines = (f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in models.items())
        body = ",\n".join(lines)
        version = json.dumps(transformers.__version__)
        FILE.write_text(f'{{"transformers": {version}, "models": {{\n{body}\n}}}}\n')
    elif transformers.__version__ == current["transformers"] and models != current["models"]:
        sys.exit(f"{FILE} is not current")


if __name__ == "__main__":
    main()
