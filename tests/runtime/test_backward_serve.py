"""Backward passes through the ladder: what is looked up, compiled and remembered, what a process says and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.families import default_config
from flashgen.core.config import Config
from flashgen.core.errors import BuildError, ConfigError, LaunchError, UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization, Workload
from flashgen.runtime.autograd import ops as training_ops
from flashgen.runtime.ops import serve
from tests.db.samples import H200
from tests.fakes.gpu import EmulatedGpu, FakeGpu, qkv
from tests.logged import Logged
from tests.runtime.ladders import Ladder, faster, measured

BACKWARD = Workload.parse("bwd-b1-h4-hk2-sq48-sk64-d64")


@pytest.fixture(autouse=True)
def gpu(emulated: EmulatedGpu) -> EmulatedGpu:
    return emulated


def plain(**changes: Any) -> list[torch.Tensor]:
    """Leaves on the CPU, which the emulated GPU takes."""
    return [x.as_subclass(torch.Tensor).requires_grad_() for x in qkv(**changes)]


def train(*inputs: torch.Tensor, **arguments: Any) -> None:
    flashgen.attention(*(inputs or plain()), **arguments).float().sum().backward()


def backward_default(**changes: Any) -> Config:
    return default_config(Specialization.of(replace(BACKWARD, **changes)), H200)


def other_config(workload: Workload = BACKWARD) -> Config:
    """A valid config that is not the default one: of another family."""
    from flashgen.codegen.families import applicable

    spec = workload.specialization
    return next(row.default(spec, H200) for row in reversed(applicable(spec, H200)))


def recorded(workload: Workload = BACKWARD, **changes: Any) -> Any:
    return measured(workload, **{"config": other_config(workload), **changes})


def test_a_repeated_call_is_prepared_once_each_way(gpu: EmulatedGpu) -> None:
    for _ in range(3):
        train()
    assert len(gpu.planned) == len(gpu.planned_backward) == 1
    assert len(gpu.launched) == len(gpu.launched_backward) == 3
    assert [spec.key for spec, _ in gpu.compiled] == ["fwd-bf16-d64", "bwd-bf16-d64"]
    expected = backward_default().replace(block_m=64, dq_conversion="none", stagger_warpgroups=False)
    assert gpu.compiled[1][1] == expected, "there are few queries, and one tile has all keys"


def test_a_config_for_fewer_keys_is_refused_and_a_record_of_it_passed_over(gpu: EmulatedGpu, ladder: Ladder) -> None:
    few = backward_default().replace(dq_conversion="none")
    ladder.user(recorded(replace(BACKWARD, seqlen_k=200), config=few))
    q, k, v = plain(seqlen_k=200)
    why = "it is for at most 128 keys, got 200"
    with pytest.raises(ConfigError, match=f"cannot serve bwd-bf16-d64 on NVIDIA H200: {why}"):
        flashgen.explain(q, k, v, direction="backward", config=few)
    shown = flashgen.explain(q, k, v, direction="backward")
    assert any(why in line for line in shown.served.skipped)
    train(q, k, v)
    assert gpu.planned_backward[-1][1] == shown.served.config == backward_default().replace(block_m=64)


def test_training_and_a_call_with_its_lse_share_a_plan(gpu: EmulatedGpu) -> None:
    train()
    with torch.no_grad():
        flashgen.attention(*plain(), return_lse=True)
    assert len(gpu.planned) == 1
    flashgen.reload()
    with torch.no_grad():
        flashgen.attention(*plain(), return_lse=True)
    train()
    assert len(gpu.planned) == 2


def bias(*shape: int, requires_grad: bool = True) -> dict[str, Any]:
    return {"bias": torch.zeros(shape, requires_grad=requires_grad)}


KEYS: dict[str, Callable[[], Any]] = {
    "the usual": train,
    "batch": lambda: train(*plain(batch=2)),
    "length of q": lambda: train(*plain(seqlen_q=49)),
    "length of k": lambda: train(*plain(seqlen_k=65)),
    "causal": lambda: train(causal=True),
    "an offset": lambda: train(causal=True, q_offset=3),
    "an offset tensor": lambda: train(causal=True, q_offset=torch.zeros(1, dtype=torch.int32)),
    "window": lambda: train(window=(8, None)),
    "softcap": lambda: train(softcap=3.0),
    "slopes": lambda: train(alibi_slopes=torch.ones(4)),
    "sinks": lambda: train(sinks=torch.zeros(4)),
    "sinks with a gradient": lambda: train(sinks=torch.zeros(4, requires_grad=True)),
    "bias": lambda: train(**bias(48, 64, requires_grad=False)),
    "bias with a gradient": lambda: train(**bias(48, 64)),
    "bias of keys": lambda: train(**bias(64)),
    "mask": lambda: train(mask=torch.ones(48, 64, dtype=torch.bool)),
    "deterministic": lambda: train(deterministic=True),
    "half": lambda: train(*(x.detach().half().requires_grad_() for x in plain())),
    "bshd": lambda: train(*(x.transpose(1, 2) for x in plain()), layout="bshd"),
    "strides of v": lambda: train(*plain()[:2], torch.zeros(1, 64, 2, 64).bfloat16().transpose(1, 2).requires_grad_()),
}


def test_whatever_chooses_code_is_in_the_key(gpu: EmulatedGpu) -> None:
    for number, call in enumerate(KEYS.values(), start=1):
        call()
        assert len(gpu.planned_backward) == number
    for call in KEYS.values():
        call()
    assert len(gpu.planned_backward) == len(KEYS)
    assert len(gpu.launched_backward) == 2 * len(KEYS)


def test_values_and_the_gradient_of_the_lse_are_not(gpu: EmulatedGpu) -> None:
    for scale in (None, 0.1, 2.0):
        train(softmax_scale=scale)
    for cap in (1.0, 30.0):
        train(softcap=cap)
    for offset in (0, -5):
        train(causal=True, q_offset=offset)
    out, lse = flashgen.attention(*plain(), return_lse=True)
    (out.float().sum() + lse.sum()).backward()
    assert len(gpu.planned_backward) == 3
    made = gpu.launched_backward
    assert [done.scale for done in made[:3]] == [None, 0.1, 2.0]
    assert [done.features.softcap for done in made[3:5]] == [1.0, 30.0]
    assert [done.offset for done in made[5:7]] == [0, -5]
    assert [done.pointers["dlse"] != 0 for done in made] == [False] * 7 + [True]


def test_the_gradient_chooses_whether_it_is_copied_and_that_is_in_the_key(gpu: EmulatedGpu) -> None:
    out = flashgen.attention(*plain())
    shifted = torch.ones(out.numel() + 1, dtype=out.dtype)[1:].view(out.shape)
    for gradient in (torch.ones((), dtype=out.dtype).expand_as(out), torch.ones_like(out), shifted):
        out.backward(gradient, retain_graph=True)
    assert len(gpu.planned_backward) == 3
    first, *others = [geometry for _, _, geometry, _ in gpu.planned_backward]
    assert all(geometry == first for geometry in others)


def test_a_record_of_the_class_serves(gpu: EmulatedGpu, ladder: Ladder) -> None:
    ladder.user(recorded())
    train()
    train(*plain(seqlen_q=100, seqlen_k=100))  # the nearest
    train(deterministic=True)  # another class
    made = [config for _, config, _, _ in gpu.planned_backward]
    assert made == [other_config(), other_config(), backward_default(deterministic=True)]


def test_sdpa_never_serves_what_trains(gpu: EmulatedGpu, ladder: Ladder) -> None:
    forward = replace(BACKWARD, direction="forward")
    ladder.user(measured(forward, config=default_config(forward.specialization, H200), baselines=faster("sdpa-flash")))
    ladder.user(recorded(baselines=faster("sdpa-flash")))
    train()
    assert len(gpu.launched) == len(gpu.launched_backward) == 1


@pytest.fixture
def torch_is_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("by_torch", [False, True])
def test_deterministic_asks_for_sums_in_a_fixed_order(
    by_torch: bool, gpu: EmulatedGpu, request: pytest.FixtureRequest
) -> None:
    from flashgen.codegen.families import family

    if by_torch:
        request.getfixturevalue("torch_is_deterministic")
    train(deterministic=not by_torch)
    train(**({} if by_torch else {"deterministic": True}), softcap=2.0)
    for spec, config, _, _ in gpu.planned_backward:
        assert spec.deterministic
        assert family(config.family).is_deterministic
    shown = flashgen.explain(*plain(), direction="backward", deterministic=not by_torch)
    assert shown.workload.key.endswith("-deterministic")


def test_a_forward_pass_without_a_backward_pass_fails_at_once(gpu: EmulatedGpu) -> None:
    inputs = [x.float().detach() for x in plain(dim=512)]
    with torch.no_grad():
        flashgen.attention(*inputs)
    inputs = [torch.cat([x] * 2, -1).requires_grad_() for x in inputs]
    with pytest.raises(UnsupportedError, match=r"fwd-fp32-d1024.*portable_forward: its head_dim"):
        flashgen.attention(*inputs)


def test_the_reason_is_that_of_the_backward_pass(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.codegen import families

    real = families.unsupported
    monkeypatch.setattr(
        families,
        "unsupported",
        lambda row, spec, device: "too large" if spec.direction == "backward" else real(row, spec, device),
    )
    with pytest.raises(UnsupportedError, match=r"no kernel family serves bwd-bf16-d64 .*split: too large"):
        flashgen.attention(*plain())
    assert gpu.launched == []
    with torch.no_grad():
        flashgen.attention(*plain())


def test_on_a_cpu_every_family_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "gpu_index", lambda tensor: None)
    q, k, v = plain()
    with pytest.raises(UnsupportedError, match=r"no kernel family serves fwd-bf16.* on cpu: all of them run on GPUs"):
        flashgen.attention(q, k, v)
    out, lse = torch.empty_like(q), torch.empty(1, 4, 48)
    with pytest.raises(UnsupportedError, match=r"no kernel family serves bwd-bf16.* on cpu: all of them run on GPUs"):
        training_ops.attention_backward_op(out, None, q.detach(), k.detach(), v.detach(), out.detach(), lse)


@pytest.mark.parametrize("name", ["out", "dout", "strides"])
def test_rules_of_the_backward_op(name: str) -> None:
    q, k, v = (x.detach() for x in plain())
    tensors = {"out": torch.empty_like(q), "dout": torch.empty_like(q)}
    if name == "strides":
        tensors["out"] = tensors["out"].mT.contiguous().mT
        message = "the last dimension is contiguous, got out with strides"
    else:
        tensors[name] = tensors[name][:, :2] if name == "out" else tensors[name].half()
        message = rf"out and dout are \(1, 4, 48, 64\) in the dtype of q on its device, got {name} "
    with pytest.raises(WorkloadError, match=message):
        training_ops.attention_backward_op(tensors["dout"], None, q, k, v, tensors["out"], torch.empty(1, 4, 48))


def test_one_notice_a_direction(gpu: EmulatedGpu, logged: Logged) -> None:
    for length in (48, 49):
        train(*plain(seqlen_q=length), causal=True, deterministic=True)
    forward, backward = logged.messages
    assert "no tuned record for NVIDIA H200" in forward
    assert backward.startswith("flashgen: no tuned record of a backward pass for NVIDIA H200 (sm90-132sm-141gb); the")
    shape = "bwd-bf16-b1-h4-hk2-sq48-sk64-d64-causal-deterministic"
    assert f"flashgen tune --shape {shape}  (about" in backward
    assert Workload.parse(shape).key == shape


def test_a_compile_in_a_backward_pass_can_be_forbidden(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    settings.cache_clear()
    flashgen.warmup(["b1-h4-hk2-s64-d64"])
    out = flashgen.attention(*plain())
    with pytest.raises(BuildError, match=r"FLASHGEN_NO_COMPILE forbids .* for bwd-bf16-d64 .*warmup"):
        out.float().sum().backward()
    flashgen.warmup(["bwd-b1-h4-hk2-s64-d64"])
    train()
    directions = [spec.direction for spec, _ in gpu.compiled]
    # with shared keys and without, and for few queries; with two heads of a group in a tile, and with one, each in
    # steps of 64 and of 128 queries, with sums of dq; and where the tile has all keys
    assert directions == ["forward"] * 3 + ["backward"] * 5


def test_nothing_is_built_while_a_graph_is_captured(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    train()
    with torch.no_grad():
        flashgen.attention(*plain(), causal=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        train()
        train(*plain(seqlen_k=77))  # kernels that are there serve new shapes
        with pytest.raises(LaunchError, match=r"building the kernel for bwd-bf16-d64-causal is not possible .*warmup"):
            train(causal=True)
    assert len(gpu.compiled) == 3


@pytest.mark.parametrize("stage", ["flashgen.codegen.build.compile_kernel", "flashgen.launch.plan.make_backward_plan"])
def test_a_record_that_cannot_be_built_here_leaves_the_call_to_the_default(
    stage: str, gpu: EmulatedGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder.user(recorded())
    config, real = other_config(), getattr(gpu, stage.rsplit(".", 1)[1])

    def strict(*arguments: Any) -> Any:
        if config in arguments:
            raise BuildError("too much shared memory")
        return real(*arguments)

    monkeypatch.setattr(stage, strict)
    with pytest.warns(UserWarning, match=r"record bwd-bf16-b1-h4.*cannot serve here and the default config does"):
        train()
    train()
    assert [made for _, made, _, _ in gpu.planned_backward] == [backward_default()]


def test_a_failure_is_not_remembered(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise BuildError("ptxas failed")

    out = flashgen.attention(*plain())
    known = dict(serve.MEMO)
    with monkeypatch.context() as patch:
        patch.setattr("flashgen.launch.plan.make_backward_plan", broken)
        with pytest.raises(BuildError, match="ptxas failed"):
            out.float().sum().backward()
    assert known == serve.MEMO
    train()


def test_tf32_products_where_a_family_has_them(gpu: EmulatedGpu) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        train(*(x.detach().float().requires_grad_() for x in plain()))
        assert gpu.planned_backward[-1][0].dtype == "tf32"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        train(*(x.detach().float().requires_grad_() for x in plain()))
        assert gpu.planned_backward[-1][0].dtype == "fp32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def lower(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return q_idx >= k_idx


def test_explain_answers_for_a_backward_pass(gpu: EmulatedGpu, ladder: Ladder) -> None:
    ladder.user(recorded(baselines=faster("sdpa-cudnn")))
    q, k, v = plain()
    shown = flashgen.explain(q, k, v, direction="backward")
    assert shown.workload == BACKWARD
    assert (shown.served.rung, shown.served.config, shown.backend) == (3, other_config(), "generated")
    assert "family     portable_forward: it computes the forward pass, not backward" in str(shown)
    assert dict(shown.families)[other_config().family] is None
    swapped = flashgen.explain(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", direction="backward")
    assert swapped.workload == BACKWARD
    with_bias = flashgen.explain(q, k, v, direction="backward", sinks=torch.zeros(4), **bias(48, 64))
    assert (with_bias.specialization.bias_grad, with_bias.specialization.sink) == (True, False)
    constant = flashgen.explain(q, k, v, direction="backward", **bias(48, 64, requires_grad=False))
    assert not constant.specialization.bias_grad
    chosen = flashgen.explain(q, k, v, direction="backward", config=backward_default())
    assert chosen.served.rung == 1
    with pytest.raises(flashgen.ConfigError, match="computes the backward pass, not forward"):
        flashgen.explain(q, k, v, config=backward_default())
    hidden = flashgen.explain(q, k, v, direction="backward", mask_mod=lower)
    assert hidden.served.config.family == "hopper_backward_fused"
    assert dict(hidden.families)["portable_backward_fused"] is None
    with pytest.raises(WorkloadError, match="direction is forward or backward, got 'both'"):
        flashgen.explain(q, k, v, direction="both")
    assert gpu.compiled == []


def test_explain_says_what_serves(gpu: EmulatedGpu, ladder: Ladder) -> None:
    ladder.user(recorded())
    for arguments in ({}, {"causal": True}, {"deterministic": True}, bias(48, 64), {"softcap": 1.0, **bias(64)}):
        shown = flashgen.explain(*plain(), direction="backward", **arguments)
        train(**arguments)
        spec, config, _, _ = gpu.planned_backward[-1]
        assert (shown.specialization, shown.served.config) == (spec, config)


def test_a_warm_up_for_training_compiles_what_training_needs(gpu: EmulatedGpu, ladder: Ladder) -> None:
    ladder.user(recorded())
    keys = ["b1-h4-hk2-sq48-sk64-d64", "b1-h4-hk2-sq48-sk64-d64-causal-sink-bias"]
    # both forward passes, the plain one with shared keys and for few queries, too; two configs of the plain backward
    # pass, one of them with one head of a group in a tile, too, and in steps of 64 queries, with sums of dq, and one of
    # tiles that have all keys; the bias with a gradient and without
    assert flashgen.warmup(keys, training=True) == 4 + 6 + 2
    before = len(gpu.compiled)
    train()
    half = torch.zeros(48, 64, dtype=torch.bfloat16)
    train(causal=True, sinks=torch.zeros(4), bias=half)
    train(causal=True, sinks=torch.zeros(4, requires_grad=True), bias=half.clone().requires_grad_())
    assert len(gpu.compiled) == before
    assert flashgen.warmup(["bwd-b1-h4-s64-d64-causal-deterministic"]) == 1
    assert flashgen.warmup(["b1-h4-s64-d64-causal"], training=True, offset_tensor=True) == 12
    made = {spec.key for spec, _ in gpu.compiled}
    assert {"bwd-bf16-d64-causal-deterministic", "bwd-bf16-d64-causal-offset"} <= made


@pytest.mark.usefixtures("torch_is_deterministic")
def test_a_warm_up_follows_torch_s_switch(gpu: EmulatedGpu) -> None:
    assert flashgen.warmup(["b1-h4-s64-d64"], training=True) == 3
    assert "bwd-bf16-d64-deterministic" in {spec.key for spec, _ in gpu.compiled}


def test_tensors_of_a_subclass_train(gpu: EmulatedGpu) -> None:
    fake: FakeGpu = gpu
    inputs = [x.requires_grad_() for x in qkv()]
    flashgen.attention(*inputs).float().sum().backward()
    assert len(fake.launched_backward) == 1
    assert all(x.grad is not None for x in inputs)
