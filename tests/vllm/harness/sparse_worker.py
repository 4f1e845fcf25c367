"""What workers of models with sparse caches and random weights need; they import it before they load the model."""

from tests.vllm.bench.weights import RandomWeights
from tests.vllm.harness.rows import RowDigests


class SparseWorker(RowDigests, RandomWeights):
    """`worker_extension_cls`: weights that each engine makes alike, and digests of rows."""
