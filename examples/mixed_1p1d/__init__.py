"""vLLM and SGLang as prefill and decode engines of each other, as docs/mixed.md describes."""
