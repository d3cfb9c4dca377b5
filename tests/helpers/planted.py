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
        "groups leave out the last members",
        *("step/chunks.py", "[*range(0, count, size), count]", "[*range(0, count, size)]"),
        "test_evaluate.py::test_noise_is_that_of_seed_and_inverted_step",
    ),
    Planted(
        "one dropout mask at every step",
        *("step/gradients.py", "random.fold_in(state.keys, state.step + NOISE)", "random.fold_in(state.keys, 0)"),
        "test_step.py::test_noise_is_that_of_seed_and_step",
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
        "loss scales of inactive members change",
        *("step/options.py", "torch.where(active, scale, state.scale)", "scale"),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "the transform draws the same noise for every member",
        *("run/data.py", ", _TRANSFORM), epochs", " * 0, _TRANSFORM), epoch"),
        "test_data.py::test_transform_draws_anew_for_every_member_batch_and_epoch",
    ),
    Planted(
        "words of several axes are numbered by columns",
        *("random.py", "reshape(shape", "reshape([*shape][::-1]).permute([*range(len(shape))][::-1]"),
        "test_random.py::test_bits_are_those_of_the_reference",
    ),
    Planted(
        "the finite check sums in float32",
        *("step/commit.py", "leaf.sum([*range(1, leaf.dim())], dtype=wide)", "leaf.sum([*range(1, leaf.dim())])"),
        "test_step.py::test_a_gradient_whose_sum_overflows_is_finite",
    ),
    Planted(
        "files are not forced to the disk",
        *("files/atomic.py", "        os.fsync(file.fileno())\n", ""),
        "test_storage.py::test_files_are_on_the_disk_before_they_take_the_place_of_others",
    ),
    Planted(
        "the peak of memory is halved",
        *("run/memory.py", ", default=0)", ", default=0) // 2"),
        "test_plan.py::test_the_peak_is_the_most_at_one_time",
    ),
    Planted(
        "running statistics become NaN",
        *(
            "models/functional.py",
            'changed_buffers = {path: tensors[f"model.{path}"] for path in buffers}',
            "changed_buffers = {path: tensors[f\"model.{path}\"] * (float('nan') if path.endswith('var') else 1) for path in buffers}",
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
        *("step/commit.py", " if keep is None else where(keep, outputs.buffers, state.buffers)", ""),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "updates of members that stand still are counted",
        *("optim/_leafwise.py", "new = where(keep, new, {name: getattr(opt_state, name) for name in new})", "pass"),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "updating in place forgets who stands still",
        *(
            "step/commit.py",
            "given = self._optimizer, outputs.grads, state.opt_state, outputs.params, keep",
            "given = self._optimizer, outputs.grads, state.opt_state, outputs.params, None",
        ),
        "test_step.py::test_inactive_members_keep_everything",
    ),
    Planted(
        "an overflow freezes the member",
        *("step/commit.py", " | (failure == int(Failure.OVERFLOW))", ""),
        "test_step.py::test_an_overflow_under_a_scale_freezes_nobody",
    ),
    Planted(
        "a step has no gradient by its hyperparameters",
        *("step/train.py", "torch.set_grad_enabled(inside_transform())", "torch.no_grad()"),
        "test_meta.py::test_gradients_by_hyperparameters",
    ),
    Planted(
        "threads share one module",
        *("models/functional.py", "self._idle.pop() if self._idle else self._make()", "self._first"),
        "test_promises.py::test_steps_run_in_several_threads_at_once",
    ),
    Planted(
        "a mean of gradients loses digits",
        *("optim/_transforms.py", "1 / seen.double()", "1 / seen"),
        "test_promises.py::test_accumulated_means_in_float64",
    ),
    Planted(
        "the imaginary part of a gradient is not looked at",
        *("step/commit.py", "return leaf.sum(", "return leaf.real.sum("),
        "test_promises.py::test_a_gradient_whose_imaginary_part_is_not_finite",
    ),
    Planted(
        "a step writes the caller's batch",
        *("step/batch.py", "copy(leaf) if isinstance(leaf, Tensor) else leaf, tree", "leaf, tree"),
        "test_step.py::test_donating_writes_the_state_alone",
    ),
    Planted(
        "evaluation without autocast",
        *("step/members.py", "None if judged else self.options.autocast", "None"),
        "test_evaluate.py::test_autocast_in_groups",
    ),
    Planted(
        "take sorts",
        *("_tree.py", 'cpu")[given])', 'cpu")[given]).sort().values'),
        "test_stack.py::test_take",
    ),
    Planted(
        "patience is one epoch longer",
        *("callbacks.py", "(waited < patience)", "(waited <= patience)"),
        "test_callbacks.py::test_early_stopping",
    ),
    Planted(
        "means over an epoch count one batch too many",
        *("run/evaluation.py", "value / count.view(", "value / (count + 1).view("),
        "test_fit.py::test_state_and_history",
    ),
    Planted(
        "init_params moves the global generator",
        *(
            "models/stack.py",
            "with random.one_thread(), torch.random.fork_rng(range(torch.cuda.device_count())):",
            "if 1:",
        ),
        "test_stack.py::test_new_models_from_seeds",
    ),
    Planted(
        "tied parameters are trained apart",
        *("models/functional.py", "for name in self._holders.get(path, (path,))", "for name in (path,)"),
        "test_stack.py::test_members_train_as_alone",
    ),
    Planted(
        "what an earlier call has left is never tried",
        *("models/attributes.py", "body, not altered, buffers))\n", "make()[0], not altered, buffers))\n"),
        "test_attributes.py::test_what_is_carried_is_refused",
    ),
    Planted(
        "members share the gradient of what they share",
        *("calls/autodiff.py", "[_only(member, start) for start in starts]", "starts"),
        "test_autodiff.py::test_the_array_equals_the_loop",
    ),
    Planted(
        "parts that run again draw other noise",
        *("models/remat.py", ", [leaves[number] for number", " + bool(reached), [leaves[n] for n"),
        "test_checkpoint.py::test_the_bits_are_those_of_a_step_without",
    ),
    Planted(
        "half of a kernel is loaded",
        *("_kernels/native.py", "hashlib.sha256(content[:-32]).digest() == content[-32:]", "True"),
        "test_native.py::test_a_kernel_that_is_damaged_or_somebody_else_s_is_made_again",
    ),
    Planted(
        "a graph goes on after a value has changed",
        *("verify/reached.py", "and all(map(operator.is_, now, self._before))", ""),
        "test_kept.py::test_a_change_is_noticed_and_has_another_digest",
    ),
    Planted(
        "every argument of an optimizer is a number like its rate",
        *("run/kept.py", "if name in names:", "if name:"),
        "test_kept.py::test_numbers_in_the_state_are_no_part_of_a_recipe",
    ),
    Planted(
        "a population has the same noise in every generation",
        *(
            "es.py",
            "random.fold_in(random.fold_in(state.keys, NOISE), state.step)",
            "random.fold_in(state.keys, NOISE)",
        ),
        "test_es.py::test_noise_differs_between_steps_seeds_pairs_and_leaves",
    ),
    Planted(
        "a weight that another module holds is perturbed twice",
        *("es.py", " and held.count(id(layer.weight)) == 1", ""),
        "test_es.py::test_members_are_the_same_whoever_reads_a_weight",
    ),
    Planted(
        "a kernel counts words from 0",
        *("_kernels/noise.py", "step * (uint64_t)(i + 1)", "step * (uint64_t)i"),
        "test_native.py::test_noise_is_that_of_operators",
    ),
    Planted(
        "a kernel updates members that stand still",
        *("optim/_kernel.py", "!keep || keep[model]", "1"),
        "test_optim.py::test_in_place_of_some_members",
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
        "parts that run twice copy the base",
        *("models/remat.py", "frozenset() if running is None else running[2]", "frozenset()"),
        "test_quantised.py::test_parts_that_run_twice_keep_no_copies_of_the_base",
    ),
    Planted(
        "a member's rows depend on how many the others have",
        *("run/row_sampling.py", "size, (start + count - 1)", "count, start // count + count"),
        "test_rows.py::test_a_member_alone_sees_the_same",
    ),
    Planted(
        "a run gives back the best epoch of all members together",
        *("run/run.py", ", self._value, self._sign", ".mean(), self._value.mean(), self._sign).expand(len(value)"),
        "test_members.py::test_the_best_epoch_of_each_member_is_given_back",
    ),
    Planted(
        "the noise of an item is that of its place among the members",
        *("run/dataset.py", "random.fold_in(noise[:, None], rows)", "random.fold_in(noise.flip(0)[:, None], rows)"),
        "test_dataset.py::test_noise_of_collating_belongs_to_member_epoch_and_batch",
    ),
    Planted(
        "what a LightningModule logs is a mean over batches, not over rows",
        *("integrations/lightning_steps.py", "value * sums[name + ROWS]", "value * 8"),
        "test_lightning.py::test_members_are_what_a_trainer_makes_of_each_alone[by_step]",
    ),
    Planted(
        "Trainers see batches in the order of the first one's seed",
        *("integrations/transformers.py", "(trainer.args", "(trainers[0].args"),
        "test_train_trainers.py::test_members_are_what_a_trainer_makes_of_each_alone[padded]",
    ),
    Planted(
        "a stream behind a DataLoader is asked for its length",
        *("run/fit.py", "length = operator.length_hint(loader)", "length = len(loader)"),
        "test_dataset.py::test_streams_without_a_length_train_and_go_on",
    ),
    Planted(
        "a diverged member spoils averages without it",
        *("step/state.py", "torch.where(finite, flat, 0)", "flat"),
        "test_members.py::test_a_bad_member_spoils_its_own_averages_only",
    ),
    Planted(
        "who is away averages",
        *("step/state.py", " & (labels >= 0)", ""),
        "test_averaging.py::test_groups_average_with_weights_and_who_is_away_keeps_its_own",
    ),
    Planted(
        "an ensemble predicts in train mode",
        *("step/prediction.py", "        self.training = training\n", ""),
        "test_ensemble.py::test_predictions_are_those_of_the_members",
    ),
    Planted(
        "an exported ensemble needs this package",
        *(
            "rules/_operator.py",
            "self.forward if torch.compiler.is_exporting() and not self.opaque else self._op",
            "self._op",
        ),
        "test_deploy.py::test_onnx_runtime_takes_any_number_of_rows",
    ),
    Planted(
        "a result that was written since is made again as it was before",
        *("calls/recompute.py", "if made is not None and made[1] == _torch.writes(tensor)", "if made is not None"),
        "test_save.py::test_a_result_that_is_written_is_kept_as_it_is_then",
    ),
    Planted(
        "a forward may write a shared base unnoticed",
        *("models/sharing.py", "if writes(part) != count:", "if False:"),
        "test_frozen.py::test_a_forward_that_writes_the_base_is_refused",
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
        *("step/commit.py", "torch.where(per_model(every, x).bool(), x, 0).sum", "x.sum"),
        "test_shared.py::test_a_member_that_fails_contributes_nothing",
    ),
    Planted(
        "a call whose worker fails in another way than by dying is lost",
        *(
            "workers/pool.py",
            "        except Exception as error:\n            # The worker's state is unknown",
            "        except Died as error:\n            # The worker's state is unknown",
        ),
        "test_pool.py::test_whatever_happens_to_a_worker_its_call_is_answered",
    ),
    Planted(
        "Ctrl-C inside a segment waits for its end",
        *("run/trainers.py", "if ended or is_stopped or running.", "if ended or running."),
        "test_pool.py::test_ctrl_c_inside_a_segment_ends_it_after_a_step_or_two",
    ),
    Planted(
        "TensorBoard shows epochs of a study that was broken off twice",
        *("tune/study.py", "shutil.rmtree(folder, ignore_errors=True)", "shutil.disk_usage('/')"),
        "test_again.py::test_tensorboard_has_a_run_per_trial",
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
        "a dropout rate out of range drops everything",
        *("calls/draws.py", "(rate >= 0) & (rate <= 1), rate, math.nan", "rate <= 1, rate, 1.0"),
        "test_number_kinds.py::test_the_member_of_a_rate_that_goes_out_of_range_fails",
    ),
    Planted(
        "a state keeps the numbers among its buffers too",
        *("models/scalar_attributes.py", " | placeholders if placeholders else buffers", ""),
        "test_numbers.py::test_the_state_carries_them_as_hparams",
    ),
    Planted(
        "integers are numbers, too",
        *("models/structure.py", "is_real = isinstance(a, float) or isinstance(b, float) or", "is_real = True or"),
        "test_numbers.py::test_integers_may_be_sizes",
    ),
    Planted(
        "calls of a graph do not notice another choice of lowerings",
        *("_torch/compiler.py", 're.compile(r"_pytree|', 're.compile(r"|_pytree|'),
        "test_background.py::test_a_graph_notices_what_its_user_changes",
    ),
    Planted(
        "optimizers that step after they became an array's change it",
        *("step/exchange.py", "leaf.detach().clone() if", "leaf if"),
        "test_exchange.py::test_a_run_goes_on_as_the_scripts[False]",
    ),
    Planted(
        "a record is used though a value of Python has changed",
        *("step/replay.py", "for one in shape.records if one.reads.holds()", "for one in shape.records"),
        "test_replay.py::test_what_functions_read_from_python[a closure]",
    ),
    Planted(
        "a record is used for tensors of another kind",
        *("step/replay.py", "and latest.is_like(*inputs)", ""),
        "test_replay.py::test_what_tensors_are_like",
    ),
    Planted(
        "a replayed step updates members that do not take part",
        *("step/replay.py", " or (self._looks and not decision[self._keep].all())", ""),
        "test_replay.py::test_updates[a chain]",
    ),
    Planted(
        "networks of a member draw the same noise",
        *("step/joint.py", 'b"" if once else name.encode()', 'b""'),
        "test_joint.py::test_noise_is_that_of_seed_name_and_update",
    ),
    Planted(
        "truncation is taken for termination",
        *("rl/rollouts.py", "torch.where(terminated, 0, rate * next_value)", "torch.where(done, 0, rate * next_value)"),
        "test_rollouts.py::test_advantages_tell_truncation_from_termination",
    ),
    Planted(
        "the observation after an end is the final one",
        *("rl/environment.py", "observation=chosen(done, new_observation, final)", "observation=final"),
        "test_environments.py::test_episodes_end_and_begin_anew",
    ),
    Planted(
        "a step that collects reports the metrics of its last batch",
        *("step/many.py", "value.mean(0) if", "value[-1] if"),
        "test_agents.py::test_fit_trains_agents",
    ),
    Planted(
        "what a replayed collection writes into the state is lost",
        *("step/many.py", "if [*map(id, leaves(state))] != [*map(id, before)]:", "if False:"),
        "test_collect.py::test_a_collection_that_does_more_than_compute_runs_as_it_is",
    ),
    Planted(
        "every iteration of a loop in a model draws the same numbers",
        *("calls/scan.py", "call(index, iteration,", "call(0, iteration,"),
        "test_scan.py::test_a_model_that_calls_it_draws_other_numbers_in_each_iteration",
    ),
    Planted(
        "softmax counts the units that a member lacks",
        *("calls/padding.py", "_reduction(-math.inf, True)", "_reduction(0.0, True)"),
        "test_padding.py::test_members_are_their_models_alone",
    ),
    Planted(
        "weight decay and norms of gradients count the entries that a member lacks",
        *("models/padding.py", " if mask is None else torch.where(mask, param, 0.0)", ""),
        "test_padding.py::test_members_are_their_models_alone[mlp]",
    ),
    Planted(
        "the second direction of a recurrent layer runs forward",
        *("_kernels/recurrent.c", "l->reverse ? l->steps - 1 - step : step", "step"),
        "test_recurrent.py::test_programs_compute_what_pytorch_does",
    ),
    Planted(
        "the gradient of a forget gate takes the cell after the step",
        *("_kernels/recurrent.c", "dc * before[j] * f", "dc * kept[4 * H + j] * f"),
        "test_recurrent.py::test_programs_compute_what_pytorch_does",
    ),
    Planted(
        "the last part of a batch is missing in the gradients of recurrent weights",
        *("_kernels/recurrent.c", "part < parts; part++", "part < parts - 1; part++"),
        "test_recurrent.py::test_programs_compute_what_pytorch_does",
    ),
]
