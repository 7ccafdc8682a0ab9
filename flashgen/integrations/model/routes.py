"""Ways of a model's attention to flashgen, and back: transformers' registry where it is asked, else torch's SDPA."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

import torch

from flashgen.integrations.torch.sdpa import route_sdpa

EAGER, SDPA = "eager", "sdpa"
"""What transformers calls attention that is written out in its models."""


class Route(Protocol):
    """How calls of a model come to flashgen."""

    @property
    def door(self) -> str:
        """The integration that serves it."""

    def apply(self, model: torch.nn.Module) -> None:
        """Let a model, or a copy of it, attend by flashgen."""

    def plain(self, model: torch.nn.Module) -> None:
        """Let a model, or a copy of it, attend as it would by itself, written out where it can."""

    def fused(self, model: torch.nn.Module) -> bool:
        """Let a model, or a copy of it, attend by SDPA where `plain` writes it out; False where that is not so."""

    def undo(self, model: torch.nn.Module) -> None:
        """Put back what was there before."""

    @property
    def passed_on(self) -> dict[str, int]:
        """Calls that torch served, by the reason."""

    @property
    def own(self) -> tuple[str, ...]:
        """Classes of attention that never ask anybody."""


def route_of(model: torch.nn.Module, *, reference: bool) -> Route:
    """The route of a model: that of transformers if it has models of it inside, else SDPA of its forward pass.

    Raises:
        UnsupportedError: its attention comes from transformers and asks for no function.
    """
    found = _of_transformers(model)
    if not found:
        return SdpaRoute(routing=route_sdpa(reference=reference))
    from flashgen.integrations import transformers as door

    own = {name: None for outer in _outermost(found) for name in door.check(found[outer]).own}
    name = "fgen_reference" if reference else "fgen"
    door.register(name, reference=reference)
    given = {path: each.config._attn_implementation for path, each in found.items()}
    return TransformersRoute(name=name, given=given, own=tuple(own))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersRoute:
    """Models of transformers, be they inside of another one, by the name of an attention function."""

    name: str
    given: dict[str, str]
    own: tuple[str, ...]
    passed_on: dict[str, int] = field(default_factory=dict)
    door: str = "transformers"

    def apply(self, model: torch.nn.Module) -> None:
        """Choose flashgen's function."""
        self._choose(model, self.name)

    def plain(self, model: torch.nn.Module) -> None:
        """Choose transformers' eager attention."""
        self._choose(model, EAGER)

    def fused(self, model: torch.nn.Module) -> bool:
        """Choose SDPA, which not all models have."""
        try:
            self._choose(model, SDPA)
        except ValueError:
            return False
        return True

    def undo(self, model: torch.nn.Module) -> None:
        """Choose again what each of the models had."""
        for path, name in self.given.items():
            _model(model.get_submodule(path)).set_attn_implementation(name)

    def _choose(self, model: torch.nn.Module, name: str) -> None:
        for path in _outermost(self.given):
            _model(model.get_submodule(path)).set_attn_implementation(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaRoute:
    """The forward pass of a module, whose calls of `scaled_dot_product_attention` are routed."""

    routing: route_sdpa
    own: tuple[str, ...] = ()
    door: str = "scaled_dot_product_attention"

    def apply(self, model: torch.nn.Module) -> None:
        """Route the calls below the module's forward pass; a copy of the module is routed on its own."""
        routing, before = self.routing, vars(model).get("forward")

        def forward(self: torch.nn.Module, *given: Any, **named: Any) -> Any:
            with routing:
                return type(self).forward(self, *given, **named) if before is None else before(*given, **named)

        forward.before = before  # type: ignore[attr-defined] # for `undo`
        # a method, which a copy of the module binds to itself
        vars(model)["forward"] = MethodType(forward, model)

    def plain(self, model: torch.nn.Module) -> None:
        """Leave the calls to torch, which is what they are without flashgen."""
        self.undo(model)

    def fused(self, model: torch.nn.Module) -> bool:
        """SDPA is what they are by themselves."""
        return False

    def undo(self, model: torch.nn.Module) -> None:
        """Leave the calls to torch."""
        routed = vars(model).pop("forward")
        if routed.__func__.before is not None:
            vars(model)["forward"] = routed.__func__.before

    @property
    def passed_on(self) -> dict[str, int]:
        """What torch served in all runs so far, by the reason."""
        return dict(self.routing.calls.passed_on)


def _of_transformers(model: torch.nn.Module) -> dict[str, Any]:
    """The models of transformers in a model, by path; nobody has one who has not imported it."""
    library = sys.modules.get("transformers")
    if library is None:
        return {}
    return {name: each for name, each in model.named_modules() if isinstance(each, library.PreTrainedModel)}


def _outermost(paths: dict[str, Any]) -> list[str]:
    """Those that are in no other one."""
    return [path for path in paths if not any(_is_inside(path, other) for other in paths)]


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _model(module: Any) -> Any:
    """A module whose methods only transformers knows."""
    return module
