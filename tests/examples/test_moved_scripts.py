"""Scripts before and after a move: how few lines are written, and that results are those of the script for each seed."""

import importlib
import math
import pathlib
import re
import warnings

import pytest
import torch
from examples.scripts.__main__ import changes

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
PAGE = ROOT / "docs" / "howto" / "move-a-script.md"
MOST = 15
OF_EXAMPLES = {
    **{name: () for name in ("vae", "word_model", "siamese", "super_resolution", "dcgan", "forward_forward")},
    **{name: () for name in ("regression", "gpt")},
    **{name: ("--dropout", "0") for name in ("digits_cnn", "gcn")},
    # Longer, L-BFGS makes of rounding what other optimizers do not.
    "time_sequence": ("--steps", "2"),
}
"""Scripts in the structure of PyTorch's examples, and arguments that leave out noise."""
KINDS = {
    "lightning_module": ["--epochs", "3"],
    "text_classifier": ["--epochs", "3", "--rows", "96", "--dropout", "0"],
    "image_augment": ["--epochs", "3"],
    "gan": ["--epochs", "6"],
    "eeg_subjects": ["--epochs", "8"],
    "tabular": ["--epochs", "8"],
}
EXACT = {"lightning_module", "text_classifier", "tabular"}
"""Scripts whose members see the batches of the unmoved script, and draw no noise."""


@pytest.mark.parametrize("kind", [*KINDS, *OF_EXAMPLES])
def test_few_lines_change(kind):
    written, gone = changes(kind)
    assert 0 < written <= (12 if kind in OF_EXAMPLES else MOST)
    assert re.search(rf"scripts/{kind}/after.py\).* \| {written} \| {gone} \|", PAGE.read_text()), (written, gone)


def test_every_kind_is_counted():
    assert {path.parent.name for path in SCRIPTS.glob("*/before.py")} == {*KINDS, *OF_EXAMPLES}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("one_thread")
def test_results_are_those_of_the_script_for_each_seed(kind, tmp_path, monkeypatch, capfd):
    if kind == "lightning_module":
        pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    before, after = (importlib.import_module(f"examples.scripts.{kind}.{name}").main for name in ("before", "after"))
    counted = ["--subjects", "6"] if kind == "eeg_subjects" else ["--seeds", "4"]
    with warnings.catch_warnings():
        # Lightning's advice on processes that load data, and old names that transformers uses.
        warnings.simplefilter("ignore")
        if "--seed" in (SCRIPTS / kind / "before.py").read_text().replace("--seeds", ""):
            expected = torch.tensor([float(before([*KINDS[kind], "--seed", str(seed)])) for seed in range(4)])
        else:
            expected = torch.tensor(before([*KINDS[kind], *counted]))
        results = torch.as_tensor(after([*KINDS[kind], *counted]), dtype=expected.dtype)
    assert len({*results.tolist()}) > 1
    if kind in EXACT:
        torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-3)
    else:
        error = (expected.var() / len(expected) + results.var() / len(results)).sqrt()
        assert abs(results.mean() - expected.mean()) <= 3 * error + 0.01


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", OF_EXAMPLES)
@pytest.mark.usefixtures("one_thread")
def test_parameters_and_buffers_are_those_of_the_script_for_each_seed(kind, monkeypatch):
    before, after = (importlib.import_module(f"examples.scripts.{kind}.{name}").main for name in ("before", "after"))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    # Members draw their noise by keys, a script by the process's generator.
    if kind in ("vae", "dcgan"):
        monkeypatch.setattr(torch, "randn_like", lambda x: torch.linspace(-2, 2, x.numel()).sin().reshape(x.shape))
        monkeypatch.setattr(torch, "randn", lambda *shape: torch.linspace(-2, 2, math.prod(shape)).sin().reshape(shape))
    try:
        alone, members = (main(["--seeds", "3", *OF_EXAMPLES[kind]]) for main in (before, after))
    finally:
        torch.set_default_dtype(default)
    for one, member in zip(alone, members, strict=True):
        torch.testing.assert_close(member.state_dict(), one.state_dict(), rtol=1e-6, atol=1e-6)
