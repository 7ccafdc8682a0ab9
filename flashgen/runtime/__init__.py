"""Serving: the public calls, on three rooms. Imports go down only.

| room | what it knows |
|---|---|
| the public calls | `attention` (api), `explain`, `warmup` and `reload`, `block_mask`; their arguments |
| `decode` | `attention_decode`: its rules and what serves it |
| `autograd` | calls whose gradients are asked for |
| `ops` | the torch.library ops, the memo, and the plans of calls of either direction |
| `lookup` | the ladder from a workload to a config, its records, explanations |
"""
