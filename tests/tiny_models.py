"""Models of transformers with two layers and random weights, and calls of them; nothing is downloaded.

Windows are shorter than the sequences, heads are grouped where a model has that, and of every call the first sequence
is padded: in front, as for generation, or behind where a model asks for that.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

Tensor = torch.Tensor

VOCABULARY, SEQLEN, BATCH, PADDING = 64, 11, 2, 4

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A class of transformers, its configuration, and a call of it."""

    name: str
    architecture: str
    config: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    generates: bool = True
    static: bool = True
    logits: Callable[[Any], Tensor] = field(default=lambda out: out.logits)

    def made(self, attention: str, dtype: torch.dtype, device: str = "cpu") -> Any:
        """The model with weights that are the same for every attention and dtype."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        model = getattr(transformers, self.architecture)._from_config(config, attn_implementation=attention)
        generator = torch.Generator().manual_seed(1)
        for weight in model.parameters():  # zeros, which some begin with, would hide what is wrong
            if not weight.any():
                weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products are not there in float64
        return model.to(device=device, dtype=dtype).eval()

    def called(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
        """Inputs for a model of a dtype."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs().items()}
        return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Eager attention of models computes its softmax in float32, whatever they are in; here it does not."""
    plain = torch.nn.functional.softmax

    def softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        return plain(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype)

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = plain


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a call gave, in float64: logits of tokens that are no padding, and gradients of a loss of them."""

    logits: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, model: TinyModel, attention: str, dtype: torch.dtype, device: str = "cpu") -> Results:
        """Forward and backward pass of a model with an attention."""
        made, inputs = model.made(attention, dtype, device), model.called(dtype, device)
        logits = model.logits(made(**inputs))
        mask = inputs.get("attention_mask")
        if mask is not None and mask.shape == logits.shape[:2]:
            logits = logits[mask.bool()]
        logits.float().square().mean().backward() if dtype != torch.float64 else logits.square().mean().backward()
        found = {name: weight.grad.double() for name, weight in made.named_parameters() if weight.grad is not None}
        return cls(logits=logits.detach().double(), gradients=found)

    def check(self, plain: Results, exact: Results, dtype: torch.dtype, fused: Results | None = None) -> None:
        """Errors are at most twice (of gradients thrice) those of eager attention, plus two units of the largest.

        Of gradients, `fused` attention's count where they are larger: see flashgen/integrations/model/proof.py.

        That of a bias may be one of its weight: the same bias for all keys changes no softmax, and what the gradient
        sums to instead of zero is rounding. A single number has one error, which is as small as chance has it: the
        median of eager attention's relative errors counts there, where that is larger.
        """
        assert self.gradients.keys() == exact.gradients.keys()
        _check("logits", 2, self.logits, plain.logits, exact.logits, dtype)
        for name, gradient in exact.gradients.items():
            weight = exact.gradients.get(name.removesuffix("bias") + "weight", gradient)
            largest = torch.maximum(gradient.abs().max(), weight.abs().max())
            others = [one.gradients[name] for one in (plain, fused) if one is not None]
            usual = max(others, key=lambda one: float((one - gradient).abs().max()))
            if gradient.numel() == 1:
                usual = gradient + torch.maximum((usual - gradient).abs(), plain.relative_error(exact) * gradient.abs())
            _check(name, 3, self.gradients[name], usual, gradient, dtype, largest)

    def relative_error(self, exact: Results) -> float:
        """The median over gradients of the largest error over the largest number."""
        several = {name: one for name, one in exact.gradients.items() if one.numel() > 1 and bool(one.any())}
        return statistics.median(
            float((self.gradients[name] - one).abs().max() / one.abs().max()) for name, one in several.items()
        )


def _check(
    name: str,
    factor: int,
    found: Tensor,
    plain: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    largest: Tensor | None = None,
) -> None:
    assert found.isfinite().all(), name
    largest = exact.abs().max() if largest is None else largest
    own, usual = (found - exact).abs().max(), (plain - exact).abs().max()
    allowed = factor * usual + 2 * torch.finfo(dtype).eps * largest
    assert own <= allowed, f"{name}: off by {own:.3g} of {largest:.3g}, attention of torch by {usual:.3g}"


def _tokens(seed: int = 0, seqlen: int = SEQLEN) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, seqlen), generator=torch.Generator().manual_seed(seed))


def _padded(*, behind: bool = False) -> dict[str, Tensor]:
    mask = torch.ones(BATCH, SEQLEN, dtype=torch.long)
    mask[0, SEQLEN - PADDING :] = 0
    mask = mask if behind else mask.flip(1)
    return {"input_ids": _tokens(), "attention_mask": mask}


def _images(side: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, side, side, generator=torch.Generator().manual_seed(2))}


def _speech() -> dict[str, Tensor]:
    features = torch.randn(BATCH, 8, 24, generator=torch.Generator().manual_seed(3))
    return {"input_features": features, "decoder_input_ids": _tokens(seqlen=7)}


def _decoder(name: str, prefix: str, settings: dict[str, Any], **others: Any) -> TinyModel:
    return TinyModel(
        name=name,
        architecture=f"{prefix}{others.pop('head', 'ForCausalLM')}",
        config=f"{others.pop('config', prefix)}Config",
        settings=settings,
        inputs=_padded,
        **others,
    )


DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
OPT = {**SIZES, "ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 64}
T5 = {
    "vocab_size": VOCABULARY,
    "feed_forward_proj": "gated-gelu",  # a ReLU has a kink, where one rounding may switch a gradient on or off
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
}
WHISPER = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 8,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
IMAGES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIGLIP = {
    "text_config": {**SIZES, "projection_size": 64, "max_position_embeddings": SEQLEN},
    "vision_config": {**IMAGES, "image_size": 16, "patch_size": 4},
}
MODERNBERT = {
    **SIZES,
    "local_attention": 6,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}

MODELS = (
    _decoder("llama", "Llama", GROUPED),
    _decoder("qwen3", "Qwen3", {**GROUPED, "head_dim": 32}),
    _decoder("mistral", "Mistral", {**GROUPED, "sliding_window": 5}),
    _decoder("gemma2", "Gemma2", {**GROUPED, **WINDOW, "head_dim": 16, "query_pre_attn_scalar": 32}),
    _decoder("gemma3", "Gemma3", {**GROUPED, **WINDOW, "head_dim": 16}, config="Gemma3Text"),
    _decoder("gpt-oss", "GptOss", {**GROUPED, **WINDOW, "head_dim": 16, "num_local_experts": 4}),
    _decoder("deepseek-v3", "DeepseekV3", DEEPSEEK),
    _decoder("phi3", "Phi3", GROUPED),
    _decoder("gpt2", "GPT2", GPT2, head="LMHeadModel"),
    _decoder("opt", "OPT", OPT),
    TinyModel(
        name="bert",
        architecture="BertForMaskedLM",
        config="BertConfig",
        settings={**SIZES, **WITHOUT_DROPOUT},
        inputs=lambda: _padded(behind=True),
        generates=False,
    ),
    TinyModel(
        name="modernbert",
        architecture="ModernBertForMaskedLM",
        config="ModernBertConfig",
        settings=MODERNBERT,
        inputs=lambda: _padded(behind=True),
        generates=False,
    ),
    TinyModel(
        name="vit",
        architecture="ViTForImageClassification",
        config="ViTConfig",
        settings={**IMAGES, **WITHOUT_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 5},
        inputs=_images,
        generates=False,
    ),
    TinyModel(
        name="siglip",
        architecture="SiglipModel",
        config="SiglipConfig",
        settings=SIGLIP,
        inputs=lambda: {"input_ids": _tokens(), **_images()},
        generates=False,
        logits=lambda out: torch.cat([out.logits_per_image, out.text_embeds, out.image_embeds], -1),
    ),
    TinyModel(
        name="whisper",
        architecture="WhisperForConditionalGeneration",
        config="WhisperConfig",
        settings=WHISPER,
        inputs=_speech,
    ),
    TinyModel(
        name="t5",
        architecture="T5ForConditionalGeneration",
        config="T5Config",
        settings=T5,
        inputs=lambda: {**_padded(behind=True), "decoder_input_ids": _tokens(1, 7)},
    ),
)
