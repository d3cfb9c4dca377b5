"""The compiler of graphs, and the graphs, made to do the same in less time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hfta_func._torch._release import private

_CODE = re.compile(
    r"(G\['__import_(torch|hfta_func)(_dot_\w+)?'\]|__import__\('torch'\))(?!\w)|G\['__builtins_dict___\d+'\]"
)
"""Guards on definitions of PyTorch, this package and Python."""
_DEFINITIONS = frozenset(
    ("CLOSURE_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "DUPLICATE_INPUT")
)
"""The types of guards that a function, a class or a module is the same object."""
_CONSTANTS = re.compile(r"_pytree|hfta_func.*\.(_?[A-Z][A-Z0-9_]*\b|__(kw)?defaults__)")
"""Guards on values that are never assigned again: PyTorch's registry of trees, this package's constants and defaults."""
_COPIES = re.compile(r"call\b.*\b(_first\[0\]\.(_modules|places)|_shapes|_holders|_trainable)(?!\w)")
"""Guards on a step's copy of the model, and on facts about it."""
_CALLS = (".wrapper.o", ".main.o")
"""How names of files end that hold a graph's calls; the compiler's next file holds its kernels."""


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """A block in which an attribute has another value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def quick_compiler() -> Iterator[None]:
    """A block in which graphs are compiled to the same code in less time.

    Indices that recur in every layer are simplified once, which saves a fifth of the compiler's time in Python; the two files
    of a graph are compiled at the same time; a library has no code to check its inputs, which only debugging calls; and the
    C++ compiler is asked whether it knows instruction sets, in place of building a program for each.
    """
    sympy: Any = importlib.import_module("sympy")
    isa = private("torch._inductor.cpu_vec_isa", "VecISA")
    builder = private("torch._inductor.cpp_builder", "CppBuilder")
    wrapper = private("torch._inductor.codegen.cpp_wrapper_cpu", "CppWrapperCpu")
    checks = "generate_input_output_runtime_checks"
    with (
        concurrent.futures.ThreadPoolExecutor() as threads,
        replaced(sympy, "simplify", _remembering(sympy)),
        replaced(isa, "check_build", _is_known),
        replaced(builder, "build", _together(builder.build, threads)),
        replaced(wrapper, checks, _without_inputs(getattr(wrapper, checks))),
    ):
        yield


def _remembering(sympy: Any) -> Callable[..., Any]:
    """``sympy.simplify``, once for every expression, and by expanding polynomials: they are only asked for coefficients."""
    before = sympy.simplify

    @functools.lru_cache(maxsize=None, typed=True)
    def simplify(expression: Any, **options: Any) -> Any:
        is_polynomial = not options and isinstance(expression, sympy.Expr) and expression.is_polynomial()
        return sympy.expand(expression) if is_polynomial else before(expression, **options)

    return simplify


def _is_known(isa: Any, code: str) -> bool:
    """Whether the C++ compiler knows the options of an instruction set, which the processor has."""
    compiler = private("torch._inductor.cpp_builder", "get_cpp_compiler")()
    command = [*shlex.split(compiler), *shlex.split(isa.build_arch_flags()), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def _without_inputs(write_checks: Callable[..., None]) -> Callable[..., None]:
    """The method that writes checks of a library's inputs, for no inputs; they would be two thirds of its calls' code."""

    def write(wrapper: Any) -> None:
        with replaced(private("torch._inductor.virtualized", "V.graph"), "graph_inputs", {}):
            write_checks(wrapper)

    return write


def _together(build: Callable[..., None], threads: concurrent.futures.Executor) -> Callable[..., None]:
    """``CppBuilder.build``, which compiles a graph's calls beside its kernels, and waits for them before it links both."""
    begun: list[concurrent.futures.Future[None]] = []

    def begin(builder: Any) -> None:
        target = builder.get_target_file_path()
        if target.endswith(_CALLS):
            begun.append(threads.submit(build, builder))
            return
        if target.endswith(".so"):
            while begun:
                begun.pop().result()
        build(builder)

    return begin


def may_change(guards: Sequence[Any]) -> list[bool]:
    """Which of the compiler's checks before every call of a graph are needed.

    There are thousands, which take a third of the time of a small step. Definitions of PyTorch and this package, and a step's
    copy of a model, never change; settings, users' code, states and batches do.
    """
    return [
        not (
            _COPIES.match(guard.name)
            or (_CODE.match(guard.name) and (guard.guard_type in _DEFINITIONS or _CONSTANTS.search(guard.name)))
        )
        for guard in guards
    ]
