"""What a user's script calls, checked by pyright in strict mode: every type that it sees must be known."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.plot import bands
from hfta_func.testing import assert_matches_solo

Batch = tuple[Tensor, Tensor]


class MLP(nn.Module):
    """A model of one member."""

    def __init__(self, width: int) -> None:
        # PyTorch 2.9 does not annotate it.
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.hidden = nn.Linear(8, width)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.hidden(inputs).relu())


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def smoothed(model: MLP, batch: Batch, hparams: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    return loss + hparams["l1"] * model.head.weight.abs().sum(), {"mse": loss}


def error(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    inputs, targets = batch
    return {"error": (model(inputs) - targets).abs().mean()}


def halve(state: hfta.step.TrainState, history: hfta.run.History) -> hfta.step.TrainState | None:
    if len(history) == 1:
        return hfta.with_hyperparams(state, lr=[0.01, 0.02, 0.03, 0.04])
    return None


def jitter(batch: Batch) -> Batch:
    inputs, targets = batch
    return inputs + 0.01 * torch.randn_like(inputs), targets


def build() -> tuple[hfta.step.TrainStep, hfta.step.TrainState, hfta.step.EvalStep]:
    """Optimizers, schedules, and the two ways to make parameters."""
    models = [MLP(16) for _ in range(4)]
    params, buffers = hfta.stack_params(models)
    lr = hfta.schedules.warmup(hfta.schedules.cosine([1e-3, 3e-3, 1e-2, 3e-2], T_max=1000), steps=10)
    body = hfta.chain(hfta.clip_grad_norm(1.0), hfta.adamw(lr=lr, weight_decay=[0.0, 0.0, 0.1, 0.1]))
    grouped = hfta.partition(
        {"": "body", "head": "head", "hidden.bias": None}, {"body": body, "head": hfta.sgd(lr=0.1)}
    )
    step = hfta.make_train_step(
        models[0], loss_fn, grouped, chunk_size="auto", autocast=torch.bfloat16, nonfinite="freeze"
    )
    stacked = hfta.init_params(lambda: MLP(16), seeds=range(4))
    falling = hfta.schedules.step_lr(0.1, step_size=2, gamma=0.5)
    other = hfta.make_train_step(models[0], smoothed, hfta.chain(hfta.adam(lr=falling), hfta.ema(0.99)))
    _ = other.init(stacked.params, stacked.buffers, seeds=[0, 1, 2, 3], hparams={"l1": [0.0, 0.1, 0.2, 0.3]})
    return step, step.init(params, buffers, seeds=[0, 1, 2, 3]), hfta.make_eval_step(models[0], error)


def train(folder: Path) -> list[nn.Module]:
    """A step by hand, the loop with everything around it, and what comes of a run."""
    step, state, evaluate = build()
    data = torch.randn(64, 8), torch.randn(64, 1)
    loader = hfta.ArrayLoader(data, 16, seeds=[0, 1, 2, 3], transform=jitter)
    for batch in loader:
        state, metrics = step(state, batch)
        losses: Tensor = metrics["loss"]
        print(losses.mean().item(), hfta.num_models(state))
    # PyTorch's annotation leaves the arguments of a backend open.
    run = torch.compile(step, fullgraph=True)  # pyright: ignore[reportUnknownMemberType]
    state, history = hfta.fit(
        run,
        state,
        loader,
        epochs=2,
        evaluate=lambda state: evaluate(state, data),
        callbacks=[
            hfta.callbacks.early_stopping("error", patience=3),
            hfta.callbacks.keep_checkpoints(folder, keep=3),
            hfta.callbacks.keep_best(folder / "best.safetensors", "error"),
            halve,
        ],
        resume=folder / "run.safetensors",
    )
    curve: Tensor = history["error"]
    failed = [(failure.member, failure.cause) for failure in history.failures]
    print(curve.shape, failed, hfta.step.Failure.NONE.name)
    bands(history.frame(width=[16] * 4), "error", by="seed")
    hfta.save(state, folder / "state.safetensors")
    best = hfta.load(folder / "state.safetensors", like=state, members=[2, 0])
    pair = hfta.take(hfta.concat([state, best]), [0, 1])
    print(hfta.rules.explain(step, pair, data), hfta.files.read_metadata(folder / "state.safetensors"))
    with hfta.rules.override(modules=["head"], linear="loop"):
        state, metrics = step(state, data)
    single = hfta.export_model(MLP(16), state, 3)
    again = hfta.stack_params([single])
    return hfta.unstack_params(MLP(16), again.params, again.buffers)


def by_hand(model: MLP, inputs: Tensor) -> Tensor:
    """The lower-level functions."""
    params, buffers = hfta.stack_params([model, model])
    call = hfta.functional(model)
    keys = hfta.random.keys([0, 1])
    noise = hfta.random.normal(hfta.random.fold_in(keys, 1), (8,))
    outputs, _ = hfta.vmap(call, in_dims=(0, 0, None))(params, buffers, inputs)
    optimizer: hfta.GradientTransformation = hfta.muon(lr=[0.1, 0.2])
    opt_state = optimizer.init(params)
    updates, opt_state = optimizer.update(params, opt_state, params)
    params = hfta.apply_updates(params, updates)
    return outputs + noise.mean() + params["head.bias"]


def advise(step: hfta.step.TrainStep, state: hfta.step.TrainState, batch: Batch) -> int:
    """Plans, checks and errors."""
    try:
        found: hfta.run.Plan = hfta.plan(step, state, batch, limit=64)
        assert_matches_solo(step, state, [batch])
    except (hfta.errors.StackError, hfta.HFTAError) as problem:
        raise SystemExit(str(problem)) from None
    return min(found.num_models, hfta.run.max_models(step, state, batch, limit=64))
