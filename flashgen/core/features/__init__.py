"""What a call may add to q, k and v: each feature is declared once, as a row of `table.FEATURES`.

`values` has what a call brings (`Features`, `BlockMask`), `declaration` what a row says. From the rows follow the
schemas of the ops, the keys of memo and databases, what autograd keeps, the parameters that a launch writes, what
families refuse, words and docs.
"""
