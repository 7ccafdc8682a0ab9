"""Models of transformers on flashgen's kernels, without a change to them.

    from flashgen.integrations import transformers as fgen

    fgen.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fgen")

Attention goes to `flashgen.attention`, `flashgen.attention_varlen` and `flashgen.attention_decode`; masks that models
ask transformers for stay windows, lengths and paddings, and become tensors only where a model looks into them.
"""

from flashgen.integrations.transformers.coverage import Coverage, check
from flashgen.integrations.transformers.registration import register, unregister

__all__ = ["Coverage", "check", "register", "unregister"]
