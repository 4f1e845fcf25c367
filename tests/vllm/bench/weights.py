"""Random weights that vLLM makes itself (`load_format="dummy"`), scaled so that tokens depend on the whole context."""

import zlib

import torch
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

DEVIATION = 0.04


def _load_weights(self, model, model_config):
    """Load the same weights in every engine."""
    for name, parameter in model.named_parameters():
        source = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        if parameter.dim() == 1:
            parameter.data.fill_(1)
        else:
            deviation = 1.0 if "embed" in name else DEVIATION
            parameter.data.normal_(0, deviation, generator=source)


DummyModelLoader.load_weights = _load_weights


class RandomWeights:
    """`worker_extension_cls`: workers import this module before they load the model."""
