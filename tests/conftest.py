"""What every test runs under: no slow vmap fallback, one fixed seed, few threads, Ctrl-C as Python has it."""

import gc
import os
import re
import signal

import pytest
import torch

# An operator that reaches the slow fallback of vmap raises an error instead.
torch._C._functorch._set_vmap_fallback_enabled(False)
# Several processes share the processors.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
# Shells start what runs in the background with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests that take seconds each and have quicker siblings, by file and the beginning of the name: they run in `make test-more`.
EXHAUSTIVE = {
    "test_amp": [
        "autocast_is_that_of_torch.*aot_eager",
        "parameters_in_bfloat16_take_small_steps.True",
        "every_member_has.*True-(True|False)",
    ],
    "test_attributes": ["attributes_of_one_call_are_those_of_the_loop.(?!Auxiliary-3).*True"],
    "test_autodiff": ["the_cure_works.True"],
    "test_background": [
        "what_cannot_be_compiled",
        "a_graph_that_is_not_in_the_cache",
        "it_is_the_step_to",
        "a_step_goes_over_to_a_graph",
        "functions_of_a_notebook",
        "without_a_compiler",
    ],
    "test_bad_members": [
        "a_bad_member_ends_no_other.*compiled",
    ],
    "test_benchmarks": [""],
    "test_checkpoint": ["compiled_it_runs_plainly.(resnet|transformer)"],
    "test_cli": ["the_status_of", "ctrl_c", "storage_sampler_and_seeds"],
    "test_cluster": [
        "prometheus",
        *("actors_that_are_killed", "nodes_that", "a_driver", "workers_with_other"),
        *("states_larger_than", "unequal_devices"),
    ],
    "test_composition": ["inductor", "dynamic_batches"],
    "test_contract": [
        *("compiled_by_inductor", "masks_of_transformers", "chained_clipping_and_schedules_under_compile"),
        *("compiled_once_and_equal", "members_are_the_runs_of_torch.(?!adamw-|muon).*transformer"),
        "members_with_dropout_are_arrays_of_one.(?!adamw-|muon).*(cnn|transformer)",
    ],
    "test_convergence": [""],
    "test_crash": ["what_is_killed.*Training-8"],
    "test_demo": ["table", "ratio", "picture"],
    "test_distributions": [
        "label_smoothing.*compiled",
        "a_loss_with(?!.(variational|Categorical)-).*compiled",
    ],
    "test_durable": ["saving_commutes", "a_run_that_is_broken"],
    "test_ensemble": ["outputs_are.*(gru|tied)", "gradients_flow.*gru", "compiled_it_is_one_graph"],
    "test_ensemble_examples": ["critics_as_an_array.*True"],
    "test_examples": [
        *("ctrl_c_keeps", "every_array_is_compiled", "array_then_a_member", "compiled", "testing_after_every_epoch"),
        *(
            "a_run_goes_on",
            "batches_too_small",
            "flags_that_cannot_be_fused",
            "a_run_that_is_resumed",
            "every_seed_of_64_bits",
            "the_last_test",
        ),
        *("mixed_precision", "member_i_is_the_solo_run_i", "an_example_run_by_its_path", "every_example_runs_by"),
    ],
    "test_failures": [
        "donated_states_are_written.*(inductor|aot_eager)",
        "failures_stay_where_they_happen.*-True.$",
        *("raising.inductor", "the_cause.True"),
    ],
    "test_federated_example": ["clients_of_an_array"],
    "test_following": ["(a_run_goes_on|inactive|failures).*workers", "a_process_that_dies"],
    "test_frozen": ["a_base_in_half.*True", "members_are_the_solo.*(auto|accumulate)"],
    "test_functionals": [
        "functional.*-float32",
        "functional.(multi_head|max_unpool|max_pool3d|linear_cross_entropy.chunked)",
    ],
    "test_gpu_benchmarks": ["every_stage", "a_run_that_ends", "failures_come_first", "what_fits"],
    "test_lowering": [
        *("compiled_products", "compilers_leave", "overrides_of_submodules_reach_eager_and_compiled"),
        *("uninstalled_rules_are_gone", "two_copies"),
    ],
    "test_many": ["in_one_graph"],
    "test_members": [
        "without_the_inactive.*(donate|batches|every)",
        "a_run_whose_members_changed",
        "a_member_that_is_active_again",
    ],
    "test_meta": ["compiled"],
    "test_modules": ["module.*-float32", "module.LinearCrossEntropyLoss", "module.Transformer(|Encoder|Decoder)-"],
    "test_native": [
        "an_update_of_many_leaves",
        "without_a_compiler_operators.*(broken|none)",
    ],
    "test_norm": [
        *("a_compiled_array_takes_batches_of_any_size", "autocast_under_compile", "cumulative_average.*True"),
    ],
    "test_notebooks": ["run_saves"],
    "test_number_kinds": ["they_are_so_compiled.(?!mask)"],
    "test_numbers": [
        "compiled_they_are_so_too.(?!dropout.$)",
        "every_way_to_run_a_step.*compiled",
    ],
    "test_op_db": ["operator", "composed"],
    "test_optim": ["compiled_once", "in_place_compiled"],
    "test_own_checkpoints": ["the_numbers_are_those_without.*True"],
    "test_plan": [
        "what_fits",
        "what_members_share",
        "chunks_where",
        "the_state_is_not_written.True",
        "a_compiled_step",
        "a_process_that_runs_out",
        "memory_is_predicted.(transformer|cnn)",
    ],
    "test_pool": [
        "several_fits",
        "a_study_in_workers.*(population|median|none)",
        "a_member_that_raises",
        "unequal_workers",
        "workers_that_are_killed",
        *("a_driver_that", "a_fit_is_cut", "workers_that_were_replaced"),
    ],
    "test_programs": ["many"],
    "test_promises": ["promise.*compiled", "a_batch_may_be_empty", "compiled_steps_are_programs"],
    "test_properties": ["widening_to_a_size_seen_before"],
    "test_quantised": ["adapters_over.*(torchao|plain)"],
    "test_random": [
        "compiled_noise_comes(?!.*nn.Dropout])",
        "compiled_draws",
        "call_sites_go_on.*True",
        "an_inner_vmap.*-aot_eager",
    ],
    "test_ranks": ["ranks_find"],
    "test_recurrent": ["under_compile"],
    "test_rules": ["processes_with_different_rules", "under_compile"],
    "test_shared": [
        "a_member_that_fails.*trunk-True",
        "heads_over_a_trunk_are_the_loop.True.*donate",
    ],
    "test_shared_ensemble": ["compiled"],
    "test_sites": ["every_model_is", "sites_of_a_cluster"],
    "test_stack": ["module_at_two_paths.True"],
    "test_storage": ["values_of_headers_at_random"],
    "test_trainable": ["a_tuner"],
    "test_transformers": [r".*\[(?!bert\]|llama\])", "compiled", "grouped", "experts"],
    "test_tune": [
        "results_are_the_same.*(median|population)",
        "ctrl_c",
        "nothing_is_compiled_anew",
        "a_study_that_is_killed_goes_on.(halving|population|median|none)",
    ],
    "test_tune_example": [""],
    "test_weights": ["they_train_as_alone(?!.spectral norm-).*-True"],
    "test_without_a_gpu": [
        "results_are_on_cuda",
        "a_step_(waits|in_mixed).*(cnn|transformer)-(?!plain-True|bfloat16)",
    ],
    "test_workers": [
        *("ctrl_c", "a_process_that_always_dies", "a_killed", "batches", "two_processes.*True", "auto"),
        *("shared_batches", "uneven_stops", "a_member_that_fails"),
    ],
}

# Those of them that take longest and whose siblings are exhaustive themselves: they run in `make test-all`.
SOAK = {
    "test_background": ["a_step_goes_over_to_a_graph.*False"],
    "test_benchmarks": [
        *("jax_gives.*(mobilenet|resnet|pointnet-seg|bert-next)", "every_way_to_train.*(mobilenet|pointnet|bert)"),
        *("modes_that_memory_holds.*-1", "a_mode_whose.*(processes|nan)"),
    ],
    "test_cluster": ["actors_that_are_killed.*64"],
    "test_composition": ["inductor.(recurrent|attention)"],
    "test_examples": ["a_run_that_is_resumed.*(way1|resnet)", "ctrl_c_keeps.*(second|serial)"],
    "test_failures": ["donated_states.*transformer"],
    "test_following": ["inactive.*(shared|batches)"],
    "test_modules": ["module.LinearCrossEntropyLoss-train-float32"],
    "test_op_db": ["composed"],
    "test_pool": ["workers_that_are_killed.*64"],
    "test_programs": ["many_programs.(alone-270-[123]|noise-80-[12]|compiled)"],
    "test_workers": ["ctrl_c.*None"],
}
# Tables of cases that are alike: every third runs in `make test-more`, the others in `make test-all`.
THIRDS = {
    "test_amp": ["autocast_is"],
    "test_bad_members": ["a_bad_member"],
    "test_composition": ["dynamic_batches", "inductor"],
    "test_contract": ["members_with_dropout"],
    "test_distributions": ["a_loss_with"],
    "test_examples": ["batches_too_small", "array_then", "ctrl_c_keeps", "member_i_is", "every_seed"],
    "test_failures": ["donated_states"],
    "test_functionals": ["functional"],
    "test_modules": ["module"],
    "test_norm": ["a_compiled_array", "autocast"],
    "test_numbers": ["compiled_they_are"],
    "test_optim": ["compiled_once", "in_place_compiled"],
    "test_own_checkpoints": ["the_numbers"],
    "test_promises": ["promise"],
    "test_random": ["compiled_noise"],
    "test_recurrent": ["under_compile"],
    "test_rules": ["under_compile"],
    "test_transformers": ["member_i", "gradient_checkpointing"],
}


def listed(table, item):
    return any(re.match(f"test_{name}", item.name) for name in table.get(item.path.stem, []))


def pytest_collection_modifyitems(items):
    alike = 0
    for item in items:
        if listed(EXHAUSTIVE, item):
            item.add_marker(pytest.mark.exhaustive)
        if item.get_closest_marker("exhaustive"):
            alike += listed(THIRDS, item)
            if listed(SOAK, item) or (listed(THIRDS, item) and alike % 3):
                item.add_marker(pytest.mark.soak)


@pytest.fixture
def small_heap():
    """Collecting garbage is quick, also in a process in which a compiler has left millions of objects."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_ctrl_c():
    """Ray Tune leaves a handler of its own behind, which would take the next test's Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def one_thread():
    """Threads do not pay at this size, and cost much where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def double():
    """torch.optim keeps some of its numbers in the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
