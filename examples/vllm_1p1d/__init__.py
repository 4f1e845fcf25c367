"""vLLM with one prefill and one decode engine; docs/vllm.md shows it."""
