"""Tokens per second of models of transformers, flashgen beside SDPA: writes `results/<device>/models_transformers.csv`.

python -m benchmarks.models_transformers [--model llama] [--rounds 5] [--reference]

Models have random weights and the sizes of Llama-3.2-1B, GPT-2 and BERT-base; nothing is downloaded. Implementations
take turns, each round is timed with the GPU idle before it, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.provenance import RESULTS, Provenance
from flashgen.integrations.transformers import register, unregister

COLUMNS = ("model", "phase", "batch", "seqlen", "impl", "tokens_per_second", "gpu", "torch", "transformers", "commit")
NEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its sizes, and what of it is timed."""

    architecture: str
    settings: dict[str, Any]
    batch: int
    seqlen: int
    phases: tuple[str, ...] = ("prefill", "train", "decode")

    def made(self, attention: str, device: str) -> Any:
        """The model in bf16, or in float32 on a CPU."""
        kind = getattr(transformers, self.architecture)
        torch.manual_seed(0)
        model = kind._from_config(kind.config_class(**self.settings), attn_implementation=attention)
        return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "eos_token_id": None,
}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": None, "pad_token_id": 0}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CASES = {
    "llama": Case(architecture="LlamaForCausalLM", settings=LLAMA, batch=2, seqlen=4096),
    "gpt2": Case(architecture="GPT2LMHeadModel", settings=GPT2, batch=8, seqlen=960),
    "bert": Case(architecture="BertForMaskedLM", settings=BERT, batch=16, seqlen=512, phases=("prefill", "train")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models_transformers")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git to ask")
    parser.add_argument("--model", action="append", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--reference", action="store_true", help="two layers on the CPU: shows that it runs, no figures"
    )
    options = parser.parse_args(arguments)
    register(reference=options.reference)
    try:
        rows = [
            (name, phase, case.batch, case.seqlen, impl, f"{rate:.0f}")
            for name in options.model or CASES
            for case in [small(CASES[name]) if options.reference else CASES[name]]
            for phase in case.phases
            for impl, rate in raced(case, phase, options.rounds, "cpu" if options.reference else "cuda").items()
        ]
    finally:
        unregister()
    for row in rows:
        print(*row)
    if not options.reference:
        write(options.results, Provenance.here(options.commit), rows)
    return 0


def small(case: Case) -> Case:
    """The same with few layers, tokens and columns."""
    layers = (
        {"n_layer": 2, "n_embd": 64, "n_head": 4}
        if "GPT2" in case.architecture
        else {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
        }
    )
    settings = case.settings | layers | ({"num_key_value_heads": 2} if "Llama" in case.architecture else {})
    return Case(architecture=case.architecture, settings=settings, batch=2, seqlen=16, phases=case.phases)


def raced(case: Case, phase: str, rounds: int, device: str) -> dict[str, float]:
    """Tokens per second of each implementation."""
    ids = torch.randint(3, 1000, (case.batch, case.seqlen), device=device)
    mask = torch.ones_like(ids)
    steps = {impl: step(case.made(impl, device), phase, ids, mask) for impl in ("fgen", "sdpa")}
    tokens = case.batch * (NEW_TOKENS if phase == "decode" else case.seqlen)
    times: dict[str, list[float]] = {impl: [] for impl in steps}
    for number in range(rounds + 1):  # the first one compiles
        for impl, run in steps.items():
            wait(device)
            begin = time.perf_counter()
            run()
            wait(device)
            if number:
                times[impl].append(time.perf_counter() - begin)
    return {impl: tokens / statistics.median(found) for impl, found in times.items()}


def step(model: Any, phase: str, ids: torch.Tensor, mask: torch.Tensor) -> Callable[[], None]:
    """What is timed: a forward pass, a forward and a backward pass, or generated tokens behind a prompt."""
    inputs = {"input_ids": ids, "attention_mask": mask}

    def train() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs, labels=ids).loss.backward()

    def prefill() -> None:
        with torch.no_grad():
            model(**inputs)

    def decode() -> None:
        model.generate(**inputs, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False)

    model.train(phase == "train")
    return {"train": train, "prefill": prefill, "decode": decode}[phase]


def wait(device: str) -> None:
    """Until the GPU is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def write(results: Path, provenance: Provenance, rows: list[tuple[Any, ...]]) -> None:
    """The table of these rows."""
    path = results / provenance.slug / "models_transformers.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    where = (torch.cuda.get_device_name(), torch.__version__, transformers.__version__, provenance.commit)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *((*row, *where) for row in rows)])


if __name__ == "__main__":
    sys.exit(main())
