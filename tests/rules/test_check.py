"""The check of the rules on releases of PyTorch that are newer than those the tests have run on."""

import warnings

import pytest
import torch

import hfta_func as hfta
from hfta_func import _torch
from hfta_func.rules import _check, _lowering
from hfta_func.rules._check_cases import CASES, Case
from hfta_func.rules._choice import explain
from hfta_func.rules._registry import DECOMPOSED, OUTSIDE, RULES

UNREACHED = {
    # Kernels of GPUs.
    *("cudnn_batch_norm", "cudnn_batch_norm_backward"),
    # Gradients inside vmap that PyTorch cannot take where lengths are lists or tensors that members share.
    *("_ctc_loss", "_ctc_loss_backward", "_pack_padded_sequence_backward"),
    # Operators that these releases reach in compiled graphs and without gradients only, or take apart before.
    *("_embedding_bag_dense_backward", "_embedding_bag_forward_only", "binary_cross_entropy_with_logits"),
    *("_fused_rms_norm_backward", "native_group_norm_backward", "_weight_norm_interface_backward"),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A release that nobody has tested and checked."""
    installed = hfta.rules.is_installed()
    hfta.rules.uninstall()
    monkeypatch.setattr(_torch._release, "NEWEST", (2, 8))
    monkeypatch.setattr(_check, "_is_settled", False)
    monkeypatch.setenv("HFTA_FUNC_CACHE", str(tmp_path / "cache"))
    table = dict(_lowering.TABLE)
    yield tmp_path / "cache"
    hfta.rules.uninstall()
    _lowering.TABLE.update(table)
    monkeypatch.undo()
    if installed:
        hfta.rules.install()


@pytest.fixture
def plant(monkeypatch):
    """Have the rule of an operator return a thousandth too much."""

    def plant(op):
        rule = RULES[op].rule

        def wrong(call, *args, **kwargs):
            outputs, dims = rule(call, *args, **kwargs)
            return (torch.mul(outputs, 1.001), dims) if isinstance(outputs, torch.Tensor) else (
                tuple(x * 1.001 if x is not None and x.is_floating_point() else x for x in outputs), dims
            )  # fmt: skip

        monkeypatch.setitem(RULES, op, RULES[op]._replace(rule=wrong))

    return plant


@pytest.fixture
def few(monkeypatch):
    """Check some cases only, for speed."""

    def few(*names):
        monkeypatch.setattr(_check, "CASES", [case for case in CASES if case.name in names])

    return few


def linear():
    x, weight = torch.randn(3, 2, 4), torch.randn(3, 5, 4)
    expected = torch.stack([torch.nn.functional.linear(*pair) for pair in zip(x, weight, strict=True)])
    torch.testing.assert_close(torch.func.vmap(torch.nn.functional.linear)(x, weight), expected)
    return explain(hfta.vmap(torch.nn.functional.linear), x, weight)[0]


@pytest.mark.exhaustive
def test_every_rule_agrees_with_a_loop_and_that_is_remembered(cache, monkeypatch):
    hfta.rules.install()
    assert [file.name.endswith(f"-torch-{torch.__version__}") for file in cache.iterdir()] == [True]
    assert linear().lowering != "loop"
    hfta.rules.uninstall()
    monkeypatch.setattr(_check, "_is_settled", False)
    monkeypatch.setattr(_check, "_compare", lambda: pytest.fail("checked twice"))
    hfta.rules.install()


@pytest.mark.exhaustive
def test_every_rule_takes_part(cache):
    hfta.rules.install()
    found = _check._apart(lambda: {op.op for case in CASES for op in explain(_check._agrees, case)})
    expected = {op for op in RULES.keys() - OUTSIDE if _lowering.FAMILIES[op] != "shape"}
    assert expected - found <= UNREACHED
    assert UNREACHED <= expected
    assert DECOMPOSED and RULES


def test_tested_releases_are_not_checked(cache, monkeypatch):
    monkeypatch.setattr(_torch._release, "NEWEST", (99, 0))
    monkeypatch.setattr(_check, "settle", lambda *args: pytest.fail("checked"))
    hfta.rules.install()
    assert not cache.exists()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("op", "case", "looped"),
    [
        ("linear", "linear", "linear"),
        ("mm", "mm", "mm"),
        ("lstm.input", "lstm", "lstm.input"),
        ("nll_loss_forward", "nll_loss", "nll_loss_forward"),
        ("_prelu_kernel_backward", "prelu", "_prelu_kernel_backward"),
    ],
)
def test_the_loop_takes_the_place_of_a_wrong_rule(op, case, looped, cache, plant, few):
    plant(op)
    few(case)
    with pytest.warns(
        hfta.errors.LoopWarning, match=rf"the batching rules of {looped} differ from a loop over members"
    ) as told:
        hfta.rules.install()
    assert len(told) == 1
    assert not cache.exists()
    # The warning is given once, and the loop stays.
    hfta.rules.uninstall()
    hfta.rules.install()
    assert _lowering.TABLE[op][0].lowering == "loop"
    choice = linear()
    assert (choice.lowering == "loop") == (op == "linear")


def test_all_rules_of_a_convolution_go_together(cache, plant, few):
    plant("convolution")
    few("conv2d")
    with pytest.warns(
        hfta.errors.LoopWarning, match="convolution, convolution_input_grad, convolution_weight_grad differ"
    ):
        hfta.rules.install()
    x, weight = torch.randn(3, 2, 4, 9), torch.randn(3, 5, 4, 3)
    expected = torch.stack([torch.conv1d(*pair) for pair in zip(x, weight, strict=True)])
    torch.testing.assert_close(torch.func.vmap(torch.conv1d)(x, weight), expected)


def test_what_the_loop_does_not_cure_is_refused(cache, plant, few):
    plant("view")
    few("view", "mm")
    for _ in range(2):
        with pytest.raises(RuntimeError) as refused:
            hfta.rules.install()
        assert str(refused.value) == (
            f"on PyTorch {torch.__version__}, hfta_func is wrong in view; pip install 'torch>=2.9,<2.9', or a later "
            f"release of hfta_func"
        )
        assert not hfta.rules.is_installed()
    assert not cache.exists()


def test_a_rule_that_raises_is_wrong(cache, few, monkeypatch):
    def broken(call, *args):
        raise AttributeError("gone")

    monkeypatch.setitem(RULES, "mm", RULES["mm"]._replace(rule=broken))
    few("mm")
    with pytest.warns(hfta.errors.LoopWarning, match="the batching rules of mm differ"):
        hfta.rules.install()


def test_a_call_that_pytorch_no_longer_knows_says_nothing_of_rules(cache, monkeypatch):
    def gone(x):
        raise TypeError("unknown argument")

    monkeypatch.setattr(_check, "CASES", [Case("gone", gone, ((2, 3),))])
    hfta.rules.install()
    assert cache.exists()


def test_the_check_leaves_settings_alone(cache, few):
    few("mm", "conv2d", "batch_norm")
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu"), hfta.rules.override(all="loop"), warnings.catch_warnings():
        filters = list(warnings.filters)
        hfta.rules.install()
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
        assert warnings.filters == filters
        assert torch.equal(torch.get_rng_state(), before)
        assert linear().lowering == "loop"
    assert torch.get_default_dtype() == torch.float32
    assert cache.exists()


def test_a_first_use_inside_a_graph_and_under_a_transform(cache, few):
    few("mm", "linear")
    x = torch.randn(3, 4, 4)
    grad = torch.func.grad(lambda x: hfta.vmap(torch.mm)(x, x).sum())(x)
    assert cache.exists() and grad.shape == x.shape


def test_overrides_do_not_hide_a_wrong_rule(cache, plant, few):
    plant("mm")
    few("mm")
    with hfta.rules.override(all="loop"), pytest.warns(hfta.errors.LoopWarning, match="mm differ"):
        hfta.rules.install()


def test_without_a_place_to_write_nothing_is_remembered(cache, few):
    few("mm")
    cache.write_text("a file")
    hfta.rules.install()
    assert hfta.rules.is_installed()
