"""Features of bits: determinism."""

from __future__ import annotations

from flashgen.core.features.declaration import Argument, Feature, OpArgument, Support, Token

DETERMINISTIC = Feature(
    name="deterministic",
    fields=("deterministic",),
    absent="its sums have no fixed order, and the call is deterministic",
    arguments=(Argument(name="deterministic", default=False),),
    options=(OpArgument(schema="bool deterministic=False", default=False),),
    tokens=(Token(text="deterministic", field="deterministic", value=True),),
    words=lambda workload: ("deterministic",) if workload.deterministic else (),
    gradient_support=(
        Support(group="Gradients", name="the same bits every time (`deterministic`)", fields={"deterministic": True}),
    ),
)
"""Forward passes always have it; only backward ones are asked for it."""
