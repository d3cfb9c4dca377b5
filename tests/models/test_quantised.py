"""Bases in 8 bits, which adapters read and gradients pass through: of torchao, and of plain tensors."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from hfta_func.run.memory import peak_bytes
from ways import seeded, start

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torchao tells that kernels for other machines cannot be loaded, and peft that such weights cannot be merged.
    pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
M, LR = 3, [0.1, 0.03, 0.01]
TENSOR_SCALAR_FUNCTIONS, SINGLE = {"rtol": 1e-10, "atol": 1e-12}, {"rtol": 1e-5, "atol": 1e-6}


class Int8Linear(nn.Module):
    """A weight in 8 bits and a scale for each row, as buffers."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach().clone())

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Adapted(nn.Module):
    def __init__(self, base, dtype):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(8, 2, bias=False, dtype=dtype), nn.Linear(2, 8, bias=False, dtype=dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def quantised(linear, how):
    if how == "plain":
        return Int8Linear(linear)
    return _torchao(nn.Sequential(linear))[0]


def _torchao(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def kind_of(how):
    # torchao knows no float64.
    return (torch.float64, TENSOR_SCALAR_FUNCTIONS) if how == "plain" else (torch.float32, SINGLE)


def make_models(how):
    torch.manual_seed(0)
    dtype, _ = kind_of(how)
    bases = [quantised(nn.Linear(8, 8, dtype=dtype), how).requires_grad_(False) for _ in range(2)]

    def make():
        return nn.Sequential(*(Adapted(base, dtype) for base in bases), nn.Linear(8, 1, dtype=dtype))

    return seeded(make, range(M))


def loss_fn(model, x):
    return model(x).square().mean()


def check_solo(state, models, batches, run, close, loss=loss_fn):
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr) for m, lr in zip(models, LR, strict=True)
    ]
    for batch in batches:
        state, metrics = run(state, batch)
        for member, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            alone = loss(model, batch[member])
            torch.testing.assert_close(metrics["loss"][member], alone.detach(), **close)
            alone.backward()
            optimizer.step()
    return state


@pytest.mark.exhaustive
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("how", ["plain", "torchao"])
def test_adapters_over_8_bits_are_the_solo_runs(how, compile):
    models, (dtype, close) = make_models(how), kind_of(how)
    step, state = start(models, loss_fn, hfta.sgd(lr=LR), share_frozen=True)
    assert step.base["0.base.weight"] is models[0][0].base.weight and "0.base.weight" not in state.params
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compile else step
    state = check_solo(state, models, torch.randn(4, M, 5, 8, dtype=dtype), run, close)
    made = hfta.export_model(models[0], state, 1, share_frozen=True)
    assert made[0].base.weight is models[0][0].base.weight
    torch.testing.assert_close(made[0].up.weight, models[1][0].up.weight, **close)


@pytest.mark.parametrize("how", ["plain", "torchao"])
def test_equal_bases_are_one_and_others_are_named(how):
    models = make_models(how)
    other = quantised(nn.Linear(8, 8, dtype=kind_of(how)[0]), how)
    models[2][1].base = copy.deepcopy(models[0][1].base)
    hfta.stack_params(models, share_frozen=True)
    models[2][1].base = other.requires_grad_(False)
    with pytest.raises(
        hfta.errors.StackError, match=r"model 2: .* of the frozen '1.base.weight' are not those of model 0"
    ):
        hfta.stack_params(models, share_frozen=True)


def test_adapters_of_peft_over_torchao():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 16}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, bos_token_id=1, eos_token_id=2
    )
    base = _torchao(transformers.LlamaForCausalLM(config))
    assert type(base.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    configs = [peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]) for rank in (1, 2, 2)]

    def loss(model, tokens):
        logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    adapters = hfta.models.stack_adapters(base, configs, seeds=range(M))
    step = hfta.make_train_step(adapters.model, loss, hfta.sgd(lr=LR), share_frozen=True)
    state = step.init(adapters.params, adapters.buffers, seeds=range(M))
    solos = [adapters.export(state, member) for member in range(M)]
    for solo in solos:
        for path, param in solo.named_parameters():
            param.requires_grad_("lora_" in path)
    check_solo(state, solos, torch.randint(32, (3, M, 2, 6)), step, SINGLE, loss)


def test_parts_that_run_twice_keep_no_copies_of_the_base():
    width, layers = 256, 4
    bases = [Int8Linear(nn.Linear(width, width)) for _ in range(layers)]
    models = [nn.Sequential(*(nn.Sequential(base, nn.LayerNorm(width)) for base in bases)) for _ in range(M)]
    step, state = start(models, loss_fn, hfta.sgd(lr=0.1), share_frozen=True, checkpoint=True, verify=False)
    held = sum(leaf.nbytes for leaf in step.base.values())
    batch = torch.ones(M, 2, width)
    for _ in range(2):
        # A layer's weight in 32 bits, as wide as all four in 8, and half of it in passing; twice where it is recomputed.
        peak = peak_bytes(lambda: step(state, batch), torch.device("cpu"))
        assert 1.9 * held < peak < 2.6 * held
