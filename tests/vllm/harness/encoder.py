"""An engine that encodes images and one that takes their embeddings from it, with vLLM's own processors and runner."""

from __future__ import annotations

import importlib
import random
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple

from tests.vllm.harness.engine import Engine
from tests.vllm.harness.report import in_own_process

HIDDEN = 256
VOCAB_SIZE = 1024
IMAGE_TOKENS = 32
IMAGE_PIXELS = 56
PROMPT_TOKENS = 50


def make_image_model(path, *, has_weights=False):
    """Write a small BLIP-2 with random weights, whose images are `IMAGE_TOKENS` tokens, and its processor."""
    if (path / "complete").exists():
        return str(path)
    import torch

    transformers = importlib.import_module("transformers")
    tokenizers = importlib.import_module("tokenizers")
    words = {"<image>": 0, "<unk>": 1, "<pad>": 2} | {f"w{n}": n for n in range(3, VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    sides = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sides |= {"num_attention_heads": 4}
    vision = transformers.Blip2VisionConfig(**sides, image_size=56, patch_size=14)
    queries = transformers.Blip2QFormerConfig(
        **sides, vocab_size=VOCAB_SIZE, encoder_hidden_size=64, cross_attention_frequency=2
    )
    text = transformers.OPTConfig(
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        ffn_dim=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=2,
    )
    config = transformers.Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=queries.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=0,
        architectures=["Blip2ForConditionalGeneration"],
    )
    if has_weights:
        torch.manual_seed(0)
        model = transformers.Blip2ForConditionalGeneration(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.mul_(10 if "embed" in name else 4)
        model.save_pretrained(path)
    config.save_pretrained(path)
    images = transformers.BlipImageProcessor(size={"height": 56, "width": 56})
    transformers.Blip2Processor(
        image_processor=images, tokenizer=fast, num_query_tokens=IMAGE_TOKENS
    ).save_pretrained(path)
    (path / "complete").touch()
    return str(path)


class Counter:
    """An extension of vLLM's workers, which counts how often the encoder runs."""

    def count_encodings(self):
        model = self.model_runner.get_model()
        self.encodings, encode = 0, model.embed_multimodal

        def counted(**arguments):
            self.encodings += 1
            return encode(**arguments)

        model.embed_multimodal = counted

    def get_encodings(self):
        return self.encodings


class Answer(NamedTuple):
    """A request's tokens, its end, and `ec_transfer_params`."""

    tokens: list[int]
    reason: str
    params: dict | None


def serve(pipe, spec):
    """Run an engine that takes the commands "submit", whose prompt is a seed and the image's name, and "encodings"."""
    from vllm import LLM, SamplingParams
    from vllm.config import ECTransferConfig

    llm = LLM(
        model=spec.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel_size=spec.tp_size,
        distributed_executor_backend="mp" if spec.tp_size > 1 else None,
        worker_extension_cls=f"{__name__}.Counter",
        ec_transfer_config=ECTransferConfig(**spec.transfer),
        seed=0,
        **spec.arguments,
    )
    llm.collective_rpc("count_encodings")
    pipe.send(("ready", None))
    while True:
        command, arguments = pipe.recv()
        if command == "stop":
            return
        if command == "encodings":
            pipe.send((command, llm.collective_rpc("get_encodings")[0]))
            continue
        request_id, (seed, name), params, max_tokens, *_ = arguments
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"ec_transfer_params": params} if params else None,
        )
        (found,) = llm.generate(_prompt(seed, name), sampling, use_tqdm=False)
        (answer,) = found.outputs
        told = Answer(list(answer.token_ids), answer.finish_reason, found.ec_transfer_params)
        pipe.send(("finished", {request_id: told}))


def _prompt(seed, name):
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3))
    source = random.Random(seed)
    return {
        "prompt_token_ids": [source.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)],
        "multi_modal_data": {"image": Image.fromarray(pixels.astype(np.uint8))},
        "multi_modal_uuids": {"image": [name]},
    }


def encoder(folder, outcome, device, tp_size=1):
    """Images are encoded by one engine and decoded by the other, which encodes the same image under another name for
    comparison; then the first engine is lost.
    """
    path = folder / "models" / "images"
    in_own_process(lambda: make_image_model(path, has_weights=True))
    with ExitStack() as stack:
        engines = []
        for number, role in enumerate(("producer", "consumer")):
            size = tp_size if role == "consumer" else 1
            transfer = {
                "ec_connector": "EncoderConnector",
                "ec_connector_module_path": "kvconnector.integrations.vllm.encoder",
                "ec_role": f"ec_{role}",
                "engine_id": role,
                "ec_connector_extra_config": {"ec_cpu_bytes": 1 << 24},
            }
            spec = SimpleNamespace(
                model=str(path),
                transfer=transfer,
                tp_size=size,
                log=folder / "logs" / f"{role}.log",
                environment=device.environment(number, size),
                arguments=device.arguments(is_pipeline=False),
            )
            engine = Engine(spec, serve)
            stack.callback(engine.stop)
            engines.append(engine)
        for engine in engines:
            engine.wait_until_ready()
        _compare(*engines, outcome)


def _compare(producer, consumer, outcome):
    for seed in range(3):
        offer = producer.ask((seed, f"image {seed}"), max_tokens=1).params
        named = [key for key, found in (offer or {}).items() if "remote_request_id" in found]
        outcome.check(f"image {seed}: offers", len(named), 1)
        before = consumer.call("encodings")
        alone = consumer.ask((seed, f"alone {seed}"))
        outcome.check(f"image {seed}: encodings alone", consumer.call("encodings"), before + 1)
        answer = consumer.ask((seed, f"image {seed}"), offer)
        outcome.compare(f"image {seed}", answer, alone.tokens)
        outcome.check(f"image {seed}: encodings", consumer.call("encodings"), before + 1)
    offer = producer.ask((9, "image 9"), max_tokens=1).params
    producer.kill()
    alone = consumer.ask((9, "alone 9"))
    outcome.compare("after the loss", consumer.ask((9, "image 9"), offer), alone.tokens)
