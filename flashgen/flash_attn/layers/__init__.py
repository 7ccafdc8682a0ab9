"""The part of FlashAttention's `flash_attn.layers` that programs import: rotary embeddings."""
