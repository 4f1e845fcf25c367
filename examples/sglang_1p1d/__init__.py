"""SGLang with one prefill and one decode engine, as docs/sglang.md describes."""
