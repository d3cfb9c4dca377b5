"""Many LoRA adapters over one GPT-2: one array over one base, a loop over models of ``peft`` that share the base, and an
array of as many bases.

Seconds of a training step of all adapters, side by side in one run; parameters held; peak memory. The loop is given
PyTorch's fused AdamW. Before anything is shown, the losses of array and loop are compared.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from benchmarks import _code
from benchmarks._measure import add_to, interleaved, peak_bytes, resident_bytes, seconds, table

BASES = {"tiny": (2, 32, 2), "small": (4, 256, 4), "base": (12, 768, 12)}
"""Layers, width and heads."""
TOLERANCE = 1e-3


class Job(NamedTuple):
    """What is trained."""

    base: str
    adapters: int
    rank: int = 8
    batch: int = 4
    length: int = 64
    vocabulary: int = 1000


def make_base(job: Job) -> nn.Module:
    """A GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = BASES[job.base]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=job.vocabulary,
        n_positions=job.length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    )
    return GPT2LMHeadModel(config).train()


def make_config(job: Job) -> Any:
    """LoRA on the projections of attention."""
    from peft import LoraConfig

    return LoraConfig(r=job.rank, lora_alpha=16, target_modules=r".*attn\.c_(attn|proj)", fan_in_fan_out=True)


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of each next token."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Array:
    """All adapters as one array, over one base or, with ``shared=False``, over as many as there are adapters."""

    def __init__(self, job: Job, shared: bool = True, compile: bool = False, chunk_size: Any = None):
        self.base = make_base(job)
        count = range(job.adapters)
        found = hfta.models.stack_adapters(self.base, [make_config(job)] * job.adapters, seeds=count)
        step = hfta.make_train_step(
            *(found.model, loss_fn, hfta.adamw(lr=1e-3)), donate=True, share_frozen=shared, chunk_size=chunk_size
        )
        params, buffers = found.params, found.buffers
        if not shared:
            frozen = {path: p for path, p in found.model.named_parameters() if not p.requires_grad}
            params = {
                **params,
                **{path: p.detach().expand(job.adapters, *p.shape).clone() for path, p in frozen.items()},
            }
            own = dict(found.model.named_buffers())
            buffers = {path: b.expand(job.adapters, *b.shape).clone() for path, b in own.items()}
        self.shared, self.state = shared, step.init(params, buffers, seeds=count)
        self.run: Any = torch.compile(step, fullgraph=True) if compile else step

    def step(self, tokens: Tensor) -> Tensor:
        """Train all adapters on their rows ``[M, N, T]``; returns their losses."""
        self.state, metrics = self.run(self.state, tokens)
        return metrics["loss"]

    def held(self) -> Any:
        """Everything that stays between steps."""
        return [*self.base.parameters(), *self.base.buffers()] if self.shared else [], self.state


class Mixed(Array):
    """All adapters as one array, whose batch mixes their rows in any order."""

    def __init__(self, job: Job):
        super().__init__(job)
        self.run = hfta.step.by_index(self.run)

    def step(self, tokens: Tensor) -> Tensor:
        """Train all adapters on their rows ``[M, N, T]``; returns their losses."""
        order = torch.randperm(tokens.shape[0] * tokens.shape[1])
        batch = tokens.flatten(0, 1)[order], order // tokens.shape[1]
        self.state, metrics = self.run(self.state, batch)
        return metrics["loss"]


class Loop:
    """A loop over models of ``peft``, each with its optimizer, whose bases are the same tensors."""

    def __init__(self, job: Job, count: int | None = None):
        from peft import get_peft_model

        self.base = make_base(job)
        self.models, self.optimizers = [], []
        memo = {id(tensor): tensor for tensor in (*self.base.parameters(), *self.base.buffers())}
        for seed in range(job.adapters if count is None else count):
            torch.manual_seed(seed)
            model = get_peft_model(copy.deepcopy(self.base, dict(memo)), make_config(job))
            trained = [p for p in model.parameters() if p.requires_grad]
            self.models.append(model)
            self.optimizers.append(torch.optim.AdamW(trained, lr=1e-3, fused=True))

    def step(self, tokens: Tensor) -> Tensor:
        """Train one after another."""
        losses = []
        for model, optimizer, own in zip(self.models, self.optimizers, tokens, strict=False):
            loss = loss_fn(model, own)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)

    def held(self) -> Any:
        """Everything that stays between steps."""
        states = [[*values.values()] for one in self.optimizers for values in one.state.values()]
        return [[*model.parameters()] for model in self.models], [*self.base.buffers()], states


def measure(job: Job, ways: list[str], rounds: int) -> dict[str, Any]:
    """Seconds, bytes and agreement of every way to train the adapters."""
    hfta.step.keep_memory()
    tokens = torch.randint(job.vocabulary, (job.adapters, job.batch, job.length))
    make: dict[str, Callable[[], Array | Loop]] = {
        "loop": lambda: Loop(job),
        "array": lambda: Array(job),
        "array in chunks": lambda: Array(job, chunk_size="auto"),
        "array, rows by index": lambda: Mixed(job),
        "array, compiled": lambda: Array(job, compile=True),
        "array of bases": lambda: Array(job, shared=False),
    }
    runs = {name: make[name]() for name in ("loop", *ways)}
    losses = {name: torch.stack([run.step(tokens) for _ in range(3)]) for name, run in runs.items()}
    expected = losses["loop"]
    timers = {
        name: functools.partial(lambda run: seconds(lambda: run.step(tokens), 1), run) for name, run in runs.items()
    }
    times = interleaved(timers, rounds)
    one = Loop(job, 1)
    for _ in range(2):
        one.step(tokens)
    base = resident_bytes([*one.base.parameters(), *one.base.buffers()])
    own = resident_bytes(one.held()) - base + peak_bytes(lambda: one.step(tokens))
    found: dict[str, Any] = {}
    for name, run in runs.items():
        held, peak = resident_bytes(run.held()), peak_bytes(lambda run=run: run.step(tokens))
        found[name] = {
            "seconds": times[name],
            "ratio": statistics.median(a / b for a, b in zip(times["loop"], times[name], strict=True)),
            "held": held,
            "peak": peak,
            "allowed": base + job.adapters * own,
            "agrees": bool((losses[name] - expected).abs().max() <= TOLERANCE),
        }
    return {"base": base, "ways": found}


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks adapters", description=__doc__)
    parser.add_argument("--base", nargs="+", choices=[*BASES], default=["small"])
    parser.add_argument("--adapters", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="sequences of an adapter in a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="threads of PyTorch")
    parser.add_argument("--compile", action="store_true", help="also the compiled array")
    parser.add_argument("--bases", action="store_true", help="also an array with a base for every adapter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the numbers to FILE")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    ways = [
        "array",
        *("array in chunks", "array, rows by index"),
        *(["array, compiled"] if args.compile else []),
        *(["array of bases"] if args.bases else []),
    ]
    about, rows, results = _code.stamp(), [], {}
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**about), flush=True)
    for base in args.base:
        for count in args.adapters:
            job = Job(base, count, args.rank, args.batch, args.length)
            found = results[f"{base} {count} {args.batch} {args.length}"] = measure(job, ways, args.rounds)
            for name, one in found["ways"].items():
                mib = [one["held"], one["peak"], one["held"] + one["peak"]]
                rows.append(
                    [
                        *(f"{base}, {count} adapters, {name}", f"{1e3 * statistics.median(one['seconds']):.1f}"),
                        f"{one['ratio']:.2f}x" if one["agrees"] else "differs",
                        *(f"{value / 2**20:.1f}" for value in mib),
                        f"{mib[2] / one['allowed']:.2f}",
                    ]
                )
    head = ["base, adapters, way", "ms", "loop / way", "held MiB", "peak MiB", "sum MiB", "sum / (base + M x own)"]
    print(f"\n{table(head, rows)}")
    if args.json:
        add_to(args.json, "adapters", about, results)
    return 0 if all(one["agrees"] for found in results.values() for one in found["ways"].values()) else 1
