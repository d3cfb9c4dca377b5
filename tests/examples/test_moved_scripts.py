"""Scripts before and after a move: how few lines are written, and that results are those of the script for each seed."""

import difflib
import importlib
import pathlib
import re
import warnings

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
PAGE = ROOT / "docs" / "howto" / "move-a-script.md"
MOST = 15
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


def changes(kind):
    """How many lines of the script are written anew or changed, and how many of it are gone."""
    before, after = (
        [line for line in (SCRIPTS / kind / f"{name}.py").read_text().splitlines() if line.strip()]
        for name in ("before", "after")
    )
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    apart = [code for code in codes if code[0] != "equal"]
    return sum(end - start for *_, start, end in apart), sum(end - start for _, start, end, *_ in apart)


@pytest.mark.parametrize("kind", KINDS)
def test_few_lines_change(kind):
    written, gone = changes(kind)
    assert 0 < written <= MOST
    assert re.search(rf"scripts/{kind}/after.py\).* \| {written} \| {gone} \|", PAGE.read_text()), (written, gone)


def test_every_kind_is_counted():
    assert {path.parent.name for path in SCRIPTS.glob("*/before.py")} == {*KINDS}


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
