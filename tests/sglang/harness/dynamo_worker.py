"""`python -m dynamo.sglang` on a CPU, without SGLang's compiled kernels.

Dynamo imports code of SGLang for models with images, which looks up kernels at its import. They are put where it looks
when this module is imported, which the processes that a worker spawns do, too.
"""

import importlib
import os

import torch

from tests.sglang.harness.kernels import UNUSED_OPS

OF_QWEN = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
for name in (*UNUSED_OPS, *OF_QWEN):
    setattr(torch.ops.sgl_kernel, name, None)

if __name__ == "__main__":
    importlib.import_module("dynamo.sglang.main").main()
