"""Programs that call torch's attention reach flashgen's kernels; nothing of it happens on import.

    from flashgen.integrations import torch as flashgen_torch

    with flashgen_torch.route_sdpa() as calls:  # `scaled_dot_product_attention`, wherever a model calls it
        model(batch)
    print(calls)  # served, and passed on to torch with reasons

`enable` and `disable` do the same for the whole process; `register_flash_impl` makes flashgen known to torch's registry
of flash implementations, `register_sharding_rules` to `torch.distributed.tensor`; `context_parallel_attention` is for
sequences in parts on several ranks, as `split_sequence` cuts them. See docs/torch.md.
"""

from flashgen.integrations.torch.context_parallel import context_parallel_attention
from flashgen.integrations.torch.flash_impl import register_flash_impl
from flashgen.integrations.torch.sdpa import Calls, disable, enable, route_sdpa
from flashgen.integrations.torch.sequence_parts import join_sequence, split_sequence
from flashgen.integrations.torch.sharding import register_sharding_rules

__all__ = [
    "Calls",
    "context_parallel_attention",
    "disable",
    "enable",
    "join_sequence",
    "register_flash_impl",
    "register_sharding_rules",
    "route_sdpa",
    "split_sequence",
]
