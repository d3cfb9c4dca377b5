"""Bugs that tests once did not notice, as changes of the source, each with the test that fails for it.

``python tests/helpers/mutants.py --planted`` plants each in turn; ``old`` must stand exactly once in the file.
"""

# ruff: noqa: E501
from __future__ import annotations

from typing import NamedTuple


class Planted(NamedTuple):
    """One bug."""

    what: str
    file: str
    old: str
    new: str
    test: str


PLANTED = [
    Planted(
        "evaluation does not switch to eval mode",
        *("step/evaluate.py", "    training = False\n", ""),
        "test_evaluate.py::test_it_runs_in_eval_mode",
    ),
    Planted(
        "evaluation with the noise of training",
        *("step/evaluate.py", "random.fold_in(state.keys, ~state.step)", "random.fold_in(state.keys, state.step)"),
        "test_evaluate.py::test_noise_is_that_of_seed_and_inverted_step",
    ),
    Planted(
        "evaluation with the same noise at every step",
        *("step/evaluate.py", "random.fold_in(state.keys, ~state.step)", "state.keys"),
        "test_evaluate.py::test_noise_is_that_of_seed_and_inverted_step",
    ),
    Planted(
        "evaluation without a state draws from other seeds",
        *("step/evaluate.py", "torch.zeros(first.shape[0]", "torch.ones(first.shape[0]"),
        "test_evaluate.py::test_without_a_training_state_all_draw_from_seed_0",
    ),
    Planted(
        "evaluation ignores chunk_size",
        *("step/members.py", "Chunks(options.chunk_size, options", "Chunks(None, options"),
        "test_evaluate.py::test_it_runs_in_eval_mode",
    ),
    Planted(
        "groups leave out the last members",
        *("step/chunks.py", "[*range(0, count, size), count]", "[*range(0, count, size)]"),
        "test_evaluate.py::test_noise_is_that_of_seed_and_inverted_step",
    ),
    Planted(
        "groups take the whole batch of the first members",
        *(
            "step/chunks.py",
            "take_batch(self.batch_dims, batch, slice(start, stop))",
            "take_batch(self.batch_dims, batch, slice(0, stop - start))",
        ),
        "test_evaluate.py::test_members_get_their_own_part_of_the_batch",
    ),
    Planted(
        "one dropout mask at every step",
        *("step/gradients.py", "random.fold_in(state.keys, state.step + NOISE)", "random.fold_in(state.keys, 0)"),
        "test_step.py::test_noise_is_that_of_seed_and_step",
    ),
    Planted(
        "users who fold in the step get the noise of the step",
        *("step/gradients.py", "state.step + NOISE", "state.step"),
        "test_step.py::test_noise_is_that_of_seed_and_step",
    ),
    Planted(
        "the first call writes the parameters of its caller",
        *("step/members.py", "            params = copied(params)", "            pass"),
        "test_evaluate.py::test_what_a_model_writes_is_its_own_copy",
    ),
    Planted(
        "one mask for all samples of an inner vmap",
        *("calls/routing.py", 'if randomness == "same":', "if True:"),
        "test_random.py::test_an_inner_vmap_has_its_own_randomness",
    ),
    Planted(
        "auto picks the slowest in training",
        *("step/chunks.py", "return min(sizes, key=best", "return max(sizes, key=best"),
        "test_step.py::test_auto_keeps_the_fastest",
    ),
    Planted(
        "auto picks the slowest in evaluation",
        *("step/chunks.py", "return min(sizes, key=best", "return max(sizes, key=best"),
        "test_evaluate.py::test_auto_keeps_the_fastest",
    ),
    Planted(
        "auto raises",
        *(
            "step/chunks.py",
            "self._grouped, run, members, batch, count, adds)",
            "self._grouped, run, members, batch, adds)",
        ),
        "test_step.py::test_auto_keeps_the_fastest",
    ),
    Planted(
        "auto counts the run that warms up",
        *("step/chunks.py", "            if turn:\n", "            if True:\n"),
        "test_step.py::test_auto_keeps_the_fastest",
    ),
    Planted(
        "auto takes the last time instead of the best",
        *("step/chunks.py", "min(best[size], elapsed)", "elapsed if best[size] == float('inf') else best[size]"),
        "test_step.py::test_auto_keeps_the_fastest",
    ),
    Planted(
        "auto measures at every call",
        *("step/chunks.py", "if key not in self.sizes:", "if True:"),
        "test_step.py::test_auto_keeps_the_fastest",
    ),
    Planted(
        "auto measures once for all numbers of members",
        *("step/chunks.py", "key = (count, device, *", "key = (device, *"),
        "test_step.py::test_auto_measures_each_number_of_members",
    ),
    Planted(
        "loss scales of inactive members change",
        *("step/amp.py", "torch.where(active, scale, state.scale)", "scale"),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "growth of inactive members is counted",
        *("step/amp.py", "torch.where(active, streak, state.growth_tracker)", "streak"),
        "test_step.py::test_scales_of_members_that_do_not_take_part_stay",
    ),
    Planted(
        "the transform draws the same noise in every batch",
        *("run/data.py", "random.fold_in(noise, number)", "noise"),
        "test_data.py::test_transform_draws_anew_for_every_member_batch_and_epoch",
    ),
    Planted(
        "the transform draws the same noise in every epoch",
        *(
            "run/data.py",
            "random.fold_in(random.fold_in(self.keys, _TRANSFORM), epochs)",
            "random.fold_in(self.keys, _TRANSFORM)",
        ),
        "test_data.py::test_transform_draws_anew_for_every_member_batch_and_epoch",
    ),
    Planted(
        "the transform draws the same noise for every member",
        *(
            "run/data.py",
            "random.fold_in(random.fold_in(self.keys, _TRANSFORM), epochs)",
            "random.fold_in(random.fold_in(self.keys * 0, _TRANSFORM), epoch)",
        ),
        "test_data.py::test_transform_draws_anew_for_every_member_batch_and_epoch",
    ),
    Planted(
        "words of several axes are numbered by columns",
        *(
            "random.py",
            "device=start.device).reshape(shape)",
            "device=start.device).reshape([*shape][::-1]).permute([*range(len(shape))][::-1])",
        ),
        "test_random.py::test_bits_are_those_of_the_reference",
    ),
    Planted(
        "the finite check sums in float32",
        *(
            "step/failures.py",
            "leaf.sum([*range(1, leaf.dim())], dtype=wide)",
            "leaf.sum([*range(1, leaf.dim())])",
        ),
        "test_step.py::test_a_gradient_whose_sum_overflows_is_finite",
    ),
    Planted(
        "the finite check looks at the first entry alone",
        *(
            "step/failures.py",
            "torch.stack([leaf.sum() for leaf in leaves])",
            "torch.stack([leaf.flatten()[0] for leaf in leaves])",
        ),
        "test_step.py::test_one_entry_that_is_not_finite_is_found",
    ),
    Planted(
        "one rounding noise for all leaves",
        *("step/amp.py", "random.fold_in(keys, site)", "random.fold_in(keys, 0)"),
        "test_step.py::test_every_leaf_and_step_is_rounded_by_noise_of_its_own",
    ),
    Planted(
        "one rounding noise at every step",
        *("step/amp.py", "random.fold_in(random.fold_in(keys, step), _ROUNDING)", "random.fold_in(keys, _ROUNDING)"),
        "test_step.py::test_every_leaf_and_step_is_rounded_by_noise_of_its_own",
    ),
    Planted(
        "a loss scale reaches infinity",
        *("step/amp.py", "        scale = torch.where(scale.isfinite(), scale, state.scale)\n", ""),
        "test_step.py::test_a_scale_never_becomes_infinite",
    ),
    Planted(
        "files are not forced to the disk",
        *("files/atomic.py", "        os.fsync(file.fileno())\n", ""),
        "test_storage.py::test_files_are_on_the_disk_before_they_take_the_place_of_others",
    ),
    Planted(
        "directories are not forced to the disk",
        *("files/atomic.py", "os.fsync(directory)", "pass"),
        "test_storage.py::test_files_are_on_the_disk_before_they_take_the_place_of_others",
    ),
    Planted(
        "files are forced to the disk before they are written out",
        *("files/atomic.py", "        file.flush()\n", ""),
        "test_storage.py::test_files_are_on_the_disk_before_they_take_the_place_of_others",
    ),
    Planted(
        "the peak of memory is halved",
        *(
            "run/memory.py",
            "return max(itertools.accumulate(event.nbytes() for event in events), default=0)",
            "return max(itertools.accumulate(event.nbytes() for event in events), default=0) // 2",
        ),
        "test_plan.py::test_the_peak_is_the_most_at_one_time",
    ),
    Planted(
        "running statistics become NaN",
        *(
            "models/functional.py",
            'return output, {path: tensors[f"model.{path}"] for path in buffers}',
            "return output, {path: tensors[f\"model.{path}\"] * (float('nan') if path.endswith('var') else 1) for path in buffers}",
        ),
        "test_contract.py::test_members_are_the_runs_of_torch[sgd-cnn]",
    ),
    Planted(
        "frozen parameters are updated",
        *("step/train.py", "if param.requires_grad and covers", "if covers"),
        "test_step.py::test_frozen_parameters_are_not_updated",
    ),
    Planted(
        "buffers of members that stand still change",
        *(
            "step/commit.py",
            "outputs.buffers if keep is None else where(keep, outputs.buffers, state.buffers)",
            "outputs.buffers",
        ),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "steps of inactive members are counted",
        *("step/commit.py", "state.step + state.active", "state.step + 1"),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "optimizer states of members that stand still change",
        *("step/commit.py", "where(keep, (params, opt_state), old)", "(where(keep, params, old[0]), opt_state)"),
        "test_amp.py::test_members_that_stand_still_keep_what_is_rounded",
    ),
    Planted(
        "updates of members that stand still are counted",
        *("optim/_leafwise.py", "new = where(keep, new, {name: getattr(opt_state, name) for name in new})", "pass"),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "updating in place forgets who stands still",
        *("step/commit.py", "outputs.params, keep)", "outputs.params, None)"),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "an overflow freezes the member",
        *("step/judge.py", " | (failure == int(Failure.OVERFLOW))", ""),
        "test_step.py::test_an_overflow_under_a_scale_freezes_nobody",
    ),
    Planted(
        "an inactive member that fails raises",
        *("step/judge.py", 'torch.where(state.active, verdict.report["failure"], 0)', 'verdict.report["failure"]'),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "a step has no gradient by its hyperparameters",
        *("step/train.py", "torch.set_grad_enabled(inside_transform())", "torch.no_grad()"),
        "test_meta.py::test_gradients_by_hyperparameters",
    ),
    Planted(
        "threads share one module",
        *("models/functional.py", "self._idle.pop() if self._idle else _with_attributes(self._make())", "self._first"),
        "test_promises.py::test_steps_run_in_several_threads_at_once",
    ),
    Planted(
        "a mean of gradients loses digits",
        *("optim/_transforms.py", "1 / seen.double()", "1 / seen"),
        "test_promises.py::test_accumulated_means_in_float64",
    ),
    Planted(
        "numbers of the loss lose bits",
        *("step/train.py", "torch.promote_types(kind.to_real(), torch.float32)", "kind"),
        "test_promises.py::test_numbers_of_the_loss_are_copies_and_keep_their_bits",
    ),
    Planted(
        "the imaginary part of a gradient is not looked at",
        *("step/failures.py", "return leaf.sum(", "return leaf.real.sum("),
        "test_promises.py::test_a_gradient_whose_imaginary_part_is_not_finite",
    ),
    Planted(
        "a step writes the caller's batch",
        *("step/batch.py", "leaf.clone() if isinstance(leaf, Tensor) else leaf, tree", "leaf, tree"),
        "test_step.py::test_donating_writes_the_state_alone",
    ),
    Planted(
        "a step writes the caller's keys",
        *("step/commit.py", "keys=state.keys", "keys=state.keys + 1"),
        "test_step.py::test_donating_writes_the_state_alone",
    ),
    Planted(
        "gradients stay scaled",
        *(
            "step/gradients.py",
            "    inverse = scale.double().reciprocal()\n",
            "    inverse = torch.ones_like(scale)\n",
        ),
        "test_step.py::test_gradients_are_those_of_the_loss_whatever_the_scale",
    ),
    Planted(
        "evaluation without autocast",
        *(
            "step/members.py",
            "None if judged else self.options.autocast",
            "None",
        ),
        "test_evaluate.py::test_autocast_in_groups",
    ),
    Planted(
        "evaluation accepts float64 for autocast",
        *(
            "step/evaluate.py",
            "Options(batch_dims, chunk_size, autocast, **kept)",
            "Options(batch_dims, chunk_size, None if autocast == torch.float64 else autocast, **kept)",
        ),
        "test_evaluate.py::test_training_and_evaluation_take_the_same_options",
    ),
    Planted(
        "evaluation does not look at its batch",
        *("step/evaluate.py", "        check_batch(self.options.batch_dims, plain(batch), first.shape[0])\n", ""),
        "test_evaluate.py::test_training_and_evaluation_take_the_same_batches",
    ),
    Planted(
        "take sorts",
        *(
            "_tree.py",
            'atleast_1d(torch.arange(count, device="cpu")[given])',
            'atleast_1d(torch.arange(count, device="cpu")[given]).sort().values',
        ),
        "test_stack.py::test_take",
    ),
    Planted(
        "concat turns the order around",
        *("_tree.py", "torch.cat(column)", "torch.cat(column[::-1])"),
        "test_stack.py::test_concat_restores_what_take_split",
    ),
    Planted(
        "patience is one epoch longer",
        *("callbacks.py", "(waited < patience)", "(waited <= patience)"),
        "test_callbacks.py::test_early_stopping",
    ),
    Planted(
        "keep_best keeps every member when one gets better",
        *(
            "callbacks.py",
            "state = where(better.to(state.active.device), state, load(path, like=state))",
            "load(path, like=state)",
        ),
        "test_callbacks.py::test_keep_best",
    ),
    Planted(
        "means over an epoch count one batch too many",
        *("run/running.py", "value / count.view(", "value / (count + 1).view("),
        "test_fit.py::test_state_and_history",
    ),
    Planted(
        "the mean over an epoch is its last batch",
        *("run/running.py", "self.sums[name] + total if name in self.sums else total", "total"),
        "test_fit.py::test_state_and_history",
    ),
    Planted(
        "a resumed run repeats a batch",
        *(
            "run/run.py",
            "itertools.islice(self.loader, skipped, None)",
            "itertools.islice(self.loader, max(0, skipped - 1), None)",
        ),
        "test_fit.py::test_loaders_that_do_not_tell_their_position_skip_batches",
    ),
    Planted(
        "a resumed run skips a batch",
        *(
            "run/data.py",
            "self._position = self._next = (epoch, batches)",
            "self._position = self._next = (epoch, min(batches + 1, len(self)))",
        ),
        "test_fit.py::test_ctrl_c_ends_the_run_after_the_step_and_it_resumes",
    ),
    Planted(
        "init_params moves the global generator",
        *("models/stack.py", ", torch.random.fork_rng(range(torch.cuda.device_count())):", ":"),
        "test_stack.py::test_new_models_from_seeds",
    ),
    Planted(
        "ties are lost when modules come back",
        *(
            "models/stack.py",
            "member = copied_module(model, memo)",
            "member = copy.deepcopy(model).load_state_dict({**params, **buffers}, strict=False) and model",
        ),
        "test_stack.py::test_ties_stay_ties",
    ),
    Planted(
        "tied parameters are trained apart",
        *("models/functional.py", "for name in self._holders.get(path, (path,))", "for name in (path,)"),
        "test_stack.py::test_tied_and_frozen_parameters_train_as_in_a_loop",
    ),
    Planted(
        "attributes stay after a call",
        *("models/functional.py", "undo(attributes.undoing(changed))", "pass"),
        "test_attributes.py::test_no_tensor_of_a_call_outlives_it",
    ),
    Planted(
        "what an earlier call has left is never tried",
        *(
            "models/attributes.py",
            "_copied(run(body, not altered, buffers))\n        again",
            "_copied(run(make(), not altered, buffers))\n        again",
        ),
        "test_attributes.py::test_what_is_carried_is_refused",
    ),
    Planted(
        "a compiled step may do what an eager one refuses",
        *("step/members.py", "                self._rehearse(layout, *values)", "                pass"),
        "test_attributes.py::test_compiled_it_is_refused_in_the_same_words",
    ),
    Planted(
        "members share the gradient of what they share",
        *("calls/autodiff.py", "[_only(member, start) for start in starts]", "starts"),
        "test_autodiff.py::test_the_array_equals_the_loop",
    ),
    Planted(
        "a model's own checkpoints leave no module to run again",
        *("models/functional.py", "if not (self._checkpoint or checkpoints):", "if not self._checkpoint:"),
        "test_own_checkpoints.py::test_the_numbers_are_those_without",
    ),
    Planted(
        "parts that run again draw other noise",
        *(
            "models/remat.py",
            "mode.again(key, site, [leaves[number] for number in numbers]) as inner",
            "mode.again(key, site + bool(reached), [leaves[n] for n in numbers]) as inner",
        ),
        "test_checkpoint.py::test_the_bits_are_those_of_a_step_without",
    ),
    Planted(
        "half of a kernel is loaded",
        *("_kernels/native.py", "hashlib.sha256(content[:-32]).digest() == content[-32:]", "True"),
        "test_native.py::test_a_kernel_that_is_damaged_or_somebody_else_s_is_made_again",
    ),
    Planted(
        "a graph goes on after a value has changed",
        *("verify/reached.py", "and all(map(operator.is_, now, self._seen))", ""),
        "test_kept.py::test_a_change_is_noticed_and_has_another_digest",
    ),
    Planted(
        "every argument of an optimizer is a number like its rate",
        *("run/kept.py", "if name in names:", "if name:"),
        "test_kept.py::test_numbers_in_the_state_are_no_part_of_a_recipe",
    ),
    Planted(
        "threads leave out the last elements",
        *("_kernels/native.py", "thread + 1 == all ? total : total / all * (thread + 1)", "total / all * (thread + 1)"),
        "test_native.py::test_threads_share_members_and_leaves",
    ),
    Planted(
        "a kernel counts words from 0",
        *("_kernels/noise.py", "step * (uint64_t)(i + 1)", "step * (uint64_t)i"),
        "test_native.py::test_noise_is_that_of_operators",
    ),
    Planted(
        "a kernel updates members that stand still",
        *("_kernels/rows.py", "!keep || keep[model]", "1"),
        "test_optim.py::test_in_place_of_some_members",
    ),
    Planted(
        "a kernel reads narrow numbers as wide ones",
        *("optim/_kernel.py", "value.to(torch.float64) for value in", "value for value in"),
        "test_native.py::test_numbers_may_be_narrow",
    ),
    Planted(
        "autograd does not notice what a kernel writes",
        *("optim/_kernel.py", "torch.autograd.graph.increment_version(", "len("),
        "test_native.py::test_autograd_notices_what_a_kernel_writes",
    ),
    Planted(
        "a slower graph is kept",
        *("run/background.py", "statistics.median(self._compiled) > statistics.median(self.eager)", "False"),
        "test_background.py::test_a_slower_graph_is_left",
    ),
    Planted(
        "positions of a filter beyond the smaller image are kept",
        *("rules/conv.py", "is_exact and len(weight) <= 4", "len(weight) <= 4"),
        "test_lowering.py::test_every_lowering_of_a_convolution",
    ),
    Planted(
        "a choice of speed binds the sizes of a graph",
        *("rules/_choice.py", "tuple(map(expected, shape))", "shape"),
        "test_lowering.py::test_exported_convolutions_take_any_batch",
    ),
    Planted(
        "the last gradients of a leaf are not looked at",
        *("_kernels/nonfinite.py", "int64_t i = 4 * part;", "int64_t i = 4 * part + 1;"),
        "test_failures.py::test_every_value_of_every_gradient_is_looked_at",
    ),
    Planted(
        "compiling begins whether it may pay or not",
        *("run/background.py", "expected < _WORTH * estimate", "False"),
        "test_background.py::test_compiling_begins_where_it_may_pay",
    ),
    Planted(
        "errors of workers name members by their places in the part",
        *("run/trainer.py", "members[int(match[1])]", "int(match[1])"),
        "test_pool.py::test_errors_and_failures_name_the_member",
    ),
    Planted(
        "an ensemble draws the same noise at every call",
        *("step/ensemble.py", "write(self.calls, self.calls + 1)", "pass"),
        "test_ensemble.py::test_noise_is_the_members_own",
    ),
    Planted(
        "an ensemble keeps the running statistics that it began with",
        *("step/ensemble.py", "write(buffer, buffers[path])", "pass"),
        "test_ensemble.py::test_trained_by_torch_it_is_the_array_that_steps_train",
    ),
    Planted(
        "an ensemble shares its tensors with what it is made of",
        *("step/ensemble.py", "nn.Parameter(leaf.detach().clone(), required", "nn.Parameter(leaf.detach(), required"),
        "test_ensemble.py::test_what_it_is_made_of_is_never_written",
    ),
    Planted(
        "an ensemble copies what its members share and do not train",
        *("step/ensemble.py", "nn.Parameter(leaf.detach(), requires_grad=False)", "nn.Parameter(leaf.clone(), False)"),
        "test_shared_ensemble.py::test_one_copy_and_the_gradients_of_the_loop[True]",
    ),
    Planted(
        "a part of an ensemble trains the trunk of the whole",
        *(
            "step/ensemble.py",
            "held |= {path: nn.Parameter(leaf.detach().clone()) for path",
            "held |= {path: leaf for path",
        ),
        "test_shared_ensemble.py::test_members_and_parts_of_it",
    ),
    Planted(
        "an ensemble in train mode writes the statistics of its base",
        *("models/sharing.py", "return [module for module in tracking if", "return [module for module in () if"),
        "test_shared_ensemble.py::test_trained_by_torch_it_is_the_array_that_steps_train",
    ),
    Planted(
        "a trunk that members share is counted for each of them",
        *("run/plan.py", "for tree in (without_shared(state), state))", "for tree in (state, state))"),
        "test_plan.py::test_what_members_share_is_counted_once[True]",
    ),
    Planted(
        "every group of members keeps a gradient of its own of what all share",
        *("step/chunks.py", "total = added if total is None else tree_map(torch.add, total, added)", "total = added"),
        "test_shared.py::test_heads_over_a_trunk_are_the_loop[False-{'chunk_size': 2}]",
    ),
    Planted(
        "parts that run twice copy the base",
        *("models/remat.py", "frozenset() if running is None else running[2]", "frozenset()"),
        "test_quantised.py::test_parts_that_run_twice_keep_no_copies_of_the_base",
    ),
    Planted(
        "a member's rows depend on how many the others have",
        *(
            "run/row_sampling.py",
            "start // size, (start + count - 1) // size + 1",
            "start // count, start // count + count // size + 1",
        ),
        "test_rows.py::test_a_member_alone_sees_the_same",
    ),
    Planted(
        "folds follow the members' number, not the part",
        *("run/row_sampling.py", "[member % folds for member", "[min(member, folds - 1) for member"),
        "test_rows.py::test_folds_part_the_data",
    ),
    Planted(
        "a run gives back the best epoch of all members together",
        *(
            "run/run.py",
            "better = is_better(value, self._value, self._sign)",
            "better = is_better(value.mean(), self._value.mean(), self._sign).expand(len(value))",
        ),
        "test_members.py::test_the_best_epoch_of_each_member_is_given_back",
    ),
    Planted(
        "a smaller array trains on the batches of others",
        *("run/trainer.py", "follow(kept.tolist(), ", "follow([*range(len(kept))], "),
        "test_members.py::test_without_the_inactive_members_the_others_train_the_same[eager]",
    ),
    Planted(
        "members with fewer rows go on while others end their epoch",
        *("run/trainer.py", "state._replace(active=active.clone())", "state"),
        "test_resting.py::test_a_run_is_that_of_arrays_of_one[tensors-in this process]",
    ),
    Planted(
        "members that rested see the batches of the longest epoch",
        *("run/data.py", "self.lengths if resting else", "self.lengths if False else"),
        "test_resting.py::test_a_run_is_that_of_arrays_of_one[items-executor]",
    ),
    Planted(
        "metrics of members that rest count in their means",
        *("run/running.py", "torch.where(mask, total, 0), torch.where(present, weight, 0)", "total, weight"),
        "test_resting.py::test_a_run_is_that_of_arrays_of_one[tensors-in this process]",
    ),
    Planted(
        "an epoch waits for members that are not trained",
        *("run/trainer.py", "if not bool(wanted.any()):", "if False:"),
        "test_resting.py::test_a_smaller_array_trains_those_who_have_a_batch",
    ),
    Planted(
        "items of members that rest are loaded",
        *("run/dataset.py", "[n < last for last in lasts]", "[True for last in lasts]"),
        "test_resting.py::test_what_rests_is_neither_loaded_nor_judged",
    ),
    Planted(
        "the noise of an item is that of its place among the members",
        *("run/dataset.py", "random.fold_in(noise[:, None], rows)", "random.fold_in(noise.flip(0)[:, None], rows)"),
        "test_dataset.py::test_a_member_s_batches_alone_are_those_in_the_array[shuffled]",
    ),
    Planted(
        "a data set has the same noise in every epoch",
        *(
            "run/dataset.py",
            "random.fold_in(random.fold_in(self.keys, _ITEM), self._ahead + epoch)",
            "random.fold_in(self.keys, _ITEM)",
        ),
        "test_dataset.py::test_noise_belongs_to_member_epoch_and_item",
    ),
    Planted(
        "what a LightningModule logs is a mean over batches, not over rows",
        *("integrations/lightning_steps.py", "value * sums[name + ROWS]", "value * 8"),
        "test_lightning.py::test_members_are_what_a_trainer_makes_of_each_alone[by_step]",
    ),
    Planted(
        "a step reads the first member's hparams",
        *(
            "integrations/lightning_steps.py",
            "_Hparams(model._hparams | numbers)",
            "_Hparams(numbers | model._hparams)",
        ),
        "test_lightning.py::test_members_are_what_a_trainer_makes_of_each_alone[by_step]",
    ),
    Planted(
        "Trainers see batches in the order of the first one's seed",
        *(
            "integrations/transformers.py",
            "torch.manual_seed(trainer.args.seed)",
            "torch.manual_seed(trainers[0].args.seed)",
        ),
        "test_train_trainers.py::test_members_are_what_a_trainer_makes_of_each_alone[padded]",
    ),
    Planted(
        "the noise of an item goes on from that of the one before",
        *("run/dataset.py", "            seed_all(seed)\n", ""),
        "test_dataset.py::test_noise_belongs_to_member_epoch_and_item",
    ),
    Planted(
        "PyTorch and NumPy draw the same bits for an item",
        *("run/dataset.py", "seed >> 32 & ", "seed & "),
        "test_dataset.py::test_generators_of_one_kind_draw_different_bits",
    ),
    Planted(
        "an item that is drawn again in an epoch has the noise that it had",
        *("run/dataset.py", "if self._repeats:", "if False:"),
        "test_dataset.py::test_an_item_drawn_again_has_other_noise",
    ),
    Planted(
        "loading an item draws from the caller's generator of Python",
        *("run/dataset.py", "    stack.callback(python_random.setstate, python_random.getstate())\n", ""),
        "test_dataset.py::test_the_caller_s_generators_stay_whoever_loads[here]",
    ),
    Planted(
        "two iterations over a data set share processes that last",
        *("run/dataset.py", "self._idle.pop() if", "self._idle[0] if"),
        "test_dataset.py::test_the_caller_s_generators_stay_whoever_loads[lasting]",
    ),
    Planted(
        "a stream behind a DataLoader is asked for its length",
        *("run/fit.py", "operator.length_hint(loader)", "len(loader)"),
        "test_dataset.py::test_streams_without_a_length_train_and_go_on",
    ),
    Planted(
        "an executor keeps the batches of members that are gone",
        *(
            "run/trainers.py",
            "if run.loader is not self._loader or self._function is None:",
            "if self._function is None:",
        ),
        "test_following.py::test_members_come_and_go[executor]",
    ),
    Planted(
        "errors of a smaller array name members by their place in it",
        *("run/trainer.py", "renumbered(error, kept.tolist())", "renumbered(error, range(count))"),
        "test_following.py::test_errors_in_this_process_name_members_of_the_whole_array",
    ),
    Planted(
        "members that come later see the batches of an old epoch",
        *("run/data.py", "-start if place < 0 else", "0 if place < 0 else"),
        "test_members.py::test_a_run_follows_members_that_are_added",
    ),
    Planted(
        "a diverged member spoils averages without it",
        *("step/state.py", "torch.where(finite, flat, 0)", "flat"),
        "test_members.py::test_a_bad_member_spoils_its_own_averages_only",
    ),
    Planted(
        "who is away averages",
        *("step/mixing.py", "& (labels >= 0)", ""),
        "test_averaging.py::test_groups_average_with_weights_and_who_is_away_keeps_its_own",
    ),
    Planted(
        "peers of a grid meet the same ones again",
        *("step/mixing.py", "along = turn % len(sizes)", "along = 0"),
        "test_averaging.py::test_a_grid_has_the_average_of_all_after_as_many_rounds_as_dimensions",
    ),
    Planted(
        "an ensemble predicts in train mode",
        *("step/prediction.py", "        self.training = training\n", ""),
        "test_ensemble.py::test_predictions_are_those_of_the_members",
    ),
    Planted(
        "an exported ensemble needs this package",
        *("rules/_operator.py", "self.forward if torch.compiler.is_exporting() else self._op", "self._op"),
        "test_ensemble.py::test_onnx_runtime_runs_it",
    ),
    Planted(
        "a result that was written since is made again as it was before",
        *("calls/recompute.py", "if made is not None and made[1] == _torch.writes(tensor)", "if made is not None"),
        "test_save.py::test_a_result_that_is_written_is_kept_as_it_is_then",
    ),
    Planted(
        "an argument that is made again has another shape than it was passed in",
        *(
            "calls/recompute.py",
            "self.recipe.make().as_strided(self.size, self.stride, self.offset)",
            "self.recipe.make()",
        ),
        "test_save.py::test_training_is_the_same",
    ),
    Planted(
        "batch normalisation is made again to other bits",
        *("rules/norm_batch.py", "None, None, True, 0.0, eps, cudnn)", "None, None, True, 0.0, 2 * eps, cudnn)"),
        "test_save.py::test_bits_are_the_same",
    ),
    Planted(
        "a forward may write a shared base unnoticed",
        *("models/sharing.py", "if writes(part) != count:", "if False:"),
        "test_frozen.py::test_a_forward_that_writes_the_base_is_refused",
    ),
    Planted(
        "a counter stays as it was",
        *("models/functional.py", "            count_later(template, {", "            dict({"),
        "test_attributes.py::test_attributes_of_one_call_are_those_of_the_loop",
    ),
    Planted(
        "each group of members counts as a call",
        *("models/attributes.py", "    if _pending.get() is not None:", "    if True:"),
        "test_attributes.py::test_attributes_of_one_call_are_those_of_the_loop",
    ),
    Planted(
        "products of rows that lie apart repeat shared weights",
        *("rules/linear.py", "x.flatten(0, -2) if x.dim() > 2 else x, weight", "x, weight"),
        "test_frozen.py::test_shared_weights_are_used_by_one_kernel_and_get_no_gradient",
    ),
    Planted(
        "loading an adapter writes biases of the shared base",
        *("models/adapters.py", "if param.requires_grad and id(param) in shared:", "if False:"),
        "test_adapters.py::test_adapters_are_the_runs_of_peft_alone",
    ),
    Planted(
        "a member that failed spoils what all share",
        *("step/shared.py", "if keep is not None and not outputs.summed:", "if False:"),
        "test_shared.py::test_a_member_that_fails_contributes_nothing",
    ),
    Planted(
        "what members share is updated although all have failed",
        *("step/shared.py", "None if keep is None else keep.any().reshape(1)", "None"),
        "test_shared.py::test_nothing_is_updated_where_all_fail",
    ),
    Planted(
        "inactive members train what all share",
        *("step/gradients.py", " and bool(state.active.all()):", ":"),
        "test_shared.py::test_inactive_and_dropped_members_contribute_nothing",
    ),
    Planted(
        "an eager step holds a gradient of each member of what they share",
        *("step/gradients.py", "if shared and can_look(", "if shared and False and can_look("),
        "test_shared.py::test_an_eager_step_holds_one_gradient_of_the_trunk",
    ),
    Planted(
        "members taken from a state write what it shares",
        *("_tree.py", "            return tree_map(torch.clone, leaf)", "            return leaf"),
        "test_shared.py::test_members_taken_from_a_state_do_not_write_its_trunk",
    ),
    Planted(
        "a base whose tensors were replaced goes on as it was",
        *("models/sharing.py", "if path not in given and held.get(name) is not tensor:", "if False:"),
        "test_frozen.py::test_a_base_whose_tensors_were_replaced_is_noticed",
    ),
    Planted(
        "quantised bases of models are compared as if they were plain",
        *("models/sharing.py", "if len(parts(tensor)) > 1 and", "if False and"),
        "test_quantised.py::test_equal_bases_are_one_and_others_are_named",
    ),
    Planted(
        "a call whose worker fails in another way than by dying is lost",
        *(
            "workers/pool.py",
            "            except Exception as error:\n                # The worker's state is unknown",
            "            except Died as error:\n                # The worker's state is unknown",
        ),
        "test_pool.py::test_whatever_happens_to_a_worker_its_call_is_answered",
    ),
    Planted(
        "Ctrl-C inside a segment waits for its end",
        *("run/trainers.py", "if ended or hooks.stopped() or running.", "if ended or running."),
        "test_pool.py::test_ctrl_c_inside_a_segment_ends_it_after_a_step_or_two",
    ),
    Planted(
        "TensorBoard shows epochs of a study that was broken off twice",
        *("tune/study.py", "shutil.rmtree(folder, ignore_errors=True)", "shutil.disk_usage('/')"),
        "test_watching.py::test_tensorboard_has_a_run_per_trial",
    ),
    Planted(
        "an object store without room ends the worker",
        *(
            "cluster/ray_actors.py",
            "(ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)",
            "ZeroDivisionError",
        ),
        "test_cluster.py::test_states_larger_than_the_object_store_are_spilled_or_refused",
    ),
    Planted(
        "a rate of 0 counts as a draw of the member",
        *("calls/routing.py", "self.site - self.skipped", "self.site"),
        "test_numbers.py::test_noise_is_that_of_a_solo_run_to_the_bit",
    ),
    Planted(
        "rates in single precision",
        *("calls/routing.py", "if func in HANDLERS:\n            # Noise", "if False:\n            # Noise"),
        "test_numbers.py::test_noise_is_that_of_a_solo_run_to_the_bit",
    ),
    Planted(
        "numbers keep their precision among tensors of less",
        *("calls/routing.py", "kind = precision(met)", "kind = torch.float64"),
        "test_numbers.py::test_numbers_have_the_precision_of_what_they_meet",
    ),
    Planted(
        "numbers keep their precision among integers and masks",
        *("calls/numbers.py", "return torch.get_default_dtype()", "return torch.float64"),
        "test_number_kinds.py::test_results_are_those_of_python_numbers",
    ),
    Planted(
        "any scalar of double precision is taken for a number",
        *("calls/routing.py", "any(value is number for number in self.numbers)", "value.dtype == torch.float64"),
        "test_number_kinds.py::test_results_are_those_of_python_numbers",
    ),
    Planted(
        "a part that runs twice forgets which of its inputs are numbers",
        *("models/remat.py", "if mode.is_number(leaf)]", "if False]"),
        "test_number_kinds.py::test_results_are_those_of_python_numbers",
    ),
    Planted(
        "a part that runs twice forgets its own numbers",
        *("models/remat.py", " and not mode.is_number(buffers[path])]", "]"),
        "test_number_kinds.py::test_results_are_those_of_python_numbers",
    ),
    Planted(
        "a dropout rate of a model may be any number",
        *("step/train.py", "check(name, carried[name], Range.RATE)", "pass"),
        "test_number_kinds.py::test_rates_out_of_range_are_refused_by_member_and_path",
    ),
    Planted(
        "a dropout rate out of range drops everything",
        *("calls/numbers.py", "(rate >= 0) & (rate <= 1), rate, math.nan", "rate <= 1, rate, 1.0"),
        "test_number_kinds.py::test_the_member_of_a_rate_that_goes_out_of_range_fails",
    ),
    Planted(
        "noise that goes on after a part that runs twice as if nothing had been skipped",
        *("models/remat.py", "inner.skipped, inner.padding = skipped,", "inner.padding ="),
        "test_numbers.py::test_every_way_to_run_a_step",
    ),
    Planted(
        "a state keeps the numbers among its buffers too",
        *(
            "models/scalar_attributes.py",
            "return buffers | placeholders if placeholders else buffers",
            "return buffers",
        ),
        "test_numbers.py::test_the_state_carries_them_as_hparams",
    ),
    Planted(
        "numbers of the first model in every module that is made",
        *("models/stack.py", "enumerate(members if numbers else ())", "enumerate(())"),
        "test_numbers.py::test_models_go_back_with_their_own_numbers",
    ),
    Planted(
        "a number that differs later was that of the last model before",
        *("models/stack.py", "if path in differing else values[0])", "if path in differing else values[-1])"),
        "test_numbers.py::test_members_are_the_runs_of_their_own_models",
    ),
    Planted(
        "a state without its numbers trains with those of the model",
        *(
            "models/stack.py",
            "                if is_placeholder(leaves[path]):",
            "                if is_placeholder(leaves[path]) and False:",
        ),
        "test_numbers.py::test_models_without_the_state_are_refused_without_their_numbers",
    ),
    Planted(
        "integers are numbers, too",
        *("models/structure.py", "is_real = isinstance(a, float) or isinstance(b, float) or", "is_real = True or"),
        "test_numbers.py::test_integers_may_be_sizes",
    ),
    Planted(
        "a model that writes its number in place goes unnoticed",
        *("models/functional.py", " or written(number) != version:", ":"),
        "test_numbers.py::test_a_model_that_changes_its_number_is_refused",
    ),
    Planted(
        "calls of a graph do not notice another choice of lowerings",
        *("_torch/inductor.py", 're.compile(r"_pytree|', 're.compile(r"|_pytree|'),
        "test_background.py::test_a_graph_notices_what_its_user_changes",
    ),
    Planted(
        "optimizers that step after they became an array's change it",
        *("step/exchange.py", "leaf.detach().clone() if", "leaf if"),
        "test_exchange.py::test_a_run_goes_on_as_the_scripts[False]",
    ),
    Planted(
        "a buffer of zeros in an optimizer that has not stepped",
        *("step/exchange.py", "if counted or part.step[member]", "if True"),
        "test_exchange.py::test_what_has_not_stepped_goes_back_as_it_was",
    ),
    Planted(
        "a scheduler that has changed nothing yet forgets its steps",
        *("step/exchange.py", 'if (name == "lr" and follows) or', "if"),
        "test_exchange.py::test_what_has_not_stepped_goes_back_as_it_was",
    ),
    Planted(
        "a parameter in evaluation does not require grad",
        *("step/evaluate.py", "x.detach().requires_grad_() if path in trained else x for", "x.detach() for"),
        "test_control_flow.py::test_parameters_require_grad_as_alone",
    ),
    Planted(
        "a record is used though a value of Python has changed",
        *("step/replay.py", "for one in self.records if one.reads.holds()", "for one in self.records"),
        "test_replay.py::test_what_functions_read_from_python[a closure]",
    ),
    Planted(
        "a record is used for tensors of another kind",
        *("step/replay.py", "and latest.is_like(*inputs)", ""),
        "test_replay.py::test_what_tensors_are_like",
    ),
    Planted(
        "a record is used though a context observes operators",
        *("step/replay.py", "        or function_modes()\n", ""),
        "test_replay.py::test_what_the_step_runs_in",
    ),
    Planted(
        "views of the same shape are one tensor wherever they begin",
        *("_torch/recorded.py", "tensor.stride(), tensor.storage_offset()", "tensor.stride()"),
        "test_replay.py::test_views_that_read_the_same_memory_are_one_tensor",
    ),
    Planted(
        "a record of an update that reads Python is used",
        *("step/records.py", "closed and (self._looks", "(self._looks"),
        "test_replay.py::test_updates[a schedule that reads a global]",
    ),
    Planted(
        "a replayed step updates members that do not take part",
        *(
            "step/records.py",
            "if self._second is None or (self._looks and not decision[self._keep].all()):",
            "if self._second is None:",
        ),
        "test_replay.py::test_updates[a chain]",
    ),
    Planted(
        "a record is used before it has given the bits of a step",
        *(
            "step/replay.py",
            "record is not None and record.is_checked",
            "record is not None and record._first.rehearse(inputs)",
        ),
        "test_replay.py::test_what_gives_other_values_at_each_call_is_noticed",
    ),
    Planted(
        "a record writes into tensors that live longer",
        *("_torch/recorded.py", "storage_number(leaf) in self._kept", "False"),
        "test_replay.py::test_refusals_say_why",
    ),
    Planted(
        "networks of a member draw the same noise",
        *("step/joint.py", 'b"" if once else name.encode()', 'b""'),
        "test_joint.py::test_noise_is_that_of_seed_name_and_update",
    ),
    Planted(
        "buffers stay although their network has been updated",
        *("step/joint.py", "kept[path] if covers(name, path) else leaf", "leaf"),
        "test_several_networks.py::test_a_gan_makes_its_samples_once[3]",
    ),
    Planted(
        "the parts of a batch have the same noise",
        *("step/joint.py", "before.step * self._parts + part", "before.step"),
        "test_joint.py::test_noise_is_that_of_seed_name_and_update",
    ),
    Planted(
        "the first network of a member that fails stays updated",
        *("step/joint.py", "bool((failed & state.active).any())", "False"),
        "test_joint.py::test_a_member_fails_as_a_whole",
    ),
    Planted(
        "a second network is updated although the first has failed",
        *("step/joint.py", "state.active & ~_is_real(failure)", "state.active"),
        "test_joint.py::test_a_member_fails_as_a_whole",
    ),
    Planted(
        "networks that cannot be taken back are updated in place",
        *("step/joint.py", " and self._every[last] == self._parts", ""),
        "test_joint.py::test_a_member_fails_as_a_whole",
    ),
    Planted(
        "truncation is taken for termination",
        *("rl/rollouts.py", "torch.where(terminated, 0, rate * next_value)", "torch.where(done, 0, rate * next_value)"),
        "test_rollouts.py::test_advantages_tell_truncation_from_termination",
    ),
    Planted(
        "the observation after an end is the final one",
        *("rl/environment.py", "observation=_where(done, new_observation, final)", "observation=final"),
        "test_environments.py::test_episodes_end_and_begin_anew",
    ),
    Planted(
        "a step that collects reports the metrics of its last batch",
        *("step/many.py", "value.mean(0) if", "value[-1] if"),
        "test_agents.py::test_fit_trains_agents",
    ),
    Planted(
        "environments of members that stopped go on",
        *("step/many.py", "carry = where(state.active, carry, state.carry)", "pass"),
        "test_agents.py::test_agents_that_stopped_stay_as_they_are_with_their_environments",
    ),
    Planted(
        "every iteration of a loop in a model draws the same numbers",
        *("calls/scan.py", "call(index, iteration,", "call(0, iteration,"),
        "test_scan.py::test_a_model_that_calls_it_draws_other_numbers_in_each_iteration",
    ),
    Planted(
        "softmax counts the units that a member lacks",
        *("calls/padding.py", "(_reduction(-math.inf, True), _shape)", "(_reduction(0.0, True), _shape)"),
        "test_padding.py::test_members_are_their_models_alone[pyramid]",
    ),
    Planted(
        "statistics of a norm hold the units that a member lacks",
        *("calls/padding.py", "centered = torch.where(mask, x - ", "centered = torch.where(mask | True, x - "),
        "test_padding.py::test_members_are_their_models_alone[blocks]",
    ),
    Planted(
        "weight decay and norms of gradients count the entries that a member lacks",
        *("models/padding.py", " if mask is None else torch.where(mask, param, 0.0)", ""),
        "test_padding.py::test_members_are_their_models_alone[mlp]",
    ),
    Planted(
        "a step is replayed for members of other sizes",
        *("step/replay.py", "(tuple(leaf.tolist()) for leaf in member_sizes(state))", "()"),
        "test_blocks.py::test_replays_are_for_members_of_the_same_sizes",
    ),
    Planted(
        "members that lack a block count its draws",
        *("models/remat.py", "    output, after, mode.skipped = ", "    output, after, _ = "),
        "test_blocks.py::test_members_are_their_models_alone[any order-noise]",
    ),
    Planted(
        "the rows that a padded look-up table has shortened are forgotten",
        *("models/functional.py", "if self._renorms and params is not whole:", "if False:"),
        "test_blocks.py::test_members_are_their_models_alone[any order-max_norm]",
    ),
    Planted(
        "a tape keeps a sum of what an operator has written meanwhile",
        *(
            "_torch/recorded.py",
            "storage_number(one) not in self._written_storages for one in sources",
            "True for one in sources",
        ),
        "test_replay.py::test_fixed_values_that_an_operator_writes_or_draws_from_are_not_made_once",
    ),
    Planted(
        "a draw from fixed probabilities is the same in each replay",
        *("_torch/recorded.py", "torch.Tag.nondeterministic_seeded not in func.tags", "True"),
        "test_replay.py::test_fixed_values_that_an_operator_writes_or_draws_from_are_not_made_once",
    ),
    Planted(
        "padded units are dropped by words of the padded width",
        *("_kernels/noise.py", "at = before * (width[model] - length) + 1", "at = 1"),
        "test_blocks.py::test_replays_are_for_members_of_the_same_sizes",
    ),
    Planted(
        "a kernel drops by another scale than operators",
        *("_kernels/noise.py", "< most) * by;", "< most) / by;"),
        "test_random.py::test_one_kernel_drops_what_several_operators_drop",
    ),
]
