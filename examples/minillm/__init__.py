"""minillm: a small LLM engine that uses kvconnector the way a real one would.

Paged attention over real strided caches, tensor and pipeline parallelism over torch.distributed, continuous batching, a
prefill server, a decode server and a router that joins them. Small enough to read in an afternoon. It shows how to
embed the connector, and the demo and the integration tests run on it.

Processes: `router` -> `prefill_server` and `decode_server` (HTTP, scheduler) -> one `worker` per rank (model, cache,
connector). The HTTP processes never import torch.
"""
