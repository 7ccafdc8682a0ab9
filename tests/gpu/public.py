"""The public call as a kernel of the gate, and its kernels compiled ahead in other processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

import flashgen
from flashgen.codegen.build import compile_kernel
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.measure.verification_case import VerificationCase
from flashgen.measure.verify import LaunchFunction, Offset

MOST_PROCESSES = 16


def call_arguments(features: Features) -> dict[str, Any]:
    """Feature arguments of `flashgen.attention`."""
    found = {name: getattr(features, name) for name in ("alibi_slopes", "sinks", "bias", "mask")}
    found = {name: tensor for name, tensor in found.items() if tensor is not None}
    if features.window != (None, None):
        found["window"] = features.window
    return found | ({"softcap": features.softcap} if features.softcap else {})


@dataclass(frozen=True, kw_only=True)
class PublicCall:
    """`flashgen.attention` with tensors in a layout: bhsd, bshd, or unaligned (rows of one element more, bshd)."""

    spec: Specialization
    layout: str = "bhsd"

    def factory(self, *_: torch.Tensor | Features) -> LaunchFunction:
        return self

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        q_offset: Offset,
        features: Features,
    ) -> None:
        tensors = [self._laid_out(tensor) for tensor in (q, k, v)]
        options = self._options(softmax_scale, q_offset, features)
        with tf32_products(self.spec.dtype == "tf32"):
            found, sums = flashgen.attention(*tensors, **options, return_lse=True)
        out.copy_(found if self.layout == "bhsd" else found.transpose(1, 2))
        lse.copy_(sums)

    def served(self, problem: VerificationCase) -> tuple[Specialization, Config]:
        """What the call will compile for a problem."""
        inputs = problem.inputs
        tensors = [self._laid_out(tensor[0]) for tensor in (inputs.q, inputs.k, inputs.v)]
        options = self._options(problem.softmax_scale, problem.q_offset, inputs.features[0])
        options.pop("softmax_scale")
        with tf32_products(self.spec.dtype == "tf32"):
            explanation = flashgen.explain(*tensors, **options)
        return explanation.specialization, explanation.served.config

    def _options(self, softmax_scale: float, q_offset: Offset, features: Features) -> dict[str, Any]:
        spec = self.spec
        options = {"causal": spec.causal, "softmax_scale": softmax_scale, **call_arguments(features)}
        if spec.causal or features.window != (None, None) or spec.alibi:
            options["q_offset"] = q_offset
        return options | {"layout": "bhsd" if self.layout == "bhsd" else "bshd"}

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.layout == "bhsd":
            return tensor
        tensor = tensor.transpose(1, 2)
        if self.layout == "unaligned":
            tensor = torch.cat([tensor, tensor[..., :1]], -1)[..., :-1]
        return tensor


@contextlib.contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Torch's switch for float32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def compile_ahead(pairs: Iterable[tuple[Specialization, Config]], device: Device) -> None:
    """Compile kernels in as many processes as there are cores, so that this one finds them in Triton's cache.

    A kernel that does not compile is left to the test that needs it. Workers of a parallel run do not even ask for
    `pairs`: side by side they compile as fast, each what it needs, and not everything each.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    pairs = list(dict.fromkeys(pairs))
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(pairs))
    if processes < 2:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in [pool.submit(_compile, spec, config, device) for spec, config in pairs]:
            future.exception()


def _compile(spec: Specialization, config: Config, device: Device) -> None:
    compile_kernel(spec, config, device)
