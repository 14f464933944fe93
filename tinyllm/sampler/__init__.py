"""From logits to token ids: processors in vLLM's order, then a draw whose noise is a pure function of its key."""
