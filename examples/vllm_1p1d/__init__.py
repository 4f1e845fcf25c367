"""vLLM with one prefill and one decode engine, as docs/vllm.md describes."""
