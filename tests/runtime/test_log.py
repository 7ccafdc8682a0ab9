"""What a process says: the notice of calls without a record, the rung of each, and its compiles."""

from __future__ import annotations

import logging
import re

import pytest

import flashgen
from flashgen.codegen.families import usual
from flashgen.codegen.family import Sizes
from flashgen.core.settings import settings
from flashgen.runtime.ops import log
from flashgen.runtime.ops.calls import CheckedCall
from tests.db.samples import H100, H200
from tests.fakes.gpu import FakeGpu, qkv
from tests.logged import Logged, at_level
from tests.runtime.ladders import CAUSAL, Ladder, default, measured, predicted


def test_the_notice_is_one_line_once_with_the_command_to_run(gpu: FakeGpu, logged: Logged) -> None:
    for length in (48, 49):
        flashgen.attention(*qkv(seqlen_q=length), causal=True)
    flashgen.attention(*(x.half() for x in qkv()))
    (record,) = logged.records
    assert (record.name, record.levelname) == ("flashgen", "WARNING")
    line = record.getMessage()
    assert line.startswith("flashgen: no tuned record for NVIDIA H200 (sm90-132sm-141gb); the default config serves.")
    shape = "bf16-b1-h4-hk2-sq48-sk64-d64-causal"
    assert line.endswith(f"flashgen tune --shape {shape}  (about {log.TUNE_SECONDS_PER_WORKLOAD} s)")
    assert flashgen.Workload.parse(shape) == CheckedCall.of(gpu.prepared[0]).workload
    flashgen.reload()
    flashgen.attention(*qkv())
    assert len(logged.records) == 2


def test_rungs_and_compiles_are_logged_once_and_a_repeated_call_logs_nothing(
    gpu: FakeGpu, ladder: Ladder, logged: Logged
) -> None:
    ladder.user(measured())
    with at_level(logging.DEBUG, "flashgen"):
        tensors = qkv(batch=2, nheads=4, seqlen_q=64, dim=128)
        flashgen.attention(*tensors, causal=True)
        said = [(record.levelname, record.getMessage()) for record in logged.records]
        flashgen.attention(*tensors, causal=True)
    assert said == [(record.levelname, record.getMessage()) for record in logged.records]
    (level, rung), (other, compiled) = said
    assert (level, other) == ("DEBUG", "INFO")
    assert re.search(rf" is served by rung [35], .*: {re.escape(str(gpu.planned[0][1]))}$", rung), rung
    assert re.fullmatch(rf"compiled {re.escape(str(gpu.planned[0][1]))} for fwd-\S+ in \d+\.\d\d s", compiled), compiled


@pytest.mark.parametrize("kind", ["exact", "nearest", "another device", "predicted", "quiet"])
def test_there_is_no_notice_where_a_record_serves_or_nobody_wants_it(
    kind: str,
    gpu: FakeGpu,
    ladder: Ladder,
    capsys: pytest.CaptureFixture[str],
    logged: Logged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = CAUSAL.with_shape(batch=1, nheads=4, nheads_k=2, seqlen_q=80, seqlen_k=80)
    record = {
        "exact": measured(shape),
        "nearest": measured(),
        "another device": measured(device=H100),
        "predicted": predicted(),
    }.get(kind)
    if record is None:
        monkeypatch.setenv("FLASHGEN_QUIET", "1")
        settings.cache_clear()
    else:
        ladder.user(record)
    flashgen.attention(*qkv(seqlen_q=80, seqlen_k=80, dim=128), causal=True)
    expected = usual(default(shape), shape.specialization, Sizes.of(shape), H200)
    assert gpu.planned[0][1] == (record.config if record else expected)
    assert (capsys.readouterr().err, logged.records) == ("", [])
