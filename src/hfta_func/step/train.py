"""The training step of an array: one state in, one state out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._torch import Compiled, inside_transform
from hfta_func._tree import leaves, num_models, tree_map
from hfta_func._types import Params, PerModel, Tree
from hfta_func.errors import HyperparameterError, LossError
from hfta_func.models.padding import padding_of
from hfta_func.models.scalar_attributes import expanded, placeholder_for
from hfta_func.models.sharing import shared_of
from hfta_func.models.skeleton import outline
from hfta_func.models.stack import check_state, shapes
from hfta_func.optim._base import GradientTransformation, Range, check_transformation, is_padded, per_member
from hfta_func.optim._transforms import covers
from hfta_func.step.allocator import keep_memory_once
from hfta_func.step.batch import plain
from hfta_func.step.commit import Commit, Verdict, judge, looked_at
from hfta_func.step.gradients import Gradients, StepOutputs
from hfta_func.step.many import Loop, ManySteps, Searching
from hfta_func.step.members import check, check_hparams
from hfta_func.step.options import LossScale, Options
from hfta_func.step.replay import Replay
from hfta_func.step.state import Carried, Taken, TrainState
from hfta_func.verify import Verify


def make_train_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    *,
    batch_dims: Tree = 0,
    chunk_size: int | Literal["auto"] | None = None,
    autocast: torch.dtype | None = None,
    loss_scale: LossScale | PerModel | None = None,
    nonfinite: Literal["skip", "freeze", "raise"] = "skip",
    checkpoint: bool | Sequence[str] = False,
    save: Literal["all", "less"] = "all",
    donate: bool = False,
    share_frozen: bool = False,
    shared_params: Sequence[str] = (),
    shared_optimizer: GradientTransformation | None = None,
    replay: bool | None = None,
    collect: Callable[[TrainState], Any] | None = None,
    verify: Verify = True,
    carry: Tree = (),
) -> TrainStep:
    """A training step for arrays of ``model``.

    Args:
        model: Any module of the architecture. Its code, settings, train mode and ``requires_grad`` are copied; parameters
            that do not require grad are part of the state but are not updated.
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, hparams)``, the ordinary loss of ONE model. It returns
            a scalar, or a scalar and a dict of tensors to report. ``model`` is a module holding one member's tensors,
            ``batch`` is that member's batch and ``hparams`` its own numbers. Random calls draw from the member's key.
        optimizer: For example ``adam(lr=[1e-3, 1e-2])``. One of your own may draw ``torch.randn_like(grad)`` by key.
        batch_dims: 0 if every leaf of a batch is ``[M, N, ...]``, None if all members share one batch ``[N, ...]``,
            or a tree of these in the batch's own structure.
        chunk_size: Number of members that run together. None runs all at once; 1 runs them sequentially without ``vmap``, so
            ``.item()`` works. ``"auto"`` times 1, 2, 4, ... and all members at the first step of a new batch shape and keeps
            the fastest; a compiled step runs all at once.
        autocast: ``torch.bfloat16`` or ``torch.float16`` for the forward pass, where ``torch.autocast`` uses it.
        loss_scale: A :class:`LossScale`, or a number or one per member that never changes; by default one for float16 only.
        nonfinite: What happens to a member whose loss or gradient is not finite: ``"skip"`` skips this update,
            ``"freeze"`` makes the member inactive, ``"raise"`` raises an error, which waits for the device at every step.
            A gradient that overflows because of the loss scale is always skipped.
        checkpoint: Paths of submodules that keep only their inputs and run again in the backward pass: less memory, more
            time. True means the model's blocks: elements of ``nn.Sequential`` and ``nn.ModuleList`` that have children, else
            the model's children that have children, else the model. When compiled, on XLA, or inside a ``torch.func``
            gradient they run only once; so does a part with an ``Embedding(max_norm=)``, which shortens its rows.
        save: ``"less"`` keeps no result for the backward pass that a cheap function can make again from what is kept
            anyway: activations such as GELU, normalised and dropped-out values. Less memory in somewhat more time, and the
            same bits; it combines with ``checkpoint``. A compiler plans memory itself.
        donate: Write the new state into the tensors of the old one, which you must not use afterwards. This saves the
            memory of a second state and keeps addresses fixed, as CUDA graphs require.
        share_frozen: All members share the base of ``model``: its frozen parameters, and buffers of modules that have no
            trained parameter of their own. The step reads them where they are, without a copy and in their own dtype, and
            the state holds only the rest: stack it with ``share_frozen=True``, too. The model must keep its base as it is.
        shared_params: Paths of parameters, or of submodules, that all members share *and* train: one copy without a model
            axis, in ``state.shared``, which starts from that of ``model`` and is updated once per step, by the sum of the
            gradients of all active members that have not failed. Stack with the same ``shared_params``. Buffers remain each
            member's own. Compiled, and after a failure, a step holds a gradient of each member for a moment.
        shared_optimizer: Updates the shared parameters, as an array of one; by default ``optimizer``, if it can.
        replay: Whether eager calls may run the recorded operators of an earlier one instead of Python, once that pays: the
            same bits, small arrays several times faster. A record is used only while all Python values that the loss
            function and the model have read are as they were. None means in :func:`fit` and :func:`compile` only.
        collect: ``collect(state) -> (carry, batches)`` or ``(carry, batches, metrics)`` for :attr:`TrainStep.loop` and
            :func:`fit`: what members take along next, K batches ``[K, M, N, ...]``, and metrics ``[M, ...]``.
        verify: Whether to compare the array with its first and last member alone in ordinary PyTorch, at the first call of
            each kind and at calls 10, 100, 1,000, ...; ``"first"`` leaves out the latter. Each takes two steps of one model.
        carry: What a model passes from batch to batch, such as the hidden state of an LSTM: a tensor or a tree of tensors of
            ONE model, with which each epoch of :func:`fit` begins. The loss is then ``loss_fn(model, batch, carry)``, or
            ``loss_fn(model, batch, hparams, carry)``, and returns ``(loss, carry)`` or ``(loss, carry, metrics)``. No
            gradient flows into the batches before.

    Returns:
        A :class:`TrainStep`; ``torch.compile(step)`` works.

    Raises:
        StackError: if ``model`` is not a module; if
            ``shared_params`` names what the model does not have or train, or leaves members nothing of their own.
        LossError: if no parameter of the model requires grad.
        ValueError: if ``checkpoint`` names an unknown submodule or an argument has an invalid value.

    Example:
        >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
        >>> def loss_fn(model, batch):
        ...     inputs, targets = batch
        ...     return torch.nn.functional.mse_loss(model(inputs), targets)
        >>> step = make_train_step(models[0], loss_fn, sgd(lr=[0.1, 0.01, 0.001]), batch_dims=None)
        >>> state = step.init(*stack_params(models), seeds=[0, 1, 2])
        >>> state, metrics = step(state, (torch.randn(8, 4), torch.randn(8, 1)))
        >>> metrics["loss"].shape
        torch.Size([3])
    """
    shared = tuple(shared_params), shared_optimizer
    kept = batch_dims, chunk_size, autocast, loss_scale, nonfinite, checkpoint, save, donate, share_frozen, *shared
    return TrainStep(model, loss_fn, optimizer, Options(*kept, replay, collect, verify, carry))


class TrainStep(Compiled):
    """``step(state, batch) -> (state, metrics)``, a pure function; made by :func:`make_train_step`."""

    gradients_class: Callable[..., Gradients] = Gradients

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any], optimizer: GradientTransformation, options: Options
    ):
        self.outline = outline(model, options.share_frozen, options.shared_params)
        self._made_from = self.outline, loss_fn, optimizer, options
        self._shapes = shapes(model, options.share_frozen, options.shared_params)
        check_transformation("optimizer", optimizer)
        named = model.named_parameters()
        trained = {path for path, param in named if param.requires_grad and covers(options.network, path)}
        self.trainable = frozenset(trained - shared_of(model, options.shared_params).keys())
        if not self.trainable:
            where = options.network or "the model"
            raise LossError(f"no parameter of {where} requires grad; there is nothing to train")
        self.optimizer, self.options, self.batch_dims = optimizer, options, options.batch_dims
        self._gradients = self.gradients_class(model, self.outline, loss_fn, self.trainable, options)
        in_place = options.donate and not self._gradients.rewrites_params
        self._commit = Commit(model, optimizer, options, in_place, self._gradients.carried)
        self.oracle, self.warn_if_changed = self._gradients.oracle, self._gradients.warn_if_changed
        self._replay = Replay(self) if options.replay else None
        self._searching = None if optimizer.search is None else Searching(self, model)
        self.base = self._gradients.base
        """What all members share, by path, with ``share_frozen=True``: the model's own tensors."""
        self.many = ManySteps(self)
        """``step.many(state, batches)`` takes one step with each of K batches ``[K, M, N, ...]``.

        In a graph, calls and compiling cost as much for K steps as for one: ``torch.compile(step.many)`` or :func:`compile`.
        Metrics are ``[K, M]``.
        """
        self.loop: Any = options.collect and Loop(self)
        """``step.loop(state, iterations)`` collects batches, takes a step with each of them, and does it again.

        ``torch.compile(step.loop)`` is one graph, however many iterations and batches there are. The step needs ``collect``.
        ``fit(step, state, [None] * n, epochs=...)`` trains by it, n iterations an epoch.
        """

    def __reduce__(self) -> Any:
        return TrainStep, self._made_from

    def __call__(self, state: TrainState, batch: Tree = None, *, owned: bool = False) -> Taken:
        """Take one step with every active member; ``torch.func.grad`` differentiates it by everything in the state.
        Without a batch, a step with ``collect`` makes one iteration of its :attr:`loop` and reports means over its K steps.

        A member whose loss or gradient is not finite keeps its parameters, buffers and optimizer state, and
        ``metrics["failure"]`` says why. Inactive members keep everything.

        Args:
            state: The state.
            batch: The batch.
            owned: Whether nobody else holds the trained parameters and the optimizer's state, which a replay then overwrites.

        Returns:
            The new state and the metrics, each ``[M, ...]``: ``loss``; ``finite``, whether loss and gradient are finite;
            ``failure``, a :class:`Failure`; ``loss_scale`` if there is one; and what the loss function reports.

        Raises:
            StateError: if the state does not belong to this model and optimizer.
            BatchError: if a leaf has no model axis where ``batch_dims`` is 0.
            LossError: if a loss is not a floating-point scalar.
            NonFiniteError: with ``nonfinite="raise"``, if a member fails.
            VerifyError: if a member alone computes something else.
            RandomnessError: if members would share noise.
        """
        if batch is None and self.options.collect is not None:
            return self.loop.once(state)
        # Only a transform around it keeps what its gradient needs.
        with torch.set_grad_enabled(inside_transform()):
            if self._searching is not None:
                return self._searching(state, batch)
            if self._replay is None or torch.compiler.is_compiling():
                return self.eagerly(state, batch)
            return self._replay(state, batch, owned)

    def eagerly(self, state: TrainState, batch: Tree, watch: Callable[[Any, Verdict], None] = lambda *_: None) -> Taken:
        """The step itself, never replayed; ``watch`` is called with what it has decided, before anything is written."""
        check(state, batch, self._shapes, self.batch_dims)
        trial = None if torch.compiler.is_compiling() else self.oracle(state.keys, plain(batch))
        outputs, verdict = self.decide(state, batch)
        watch(outputs, verdict)
        self._gradients.check(trial, state, batch, outputs)
        return self.finish(state, outputs, verdict)

    def decide(self, state: TrainState, batch: Tree) -> tuple[StepOutputs, Verdict]:
        """Losses and gradients, and what they mean for every member: the part of a step that reads no values."""
        outputs = self._gradients(state, batch)
        return outputs, judge(state, outputs, self.options)

    def finish(self, state: TrainState, outputs: StepOutputs, verdict: Verdict, looks: bool = True) -> Taken:
        """The next state and the metrics; unless it ``looks``, values have been looked at."""
        verdict = looked_at(verdict, state, self.options) if looks else verdict
        # A metric may be a tensor of the state, which is overwritten.
        metrics = tree_map(torch.clone, outputs.metrics) if self.options.donate else dict(outputs.metrics)
        tree_map(metrics.pop, self._gradients.carried)
        return self._commit(state, outputs, verdict), {**verdict.report, **metrics}

    def _opt_state(self, trained: Params) -> Tree:
        """The optimizer's state before the first update."""
        token = is_padded.set(padding_of(self.outline) is not None)
        try:
            return self.optimizer.init(trained)
        finally:
            is_padded.reset(token)

    def replayed(self, steps: int | None = None) -> TrainStep:
        """The step, whose eager calls are replayed from now on unless it was made with ``replay=False``.

        Args:
            steps: How often it will be called, if that is known.
        """
        if self.options.replay is None:
            self._replay = self._replay or Replay(self)
            # Each iteration of a loop collects once, and takes as many steps as there are batches.
            (self.loop.collecting if self.options.collect else self._replay).left = steps
        return self

    @property
    def status(self) -> str:
        """How the latest call ran: ``"replayed: ..."``, or ``"eager: ..."`` and why; then, if it did, how it collected."""
        replay = self._replay if self._searching is None else self._searching.evaluate._replay
        collected = f"; collecting {self.loop.collecting.status}" if self.options.collect else ""
        return "eager: not asked to be replayed" if replay is None else replay.status + collected

    @torch.inference_mode(False)
    def init(
        self,
        params: Params,
        buffers: Params | None = None,
        *,
        seeds: Sequence[int] | Tensor,
        hparams: Mapping[str, Any] | None = None,
        carry: Tree = (),
    ) -> TrainState:
        """The state before the first step.

        Args:
            params: Stacked parameters ``[M, ...]``, as :func:`stack_params` returns them; used without a copy, never written.
            buffers: Stacked buffers.
            seeds: One integer per member; all of a member's noise comes from its seed.
            hparams: The third argument of ``loss_fn``: by name, a number or one number per member. Under the path of a number
                in the model, such as ``"1.p"`` for the rate of a dropout layer, it is used in place of the model's; ``"*.p"``
                is every such path. Numbers in which stacked models differ are there without being named.
            carry: Anything else that members take along, a tree of tensors ``[M, ...]``; of a step with ``carry=``, what each
                member starts with, in place of one start for all.

        Raises:
            StackError: if a leaf is not ``[M, ...]``.
            StateError: if params or buffers do not belong to the model.
            HyperparameterError: if seeds, ``hparams`` or hyperparameters are not M.
        """
        known = self._shapes.numbers
        buffers, hparams = dict(buffers or {}), expanded(hparams or {}, known)
        count, replaced = num_models({"params": params, "buffers": buffers, "carry": carry}), known & hparams.keys()
        check_state((params, {path: leaf for path, leaf in buffers.items() if path not in replaced}), self._shapes)
        carried = {path: buffers.pop(path).double() for path in [*buffers] if path in known}
        keys = random.keys(seeds, device=next(iter(params.values())).device)
        if leaves(self.options.carry):
            alike = tree_map(lambda x: x.detach().to(keys.device).expand(count, *x.shape), self.options.carry)
            start = tree_map(torch.clone, carry if leaves(carry) else alike)
            carry = Carried(start, tree_map(torch.clone, start))
        if keys.shape != (count,):
            raise HyperparameterError(f"got {keys.numel()} seeds but the array has {count} models; give one per model")
        check_hparams(hparams, known, self._gradients.takes_hparams)
        if keys.device.type == "cpu":
            keep_memory_once()
        trained = {path: param for path, param in params.items() if path in self.trainable}
        kind, scaling = next(iter(trained.values())).dtype, self.options.scaling
        # In fewer bits, a rate such as 0.999 would be 1.
        dtype = torch.promote_types(kind.to_real(), torch.float32)
        given = {name: per_member(name, value, count, keys.device, Range.FINITE) for name, value in hparams.items()}
        # Of the model's numbers every bit counts: a rate decides what is dropped.
        numbers = carried | {name: value if name in known else value.to(dtype) for name, value in given.items()}
        return TrainState(
            params=params,
            buffers=buffers | {path: placeholder_for(value) for path, value in numbers.items() if path in known},
            opt_state=self._opt_state(trained),
            keys=keys,
            step=torch.zeros(count, dtype=torch.int64, device=keys.device),
            hparams=numbers,
            active=torch.ones(count, dtype=torch.bool, device=keys.device),
            loss_scale=() if scaling is None else scaling.init(count, keys.device),
            shared=self._commit.init_shared(self.outline, keys.device),
            carry=carry,
        )
