"""Adapters of peft over one base: each member of an array is the run that peft makes alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from ways import InFloat64, train_solo

peft = pytest.importorskip("peft", reason="needs peft; pip install 'hfta_func[adapters]'")
transformers = pytest.importorskip("transformers")
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
LR = [1e-2, 3e-3, 1e-3]
stack = hfta.models.stack_adapters
ATTENTION = r".*attn\.c_attn"


def make_base(dtype=torch.float64):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).to(dtype).train()


def lora(r=2, alpha=4, target_modules=ATTENTION, **options):
    return LoraConfig(r=r, lora_alpha=alpha, target_modules=target_modules, fan_in_fan_out=True, **options)


def loss_fn(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, -tokens.shape[1] : -1].flatten(0, 1), tokens[:, 1:].flatten())


def make_batches(count, members=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(32, (count, members, 2, 6), generator=generator)


def double(tree):
    return {path: leaf.double() if leaf.is_floating_point() else leaf for path, leaf in tree.items()}


def solo(base, config, seed):
    torch.manual_seed(seed)
    model = get_peft_model(copy.deepcopy(base), copy.deepcopy(config)).train()
    for param in model.parameters():
        param.data = param.data.double()
    return model


def train_alone(base, config, member, batches, **options):
    model = solo(base, config, member)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LR[member], **options)
    train_solo(model, loss_fn, optimizer, batches[:, member])
    return model


def train(adapters, batches, lr=LR, **options):
    step = hfta.make_train_step(adapters.model, loss_fn, hfta.adamw(lr=lr, **options), share_frozen=True)
    state = step.init(double(adapters.params), double(adapters.buffers), seeds=range(len(adapters.configs)))
    for batch in batches:
        state, _ = step(state, batch)
    return state


CONFIGS = {
    "equal": [lora(), lora(), lora()],
    "ranks, alphas and targets": [
        *(lora(1, 2), lora(4, 16, use_rslora=True)),
        lora(3, 8, r".*(attn\.c_proj|mlp\.c_fc)", rank_pattern={"c_fc": 2}, alpha_pattern={"c_fc": 1}),
    ],
    "ia3": [IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True)] * 3,
    "prompts": [PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")] * 3,
    "dora": [lora(2, use_dora=True), lora(3, use_dora=True), lora(1, use_dora=True)],
    "biases of LoRA's own": [
        *(lora(2, 3, lora_bias=True), lora(1, 5, r".*mlp\.c_fc", lora_bias=True)),
        lora(3, 2, lora_bias=True, init_lora_weights=False),
    ],
    "biases and a head": [lora(r, bias="lora_only", modules_to_save=["ln_f"]) for r in (1, 2, 3)],
}


# peft takes biases of LoRA's own for parts of matrices when it saves them.
@pytest.mark.sampled(every=7)
@pytest.mark.filterwarnings("ignore:Adapter 'default'.*LoRA tensor")
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_are_the_runs_of_peft_alone(name, tmp_path):
    base, configs = make_base(), CONFIGS[name]
    before = copy.deepcopy(base.state_dict())
    adapters = hfta.models.stack_adapters(base, configs, seeds=range(3))
    batches = make_batches(6)
    state = train(adapters, batches)
    for member, config in enumerate(configs):
        model = train_alone(base, config, member, batches)
        exported = adapters.export(state, member)
        alone = dict(model.named_parameters())
        assert alone.keys() == dict(exported.named_parameters()).keys()
        for path, param in exported.named_parameters():
            torch.testing.assert_close(param, alone[path], rtol=1e-10, atol=1e-12)
        if member == 1:
            exported.save_pretrained(tmp_path)
            loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).double()
            torch.testing.assert_close(loaded(batches[0, 0]).logits, model.eval()(batches[0, 0]).logits)
            again = hfta.models.stack_adapters(base, [str(tmp_path)])
            kept = {path: leaf for path, leaf in adapters.take([1]).export(hfta.take(state, [1]), 0).named_parameters()}
            for path, leaf in again.model.named_parameters():
                torch.testing.assert_close(leaf.double(), kept[path], rtol=1e-6, atol=1e-6)
    assert all(torch.equal(leaf, before[path]) for path, leaf in base.state_dict().items())
    frozen = {id(p) for p in base.parameters()}
    assert sum(id(p) in frozen for p in adapters.model.parameters()) >= len(frozen) - (2 if "biases" in name else 0)


def test_dropout_of_each_member():
    base = nn.Sequential(nn.Linear(64, 64))
    configs = [LoraConfig(r=2, target_modules=["0"], lora_dropout=p, init_lora_weights=False) for p in (0.0, 0.5, 0.9)]
    adapters = hfta.models.stack_adapters(base, configs, seeds=[0, 0, 0])
    kept = []
    adapters.model.base_model.model[0].lora_A["default"].register_forward_pre_hook(lambda m, args: kept.append(args[0]))

    def loss_fn(model, x):
        kept.clear()
        loss = model(x).sum()
        return loss, {"kept": (kept[0] != 0).double().mean(), "most": kept[0].max()}

    step = hfta.make_train_step(adapters.model, loss_fn, hfta.sgd(lr=0.1), share_frozen=True)
    state = step.init(adapters.params, adapters.buffers, seeds=[0, 1, 2])
    _, metrics = step(state, torch.ones(3, 8, 64))
    torch.testing.assert_close(metrics["kept"], torch.tensor([1, 0.5, 0.1]).double(), rtol=0, atol=0.1)
    torch.testing.assert_close(metrics["most"], torch.tensor([1.0, 2.0, 10.0]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda base: stack(base, [lora()], seeds=[1, 2]), "2 seeds but 1 adapters"),
        (lambda base: stack(base, [lora(), CONFIGS["ia3"][0]]), "adapter 1 has .* but adapter 0"),
        (lambda base: stack(base, [lora(), lora(bias="all")]), "adapter 1 has bias='all' but adapter 0 has 'none'"),
        (lambda base: stack(base, [lora(init_lora_weights="pissa")]), "adapter 0 has init_lora_weights='pissa'"),
        (lambda base: stack(base, [lora(use_dora=True), lora(target_modules=["c_fc"], use_dora=True)]), "target_mod"),
    ],
)  # fmt: skip
def test_bad_adapters(call, message):
    with pytest.raises((hfta.errors.StackError, hfta.errors.HyperparameterError), match=message):
        call(make_base(torch.float32))


def test_states_of_other_adapters_are_refused():
    adapters = hfta.models.stack_adapters(make_base(), [lora(1), lora(2)], seeds=[0, 1])
    state = train(adapters, make_batches(1, 2), LR[:2])
    with pytest.raises(hfta.errors.StackError, match=r"holds 1 members, but these are 2 adapters.*take"):
        adapters.export(hfta.take(state, [1]), 0)
    with pytest.raises(hfta.errors.StackError, match="index 5 selects no members of an array of 2"):
        adapters.export(state, 5)
    assert adapters.export(state, -1).peft_config["default"].r == 2


_ON_ATTENTION: dict[str, list[str]] = {"target_modules": ["q_proj", "v_proj"]}
_ON_PROMPTS = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
KINDS = {
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=20, tinit=1, tfinal=2, **_ON_ATTENTION),
    "IA3 of feed-forward layers": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "LoKr": lambda: peft.LoKrConfig(r=2, decompose_both=True, decompose_factor=4, **_ON_ATTENTION),
    "LoRA of embeddings": lambda: LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "LoRA and tokens": lambda: LoraConfig(r=2, trainable_token_indices=[1, 2], **_ON_ATTENTION),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, **_ON_ATTENTION),
    "p-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=8, encoder_dropout=0.0, **_ON_PROMPTS),
    "prefixes": lambda: peft.PrefixTuningConfig(**_ON_PROMPTS),
    "Shadow": lambda: peft.ShadowConfig(shadow_dropout=0.0, task_type="CAUSAL_LM"),
    "VeRA": lambda: peft.VeraConfig(r=4, **_ON_ATTENTION),
}


def make_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().train()


# Autograd functions without rules, and what peft and PyTorch say of such layers.
@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning", "ignore:Unsupported layer")
@pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:.*no bias term")
@pytest.mark.exhaustive(unless="^(OFT|VeRA)$")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_trained_and_evaluated_as_alone(kind):
    # Shadow does not use the parameters of its last update, which alone have no gradient and so no weight decay.
    decay = {"weight_decay": 0.0} if kind == "Shadow" else {}
    # Some compute in float32, whatever the type of the base.
    with InFloat64():
        base, config, batches = make_llama(), KINDS[kind](), make_batches(3)
        adapters = stack(base, [config] * 3, seeds=range(3))
        state = train(adapters, batches, **decay)
        evaluate = hfta.make_eval_step(adapters.model, loss_fn, batch_dims=0, share_frozen=True)
        losses = evaluate(state, batches[0])["loss_fn"]
        for member in range(3):
            model = train_alone(base, config, member, batches, **decay)
            alone = dict(model.named_parameters())
            for path, param in adapters.export(state, member).named_parameters():
                torch.testing.assert_close(param.double(), alone[path], rtol=1e-10, atol=1e-12, msg=path)
            with torch.no_grad():
                expected = loss_fn(model.eval(), batches[0, member])
            torch.testing.assert_close(losses[member], expected, rtol=1e-10, atol=0)


_CPT = {"cpt_token_ids": [3, 4], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2], "task_type": "CAUSAL_LM"}


@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning", "ignore:Sparse invariant")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        # A prompt whose gradient a hook scales.
        (lambda: peft.CPTConfig(**_CPT), "has a hook for the backward pass.* remove it"),
        # Every call replaces a parameter of the base by a computed one, and puts it back.
        (
            lambda: LoraConfig(r=2, target_modules=[], target_parameters=["q_proj.weight"]),
            r"writes '.*q_proj.base_layer.weight', which all members share",
        ),
        (lambda: peft.OSFConfig(effective_rank=4, **_ON_ATTENTION), "has a hook for the backward pass.* remove it"),
    ],
)
def test_kinds_that_write_or_hook_parameters_are_refused(make, message):
    adapters = hfta.models.stack_adapters(make_llama(), [make()] * 3, seeds=range(3))
    with pytest.raises((hfta.errors.StackError, hfta.errors.StateError, hfta.errors.TraceError), match=message):
        train(adapters, make_batches(1))


def test_a_batch_mixes_the_rows_of_adapters():
    base, configs = make_base(), CONFIGS["ranks, alphas and targets"]
    adapters = stack(base, configs, seeds=range(3))
    step = hfta.step.by_index(hfta.make_train_step(adapters.model, loss_fn, hfta.adamw(lr=LR), share_frozen=True))
    state = step.init(double(adapters.params), double(adapters.buffers), seeds=range(3))
    models = [solo(base, config, seed) for seed, config in enumerate(configs)]
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
        for model, lr in zip(models, LR, strict=True)
    ]
    tokens = make_batches(6, members=4).flatten(1, 2)
    for batch, index in zip(
        tokens, torch.tensor([[0, 1, 1, 2, 2, 2, 0, 1], [2, 2, 2, 0, 2, 2, 0, 2]] * 3), strict=True
    ):
        state, _ = step(state, (batch, index))
        for member in {*index.tolist()}:
            train_solo(models[member], loss_fn, optimizers[member], [batch[index == member]])
    for member, model in enumerate(models):
        exported = dict(adapters.export(state, member).named_parameters())
        for path, param in model.named_parameters():
            torch.testing.assert_close(param, exported[path], rtol=1e-10, atol=1e-12)
    requests, answers = tokens[0, :2, None], torch.tensor([2, 0])
    by_request = hfta.make_eval_step(
        adapters.model, lambda model, tokens: {"loss": loss_fn(model, tokens)}, batch_dims=0, share_frozen=True
    )
    answered = by_request(hfta.take(state, answers), requests)["loss"]
    expected = [loss_fn(models[member].eval(), rows).detach() for member, rows in zip((2, 0), requests, strict=True)]
    torch.testing.assert_close(answered, torch.stack(expected), rtol=1e-10, atol=0)
