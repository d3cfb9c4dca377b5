"""Models of Hugging Face, unmodified: members of an array are the models that PyTorch trains one by one.

Configurations are tiny and weights random; nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, BatchEncoding

import hfta_func as hfta
from transformers_models import IMAGES, TEXTS
from ways import InFloat64, start, train_solo

# A member without padding beside members with padding takes another branch than they do.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*members with different values run in groups:hfta_func.errors.LoopWarning"),
    pytest.mark.usefixtures("one_thread"),
]

M, N, T, VOCABULARY = 3, 3, 8, 64
LR = [1e-2, 3e-3, 1e-3]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_HALVES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2,
}  # fmt: skip
_DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3, "conv_act": "gelu", "type_vocab_size": 0,
}  # fmt: skip
# The default, grouped_mm, has no kernel for float64.
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", {"embedding_size": 16}),
    "bart": ("BartForConditionalGeneration", _HALVES),
    "bert": ("BertForMaskedLM", {}),
    "deberta-v2": ("DebertaV2ForMaskedLM", _DEBERTA),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "gemma": ("GemmaForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "loss_type": "ForCausalLM"}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 2, **_MIXTRAL}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "vit": ("ViTForImageClassification", {"image_size": 8, "patch_size": 4, "num_labels": 5}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**_HALVES, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32},
    ),
}
WITHOUT_CHECKPOINTING = {"albert"}


def make(name: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64, **changes: Any) -> list[Any]:
    """M models with weights of their own, in train mode."""
    kind, sizes = (MODELS | TEXTS | IMAGES)[name]
    config = AutoConfig.for_model(name, **{**SIZES, **sizes, **changes})
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("drop" in key or key.endswith("_pdrop")):
            # Whole layers are skipped by Python's generator, which no array can share.
            setattr(config, key, 0.0 if "layerdrop" in key else dropout)
    return [getattr(transformers, kind)(copy.deepcopy(config)).to(dtype).train() for _ in range(M)]


def make_batch(name: str, unpadded: Sequence[int] = ()) -> BatchEncoding:
    """What a tokenizer returns, stacked: every member has texts, paddings and labels of its own."""
    lengths = torch.randint(2, T, (M, N))
    lengths[:, 0] = torch.arange(M) + 4
    lengths[list(unpadded)] = T
    mask = (torch.arange(T) < lengths[..., None]).long()
    tokens = torch.randint(3, VOCABULARY, (M, N, T)) * mask
    labels = tokens.masked_fill(mask == 0, -100)
    if name in IMAGES:
        size = 16 if IMAGES[name][1].get("image_size", 32) in (16, [16, 16]) else 32
        images = torch.randn(M, N, 3, size, size).double()
        return BatchEncoding({"pixel_values": images, "labels": torch.randint(5, (M, N))})
    if name == "fnet":
        # It mixes all tokens.
        return BatchEncoding({"input_ids": tokens, "labels": labels})
    if name == "vit":
        return BatchEncoding({"pixel_values": torch.randn(M, N, 3, 8, 8).double(), "labels": torch.randint(5, (M, N))})
    if name == "whisper":
        sound = torch.randn(M, N, 8, 16).double()
        return BatchEncoding({"input_features": sound, "decoder_attention_mask": mask, "labels": labels})
    return BatchEncoding({"input_ids": tokens, "attention_mask": mask, "labels": labels})


def make_batches(name: str) -> list[BatchEncoding]:
    return [make_batch(name), make_batch(name, unpadded=[0]), make_batch(name, unpadded=range(M))]


def part(batch: BatchEncoding, index: Any) -> BatchEncoding:
    return BatchEncoding({key: value[index] for key, value in batch.items()})


def loss_fn(model: nn.Module, batch: BatchEncoding) -> Tensor:
    return model(**batch).loss


def train(models: list[Any], batches: list[BatchEncoding], members: Sequence[int], seed: int = 0) -> tuple[Tensor, Any]:
    """Losses ``[M, steps]``, the last of them in eval mode, and the parameters of an array of some members."""
    step, state = start(models, loss_fn, hfta.adam(lr=[LR[i] for i in members]), [seed + i for i in members])
    losses = []
    for batch in batches:
        state, metrics = step(state, part(batch, list(members)))
        losses.append(metrics["loss"])
    evaluate = hfta.make_eval_step(models[0], loss_fn, batch_dims=0)
    losses += [evaluate(state, part(batch, list(members)))["loss_fn"] for batch in batches[:2]]
    return torch.stack(losses, 1), state.params


def train_alone(model: Any, batches: list[BatchEncoding], member: int, rate: float) -> tuple[Tensor, Any]:
    """The same of one model, by PyTorch alone."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    losses = train_solo(model, loss_fn, optimizer, [part(batch, member) for batch in batches])
    model.eval()
    with torch.no_grad():
        losses += [loss_fn(model, part(batch, member)) for batch in batches[:2]]
    return torch.stack(losses), {path: parameter.detach() for path, parameter in model.named_parameters()}


def assert_close(found: tuple[Tensor, Any], expected: tuple[Tensor, Any], member: int, tolerance: float = 1e-8) -> None:
    """Member ``member`` of what :func:`train` returns against what :func:`train_alone` does."""
    torch.testing.assert_close(found[0][member], expected[0], rtol=tolerance, atol=0)
    # Adam turns the rounding noise of gradients that should be zero, those of keys' biases, into steps near its eps.
    for path, parameter in expected[1].items():
        torch.testing.assert_close(found[1][path][member], parameter, rtol=tolerance, atol=tolerance / 100, msg=path)


def assert_trained_as_alone(members: list[Any], batches: list[BatchEncoding], is_copied: bool = False) -> None:
    with InFloat64():
        found = train(copy.deepcopy(members) if is_copied else members, batches, range(M))
        for i, member in enumerate(members):
            assert_close(found, train_alone(member, batches, i, LR[i]), i)


@pytest.mark.sampled(every=4)
@pytest.mark.exhaustive(unless="^(bert|llama|qwen3|convnext)$")
@pytest.mark.parametrize("name", [*MODELS, *TEXTS, *IMAGES])
def test_member_i_is_what_pytorch_trains(name: str) -> None:
    assert_trained_as_alone(make(name), make_batches(name))


@pytest.mark.sampled(every=2)
@pytest.mark.exhaustive(unless="^(bert|llama)$")
@pytest.mark.parametrize("name", MODELS)
def test_member_i_with_dropout_is_an_array_of_one(name: str) -> None:
    members, batches = make(name, dropout=0.1), make_batches(name)
    with InFloat64():
        found = train(members, batches, range(M))
        for i, member in enumerate(members):
            losses, params = train([member], batches, [i])
            assert_close(found, (losses[0], {path: one[0] for path, one in params.items()}), i)
        other, _ = train(members, batches[:1], range(M), seed=7)
    assert not torch.isclose(found[0][:, 0], other[:, 0], rtol=1e-6, atol=0).any()


@pytest.mark.sampled(every=2)
@pytest.mark.exhaustive(unless="^(bert|llama)$")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT_CHECKPOINTING])
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    members, batches = make(name, dropout=0.1), make_batches(name)
    expected = train(members, batches, range(M))
    for member in members:
        member.activation_checkpointing_enable()
    found = train(members, batches, range(M))
    for i in range(M):
        assert_close(found, (expected[0][i], {path: one[i] for path, one in expected[1].items()}), i, 1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    members, batch = make(name, dropout=0.1), make_batch(name, unpadded=[0])
    step, state = start(members, loss_fn, hfta.adam(lr=LR))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, expected = compiled(state, batch), step(state, batch)
    torch.testing.assert_close(found[1]["loss"], expected[1]["loss"], rtol=1e-6, atol=0)


@pytest.mark.exhaustive
def test_the_loss_of_routers_which_models_collect_by_hooks() -> None:
    """Reported by users of Qwen-3-MoE and Mixtral: the first call registers hooks and leaves them."""
    for name in ("mixtral", "qwen3_moe"):
        members, batches = make(name, output_router_logits=True), [make_batch(name, unpadded=range(M))] * 2
        assert_trained_as_alone(members, batches, is_copied=True)


def test_grouped_experts() -> None:
    members = make("mixtral", dtype=torch.float32, experts_implementation="grouped_mm")
    batches = make_batches("mixtral")
    found = train(members, batches, range(M))
    for i, member in enumerate(members):
        losses, _ = train_alone(member, batches, i, LR[i])
        torch.testing.assert_close(found[0][i], losses, rtol=1e-4, atol=0)


@pytest.mark.exhaustive
def test_members_whose_experts_pick_their_tokens_run_one_by_one() -> None:
    members, batches = make("mixtral", experts_implementation="eager"), make_batches("mixtral")
    with pytest.warns(hfta.errors.LoopWarning, match=r"mlp.experts' \(MixtralExperts\), .* shape depends on"):
        assert_trained_as_alone(members, batches, is_copied=True)
