"""Generation with a cache that outlives its prompt; imports the mask by name, as several do."""

from megatron.utils import get_attn_mask

__all__ = ["get_attn_mask", "stream_tokens"]


def stream_tokens(neox_args, model, context_tokens):
    """After each token everything that it attends to."""
    for token in context_tokens:
        model.module.cache.append(token)
        yield list(model.module.cache)
