"""The command line of every example: the fields of a dataclass are its flags.

A flag whose type is a tuple takes one value per member of an array. So does one that keeps members apart, but members with
different values of it cannot be fused and go to different arrays. One value alone is for all members.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from examples.common.errors import BadInput


class Flag(NamedTuple):
    """What the type of a flag does not say: its help, the bounds of its values, and whether it keeps members apart."""

    help: str
    low: float | None = None
    high: float | None = None
    apart: bool = False


_MAY_CHANGE = {"epochs", "data", "device", "hfta", "compile", "chunk_size", "eval", "out", "save", "resume"}
"""Flags that a run may go on with other values of; arrays and single members have different files anyway."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags that every example takes; examples add others in subclasses."""

    seeds: Annotated[
        tuple[int, ...], Flag("seed of weights, order of the data, and noise", low=-(2**63), high=2**63 - 1)
    ] = (0,)
    batch_size: Annotated[int, Flag("samples per step", low=1, apart=True)] = 128
    epochs: Annotated[int, Flag("how often to go through the data", low=1)] = 5
    size: Annotated[Literal["paper", "small"], Flag("the published size, or one for a laptop")] = "paper"
    data: Annotated[Path, Flag("folder of the original archives; what is missing is downloaded to it")] = Path("data")
    limit: Annotated[int | None, Flag("use only this many samples, for training and for testing", low=1)] = None
    device: Annotated[Literal["cpu", "cuda", "xla"], Flag("where to train")] = "cpu"
    hfta: Annotated[bool, Flag("train all members as one array; without, each by itself in plain PyTorch")] = False
    amp: Annotated[bool, Flag("automatic mixed precision in bfloat16")] = False
    compile: Annotated[bool, Flag("compile before training")] = False
    chunk_size: Annotated[
        Literal["all", "auto"], Flag("members that run together: all, or as many as the first step finds fastest")
    ] = "all"
    eval: Annotated[bool, Flag("test after every epoch, not only after the last")] = False
    out: Annotated[Path, Flag("folder for the table (CSV) and the picture of the curves (PNG)")] = Path("out")
    save: Annotated[Path | None, Flag("folder for the run, kept after every epoch, and the trained models")] = None
    resume: Annotated[bool, Flag("go on with the run that --save kept")] = False

    def per_model(self) -> dict[str, tuple[Any, ...]]:
        """The flags with one value per member."""
        return {
            name: getattr(self, name) for name, (kind, _) in _flags(type(self)).items() if get_origin(kind) is tuple
        }

    def apart(self) -> dict[str, Any]:
        """The flags that all members of an array share but members of another array may not."""
        return {name: getattr(self, name) for name, (_, flag) in _flags(type(self)).items() if flag.apart}

    def lasting(self) -> dict[str, Any]:
        """The flags that a run keeps from its beginning to its end."""
        return {name: getattr(self, name) for name in _flags(type(self)) if name not in _MAY_CHANGE}

    def member(self: F, index: int) -> F:
        """The flags of one member."""
        return dataclasses.replace(self, **{name: (values[index],) for name, values in self.per_model().items()})


F = TypeVar("F", bound=Flags)


@dataclass(frozen=True, kw_only=True)
class AdamFlags(Flags):
    """Adam with a learning rate that falls by steps."""

    lr: Annotated[tuple[float, ...], Flag("learning rate")] = (0.01,)
    beta1: Annotated[tuple[float, ...], Flag("decay of the average of gradients")] = (0.9,)
    beta2: Annotated[tuple[float, ...], Flag("decay of the average of their squares")] = (0.999,)
    weight_decay: Annotated[tuple[float, ...], Flag("L2 penalty")] = (0.0,)
    gamma: Annotated[tuple[float, ...], Flag("factor of the learning rate every --step-size epochs")] = (0.5,)
    step_size: Annotated[tuple[int, ...], Flag("epochs between two changes of the learning rate", low=1)] = (20,)


@dataclass(frozen=True, kw_only=True)
class AdadeltaFlags(Flags):
    """Adadelta with a learning rate that falls by steps."""

    lr: Annotated[tuple[float, ...], Flag("learning rate")] = (1.0,)
    gamma: Annotated[tuple[float, ...], Flag("factor of the learning rate every --step-size epochs")] = (0.25,)
    step_size: Annotated[tuple[int, ...], Flag("epochs between two changes of the learning rate", low=1)] = (5,)


class Array(NamedTuple):
    """Members that can be fused: their numbers in the whole run, and their flags."""

    members: list[int]
    flags: Any


def parse(flags: type[Flags], argv: Sequence[str] | None, description: str | None) -> list[Array]:
    """The arrays that a command line asks for.

    Raises:
        BadInput: if a flag is unknown or has a wrong value, or if flags have different numbers of values.
    """
    given, known = vars(_parser(flags, description).parse_args(argv)), _flags(flags)
    for name, value in given.items():
        low, high = known[name][1].low, known[name][1].high
        for number in value if isinstance(value, list) else [value]:
            if low is not None and number is not None and number < low:
                raise BadInput(f"argument {option(name)}: {number} is too small; the least is {low}")
            if high is not None and number is not None and number > high:
                raise BadInput(f"argument {option(name)}: {number} is too large; the most is {high}")
    several = {name: given.pop(name) for name, (kind, flag) in known.items() if _takes_several(kind, flag)}
    count = _count(several)
    several = {name: values * count if len(values) == 1 else values for name, values in several.items()}
    apart = {name: several.pop(name) for name, (_, flag) in known.items() if flag.apart}
    arrays: dict[tuple[Any, ...], list[int]] = {}
    for member, values in enumerate(zip(*apart.values(), strict=True)):
        arrays.setdefault(values, []).append(member)
    return [
        Array(
            members,
            flags(
                **given,
                **dict(zip(apart, values, strict=True)),
                **{name: tuple(values[member] for member in members) for name, values in several.items()},
            ),
        )
        for values, members in arrays.items()
    ]


def _count(several: dict[str, list[Any]]) -> int:
    lengths = {name: len(values) for name, values in several.items() if len(values) > 1}
    (first, count), *others = lengths.items() or [("", 1)]
    for name, length in others:
        if length != count:
            raise BadInput(
                f"{option(first)} has {count} values but {option(name)} has {length}; give one value for all members, "
                f"or one per member"
            )
    return count


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def _parser(flags: type[Flags], description: str | None) -> _Parser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser(description=description, formatter_class=formatter, allow_abbrev=False)
    for name, (kind, flag) in _flags(flags).items():
        # HFTA spells some of its flags with a hyphen and some with an underscore.
        names, default, several = {option(name): 0, f"--{name}": 0}, getattr(flags, name), _takes_several(kind, flag)
        if kind is bool:
            parser.add_argument(*names, action="store_true", help=flag.help)
            continue
        choices = get_args(kind) if get_origin(kind) is Literal else None
        if get_origin(kind) in (tuple, types.UnionType):
            kind = get_args(kind)[0]
        first = default[0] if isinstance(default, tuple) else default
        shown = "" if first is None else f" (default: {first})"
        parser.add_argument(
            *names,
            type=str if choices else kind,
            nargs="+" if several else None,
            default=[first] if several else first,
            choices=choices,
            metavar=None if choices else name.upper(),
            help=flag.help + (", one value per member" if several else "") + shown,
        )
    return parser


def _flags(flags: type[Flags]) -> dict[str, tuple[Any, Flag]]:
    """The type and the rest of every flag."""
    return {name: get_args(hint) for name, hint in get_type_hints(flags, include_extras=True).items()}


def _takes_several(kind: Any, flag: Flag) -> bool:
    return flag.apart or get_origin(kind) is tuple


def option(name: str) -> str:
    """A flag as it is spelled."""
    return "--" + name.replace("_", "-")
