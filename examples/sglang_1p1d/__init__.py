"""SGLang with one prefill and one decode engine; docs/sglang.md shows it."""
