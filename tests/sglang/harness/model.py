"""Small models with random weights, made as for the vLLM cases, in forms that SGLang's CPU code can run."""

import base64
import importlib
import io
import json

from tests.vllm.harness.model import VOCAB_SIZE, make_model

FEW_TOKENS = 4
ADAPTER_RANK = 4
IMAGE_WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""The first tokens of a model with images: the beginning and the end of one, its place, and that of a video."""
FIRST_WORD = 6
IMAGE_PROMPT = [0, 2, 1]
"""An image's place in a prompt."""
IMAGE_PIXELS = 112
"""Of a side. An image is 16 tokens: patches of 14 pixels squared, four of which make one."""


def model_of(folder, *, kind="llama", kv_heads=4, window=0):
    """Make a model of `kind` "llama", "images", "mla", "mla-moe", "mtp", "sparse", "states" or of a `window`, once."""
    if kind == "images":
        return _model_of_images(folder / kind)
    layers = 2 if kind.startswith("mla") else 4
    path = make_model(folder, kind=kind, kv_heads=kv_heads, layers=layers, window=window)
    if kind == "mla-moe":
        _change(path, scoring_func="softmax")
    if kind.startswith("mla") or kind == "sparse":
        # DeepSeek's only rotary embedding that SGLang computes on a CPU
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "mscale": 1.0}
        rope |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
        _change(path, rope_parameters=rope, rope_scaling=rope, moe_layer_freq=1)
    if kind == "mtp":
        _speak_few_tokens(path)
    if window:
        # so that its windows have a pool of their own: see kernels.py
        _change(path, is_hybrid_swa=True, hybrid_layer_pattern=[1, 0] * (layers // 2))
    return path


def _model_of_images(path):
    """Make a small Qwen 2.5 VL and its processor, whose words are numbers."""
    if (path / "complete").exists():
        return path
    torch, transformers, tokenizers = map(
        importlib.import_module, ("torch", "transformers", "tokenizers")
    )
    words = [*IMAGE_WORDS, "<unk>", "<pad>"]
    words += [f"w{number}" for number in range(FIRST_WORD, VOCAB_SIZE)]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    # SGLang turns tokens to text and back around an image, and looks for the image between words without spaces
    word = tokenizers.Regex(r"w\d+")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(word, "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=[*IMAGE_WORDS],
    )
    text = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
    }
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
    vision |= {"out_hidden_size": 256, "fullatt_block_indexes": [1], "window_size": 56}
    start, end, image, video = range(len(IMAGE_WORDS))
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    torch.manual_seed(4)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(10 if "embed_tokens" in name else 4)
    model.save_pretrained(path)
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=fast,
        video_processor=transformers.Qwen2VLVideoProcessor(),
    ).save_pretrained(path)
    (path / "complete").touch()
    return path


def image_of(seed):
    """Return a picture of random squares, as a client sends it."""
    numpy, images = importlib.import_module("numpy"), importlib.import_module("PIL.Image")
    drawn = numpy.random.default_rng(seed).integers(0, 256, (7, 7, 3), numpy.uint8)
    picture = images.fromarray(drawn).resize((IMAGE_PIXELS, IMAGE_PIXELS), images.NEAREST)
    written = io.BytesIO()
    picture.save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def adapters_of(model):
    """Make two adapters (LoRA) with random weights for a llama of `model_of`, once. Returns their folders by name."""
    torch, tensors = map(importlib.import_module, ("torch", "safetensors.torch"))
    config = json.loads((model / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * dim,
        "k_proj": config["num_key_value_heads"] * dim,
        "v_proj": config["num_key_value_heads"] * dim,
    }
    found = {name: model / f"adapter-{name}" for name in ("sql", "poems")}
    for seed, path in enumerate(found.values()):
        path.mkdir(exist_ok=True)
        drawn = torch.Generator().manual_seed(seed)
        weights = {
            f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": (
                torch.randn(shape, generator=drawn) * hidden**-0.5
            )
            for layer in range(config["num_hidden_layers"])
            for name, size in outputs.items()
            for part, shape in (("A", (ADAPTER_RANK, hidden)), ("B", (size, ADAPTER_RANK)))
        }
        tensors.save_file(weights, path / "adapter_model.safetensors")
        described = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": 4 * ADAPTER_RANK}
        described |= {"target_modules": [*outputs], "bias": "none", "task_type": "CAUSAL_LM"}
        (path / "adapter_config.json").write_text(json.dumps(described))
    return found


def _speak_few_tokens(path):
    """Give a few tokens most of the model's answers, once, so that its layer for drafts, which knows nothing, is right
    now and then. Which of them it answers still depends on the whole context.
    """
    place, mark = path / "model.safetensors", path / "few-tokens"
    if mark.exists():
        return
    tensors = importlib.import_module("safetensors.torch")
    weights = tensors.load_file(place)
    weights["lm_head.weight"][:FEW_TOKENS] *= 10
    tensors.save_file(weights, place)
    mark.touch()


def _change(path, **values):
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
