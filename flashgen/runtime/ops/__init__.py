"""The torch.library ops of forward passes, and what serves calls of either direction behind them.

`schemas` has the texts and the flat order of arguments, `keys` the keys of the memo, `calls` and `backward_calls` the
rules of a call, `runs` and `backward_runs` what the memo holds, `outputs` where calls write, `serve` the memo and the
slow path that fills it.
"""
