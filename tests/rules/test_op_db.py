"""Every operator of PyTorch's own table, over members that differ: the table ``op_db.csv`` says what becomes of it."""

from __future__ import annotations

import collections
import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import hfta_func as hfta
import op_sweep
from hfta_func.errors import LoopWarning
from hfta_func.rules import _install
from op_sweep import HOW, OPERATORS, dtype_of, examine

# The table is that of one release of PyTorch. What PyTorch and its samples warn of is not what is tested.
pytestmark = [
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is that of PyTorch 2.13"),
    pytest.mark.filterwarnings("ignore"),
]

TABLE = op_sweep.table()
LOOPED = [name for name, row in TABLE.items() if "looped" in row]
FUSED = [name for name, row in TABLE.items() if row.out_of_place == "fused" and name not in LOOPED]
REFUSED = {
    ("index_reduce prod", "gradient"): "asks for the value of a tensor",
    **dict.fromkeys(
        [(name, "nested") for name in ("rand_like", "randn_like", "bernoulli")],
        "called random operation while in randomness error mode",
    ),
    ("to_sparse", "gradient"): "calls aten::is_coalesced",
    ("argwhere", "compiled"): "data-dependent",
}
"""What a member alone can and an array cannot: shapes that depend on values, derivatives that read values, and draws inside
another ``vmap`` that does not say whether they differ."""
UNSEEN = {
    "broadcast_shapes": "takes no tensors",
    **dict.fromkeys(("torch._scaled_mm", "torch._scaled_mm_v2"), "float8 only"),
    **dict.fromkeys(
        [
            *("nn.functional.batch_norm without_cudnn", "torch.ops.aten._flash_attention_forward"),
            *("torch.ops.aten._efficient_attention_forward", "jiterator_unary", "jiterator_binary"),
            *("jiterator_4inputs_with_extra_args", "jiterator_binary_return_by_ref", "jiterator_2inputs_2outputs"),
        ],
        "GPUs only",
    ),
}
"""Entries of PyTorch's table that are no operators of tensors on a CPU."""
WRONG_ALONE = {
    (f"nn.functional.linear_cross_entropy {how}", "tangent"): "Mismatched elements"
    for how in ("chunked", "chunked_none")
}
"""What PyTorch gets wrong with one member: a tangent that is always 0."""


@pytest.fixture(autouse=True)
def fresh_draws() -> Iterator[None]:
    with op_sweep.fresh_draws():
        yield


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str) -> None:
    op = OPERATORS[name]
    # Of functions of networks every sample, but where indices are drawn that some samples have twice, or shapes by values.
    is_whole = name.startswith("nn.functional.") and not re.search("max_unpool|one_hot", name)
    count = 64 if is_whole else op_sweep.SAMPLES
    assert examine(op, dtype_of(op), count) == TABLE.get(name)
    if torch.float32 in op.supported_dtypes("cpu"):
        found = examine(op, torch.float32, count)
        assert "wrong" not in found and ("refused" in TABLE[name] or "refused" not in found), found


@pytest.mark.soak
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [*LOOPED, *FUSED[::12]])
def test_composed(name: str, how: str) -> None:
    found = examine(OPERATORS[name], dtype_of(OPERATORS[name]), 1, how)
    assert ("wrong" in found) == ((name, how) in WRONG_ALONE), found
    assert ("refused" in found) == ((name, how) in REFUSED), found
    assert (REFUSED | WRONG_ALONE).get((name, how), "") in found.note


@pytest.mark.parametrize(
    "name",
    [*LOOPED[::12], *FUSED[::60], "select_scatter", "index_fill", "index_put", "linalg.pinv", "nn.functional.rrelu"],
)
def test_some_operators(name: str) -> None:
    assert examine(OPERATORS[name], dtype_of(OPERATORS[name])) == TABLE[name]


def test_nothing_is_wrong_and_little_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    counts = collections.Counter(row.out_of_place for row in TABLE.values())
    counts.update(f"{row.in_place} in place" for row in TABLE.values() if row.in_place)
    with capsys.disabled():
        print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    assert set(TABLE) == set(OPERATORS)
    assert {op_sweep._title(op) for op in op_sweep.op_db} - set(TABLE) == UNSEEN.keys()
    assert counts["wrong"] == counts["wrong in place"] == 0


@pytest.fixture
def unwarned() -> None:
    _install._loop.cache_clear()


def _take(x: Tensor, index: Tensor) -> Tensor:
    return torch.take(x, index)


@pytest.mark.usefixtures("unwarned")
def test_an_operator_without_a_rule_warns_once_and_is_explained() -> None:
    x, index = torch.randn(3, 4, 5, dtype=torch.float64), torch.randint(0, 20, (3, 6))
    expected = torch.stack([torch.take(*one) for one in zip(x, index, strict=True)])
    with pytest.warns(LoopWarning, match=r"aten::take has no batching rule.*hfta_func.rules.register") as seen:
        assert torch.equal(hfta.vmap(_take)(x, index), expected)
    assert len(seen) == 1 and seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (choice,) = hfta.rules.explain(hfta.vmap(_take), x, index)
    assert (choice.op, choice.lowering, choice.num_models) == ("take", "loop", 3)
    assert "no batching rule" in choice.reason


def test_a_write_into_what_members_share_is_refused() -> None:
    shared, mask = torch.zeros(4, dtype=torch.float64), torch.ones(3, 4) > 0
    for write in (
        lambda mask: shared.masked_scatter_(mask, mask.double()),
        lambda mask: shared.index_put_((mask,), torch.tensor(1.0).double()),
    ):
        with pytest.raises(hfta.errors.TraceError, match="in place into a tensor that all members share"):
            hfta.vmap(write)(mask)
    assert not shared.any()
