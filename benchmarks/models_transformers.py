"""Tokens per second of models of transformers, by attention: writes `results/<device>/models_transformers.csv`.

    python -m benchmarks.models_transformers [--model llama-3-8b] [--rounds 5] [--append] [--limit-seconds 150]
                                             [--reference]

Models have random weights, and nothing is downloaded: eight layers of Llama-3-8B, GPT-2 and BERT-base. One model of
each changes its attention between calls. Implementations take turns, each call is timed with the GPU idle before and
behind it, and the median of the rounds counts. flashgen serves as it does for a user, by shipped records and the
fallback.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

import flashgen
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.forward import say
from benchmarks.opened import opened, usage_of
from benchmarks.provenance import Provenance, add_arguments
from benchmarks.results import WHOLE_MODEL_COLUMNS, ResultsFile, Row
from benchmarks.time_limit import TimeLimit
from flashgen.integrations.transformers import register, unregister

SUITE = "transformers-"
"""Before the name of a model."""

NEW_TOKENS = 64
ATTENTIONS = {
    "flashgen": "fgen",
    "sdpa": "sdpa",
    "flash_attention_2": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
    "eager": "eager",
}
"""Implementations by the names that rows have, and transformers' words for them."""

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its sizes, and what of it is timed."""

    architecture: str
    settings: dict[str, Any]
    batch: int
    seqlen: int
    whats: tuple[str, ...] = ("forward", "forward+backward", "generate")

    def made(self, device: str) -> Any:
        """The model in bf16, or in float32 on a CPU."""
        kind = getattr(transformers, self.architecture)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with torch.device(device):
            return kind._from_config(kind.config_class(**self.settings), dtype=dtype, attn_implementation="sdpa")

    def tokens(self, what: str) -> int:
        """Those that one call is counted for."""
        return self.batch * (NEW_TOKENS if what == "generate" else self.seqlen)


LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "eos_token_id": None,
}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": None, "pad_token_id": 0}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CASES = {
    "llama-3-8b": Case(architecture="LlamaForCausalLM", settings=LLAMA, batch=1, seqlen=8000),
    "gpt2": Case(architecture="GPT2LMHeadModel", settings=GPT2, batch=8, seqlen=960),
    "bert": Case(
        architecture="BertForMaskedLM", settings=BERT, batch=16, seqlen=512, whats=("forward", "forward+backward")
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen could not run a case, 3 if the time limit came first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models_transformers")
    add_arguments(parser)
    parser.add_argument("--model", action="append", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="calls of each implementation (default: %(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no race that would end later")
    parser.add_argument(
        "--reference", action="store_true", help="tiny models on the CPU: shows that it runs, and writes nothing"
    )
    options = parser.parse_args(arguments)
    names = options.model or list(CASES)
    if options.reference:
        for name in names:
            for what in CASES[name].whats:
                for impl, found in raced(small(CASES[name]), what, options.rounds, "cpu").items():
                    say(f"{name} {what} {impl}: {found.reason or 'it runs'}")
        return 0
    with usage_of(parser):
        provenance, file = opened(options, "models_transformers", WHOLE_MODEL_COLUMNS)
    limit = TimeLimit(options.limit_seconds, time.monotonic)
    return measured(names, file, provenance, limit, rounds=options.rounds, device="cuda")


def measured(
    names: Sequence[str],
    file: ResultsFile,
    provenance: Provenance,
    limit: TimeLimit,
    *,
    rounds: int,
    device: str,
    cases: dict[str, Case] = CASES,
) -> int:
    """Race what the file does not have, and write the rows of each race as soon as it is over; an exit code."""
    done, missing = file.done(provenance.commit), False
    for name, what in [(one, what) for one in names for what in cases[one].whats]:
        case = cases[name]
        workload = f"{what}-b{case.batch}-s{case.seqlen}"
        if any(subject[:2] == (SUITE + name, workload) for subject in done):
            continue
        if not limit.has_room():
            say("stopped at the time limit: run again with --append")
            return STOPPED
        found = raced(case, what, rounds, device)
        limit.part_ended()
        file.write(_row(provenance, name, workload, impl, one, case.tokens(what)) for impl, one in found.items())
        missing |= found["flashgen"].seconds is None
        for impl, one in found.items():
            said = one.reason if one.seconds is None else f"{case.tokens(what) / one.seconds:.0f} tokens/s"
            say(f"{name} {workload} {impl}: {said}")
    print(f"{file.path}: {len(file.rows)} rows")
    return MISSING if missing else 0


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The median time of a call and the most memory that was allocated in one, or the reason why there is none."""

    seconds: float | None = None
    peak_gib: float | None = None
    reason: str = ""


def small(case: Case) -> Case:
    """The same with two layers and few tokens and columns."""
    if "GPT2" in case.architecture:
        layers = {"n_layer": 2, "n_embd": 64, "n_head": 4}
    else:
        layers = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    grouped = {"num_key_value_heads": 2} if "num_key_value_heads" in case.settings else {}
    return replace(case, settings=case.settings | layers | grouped | {"vocab_size": 1000}, batch=2, seqlen=16)


def raced(case: Case, what: str, rounds: int, device: str) -> dict[str, Timed]:
    """What each implementation that there is takes."""
    register(reference=device == "cpu")
    try:
        model = case.made(device).train(what == "forward+backward")
        run = step(model, what, torch.randint(3, 1000, (case.batch, case.seqlen), device=device))
        return _raced(model, run, rounds, device)
    finally:
        unregister()


def _raced(model: Any, run: Step, rounds: int, device: str) -> dict[str, Timed]:
    times: dict[str, list[float]] = {impl: [] for impl in available()}
    peaks: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for number in range(rounds + 1):  # the first one compiles
        for impl in times:
            if impl in reasons:
                continue
            try:
                seconds, peaks[impl] = timed(model, ATTENTIONS[impl], run, device)
            except (RuntimeError, ValueError, ImportError) as error:
                is_memory = isinstance(error, torch.OutOfMemoryError)
                reasons[impl] = (
                    "out of memory" if is_memory else f"{type(error).__name__}: {error}".split("\n")[0][:160]
                )
            else:
                times[impl] += [seconds] if number else []
    return {
        impl: Timed(reason=reasons[impl])
        if impl in reasons
        else Timed(seconds=statistics.median(found), peak_gib=peaks[impl])
        for impl, found in times.items()
    }


def available() -> Iterator[str]:
    """The implementations that this machine has."""
    absent = {
        "flash_attention_2": not is_flash_attn_2_available(),
        "flash_attention_3": not is_flash_attn_3_available(),
    }
    return (impl for impl in ATTENTIONS if not absent.get(impl, False))


def timed(model: Any, attention: str, run: Step, device: str) -> tuple[float, float]:
    """Seconds of one call, and the most GiB that were allocated in it."""
    model.set_attn_implementation(attention)
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def step(model: Any, what: str, ids: torch.Tensor) -> Step:
    """What is timed: a forward pass, one with a loss and a backward pass, or generated tokens behind a prompt."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def train() -> None:
        model(**inputs, labels=ids).loss.backward()

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)

    def generate() -> None:
        model.generate(**inputs, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False)

    return {"forward": forward, "forward+backward": train, "generate": generate}[what]


def _row(provenance: Provenance, name: str, workload: str, impl: str, found: Timed, tokens: int) -> Row:
    version = flashgen.__version__ if impl == "flashgen" else torch.__version__
    return Row(
        suite=SUITE + name,
        workload=workload,
        impl=impl,
        impl_version=f"{version} transformers {transformers.__version__}",
        outcome=found.reason,
        median_ms=None if found.seconds is None else found.seconds * 1e3,
        tokens_per_s=None if found.seconds is None else tokens / found.seconds,
        peak_gib=found.peak_gib,
        device=provenance.device,
        torch=provenance.torch,
        triton=provenance.triton,
        commit=provenance.commit,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


if __name__ == "__main__":
    sys.exit(main())
