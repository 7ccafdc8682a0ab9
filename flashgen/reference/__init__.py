"""flashgen's calls in plain torch, exact and slow, on any device: the definition of what the kernels compute.

Each function has the signature, the rules and the errors of the call of the same name in `flashgen`, and computes in
float64. It is meant for programs under development on a machine without a GPU, for tests, and as the answer to compare
with. It is never used in place of a kernel: a call that no kernel serves raises, and never comes here.

Beside the dtypes of the kernels, float64 (and float32, where kernels have half precision alone) is taken, so that
`torch.autograd.gradcheck` works. Autograd follows every operation, which gives the gradients that no kernel computes,
too: of ALiBi slopes, through functions of the caller, and of gradients.
"""

from flashgen.reference.append import append_kv
from flashgen.reference.cached import attention_decode
from flashgen.reference.dense import attention
from flashgen.reference.packed import attention_varlen
from flashgen.reference.states import merge_states

__all__ = ["append_kv", "attention", "attention_decode", "attention_varlen", "merge_states"]
