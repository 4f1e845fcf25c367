"""vLLM with one prefill and one decode engine; see README.md."""
