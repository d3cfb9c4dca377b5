"""Every private name of PyTorch that this package uses, and no other room touches any.

Each name exists in PyTorch 2.9 to 2.15, and is looked up by ``private``, which refuses a release without it. Once the tests
have run on a later release, raise ``NEWEST`` in ``_release.py``.
"""

# ruff: noqa: F401
# isort: off
from hfta_func._torch.ahead import Library, compile_ahead, load_ahead
from hfta_func._torch._release import NEWEST, OLDEST, check_version, cure, tested
from hfta_func._torch.compiler import Compiled, allow_recurrent_layers, checkpoint, compiled_from_cache, dotted_path
from hfta_func._torch.compiler import current_trace, expected, in_graph, intercept_checkpoint
from hfta_func._torch.compiler import is_compilable, mark_graphs, math_attention, operator_scan, original
from hfta_func._torch.compiler import run_operators_eagerly, set_compiling, stand_for, stays
from hfta_func._torch.compiler import tell_compiler_of_overrides, trace_checkpoint, trace_functions, trace_history
from hfta_func._torch.compiler import until_compiled, untraced
from hfta_func._torch.dispatcher import AUTOCAST, SingleLevelFunction, after, apply_at_level, apply_in_transforms
from hfta_func._torch.dispatcher import apply_replaced, autocast_operators, before_autocast, below_autograd
from hfta_func._torch.dispatcher import below_batching, counter, decompositions, default_generators, destroy
from hfta_func._torch.dispatcher import function_modes, has_kernel, has_native_lstm, has_tangents, implement, is_alias
from hfta_func._torch.dispatcher import is_autocasting, is_derivative_of_operator, is_fallback_enabled
from hfta_func._torch.dispatcher import leaving_out_validation, load_decompositions, num_dispatch_modes, num_libraries
from hfta_func._torch.dispatcher import operator, operators_without, out_of_place, out_of_sight, parts
from hfta_func._torch.dispatcher import set_fallback_enabled, single_level_functions, taken_apart, why_not_looped
from hfta_func._torch.dispatcher import without_views, writes, written_by
from hfta_func._torch.inductor import may_change, quick_compiler, replaced
from hfta_func._torch.levels import RandomnessType, TransformType, VmapInterpreter, add_batch_dim, batch_dim, can_look
from hfta_func._torch.levels import (
    constant_to_compiler,
    current_interpreter,
    depth,
    device_type,
    first_member,
    get_unwrapped,
)
from hfta_func._torch.levels import gradient, inside_transform, inside_vmap, interpreters, is_batched, is_captured
from hfta_func._torch.levels import is_sole_holder, is_walked, is_wrapped, level_of, levels_above, outside_transforms
from hfta_func._torch.levels import known_values, peek_interpreter, pytree, remove_batch_dim, restore_vmap
from hfta_func._torch.levels import storage_number
from hfta_func._torch.levels import traced_add_batch_dim
from hfta_func._torch.levels import traced_unwrap_for_grad, unobserved, unwrap_batched, unwrap_leaves, values_of
from hfta_func._torch.levels import vmap_level, wrap_leaves
from hfta_func._torch.modules import MODULE_ATTRIBUTES, BatchNorm, Places, call_with, forget_flat_weights, has_hooks
from hfta_func._torch.modules import has_step_hooks, is_compiled, is_nestable, marker, places_of
from hfta_func._torch.modules import reparametrized, run_uncompiled, takes_data, tensors_of, weight_hooks
from hfta_func._torch.reads import HEAP_TYPE, Reads, has_global_hooks, is_reading, is_tracer_loaded, likeness
from hfta_func._torch.recorded import NotReplayableError, Recorder, num_recorders, unwritten
from hfta_func._torch.tape import DIRECT, PREPARED, Tape
from hfta_func._torch.walker import NotWalkableError, Walker
