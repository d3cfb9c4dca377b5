"""An ensemble as a program that runs without this package."""

from __future__ import annotations

import io
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta

X = torch.randn(6, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Convolution, statistics, dropout and an argument that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        scores = self.head(self.body(x))
        return scores if scale is None else scores * scale[:, None]


def ensemble(count: int = 4) -> hfta.Ensemble:
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(Net().double())
        models[-1](X + seed)
    return hfta.Ensemble.from_modules(models)


def outputs_of(whole: hfta.Ensemble, *args: Any) -> Tensor:
    return torch.stack([member.eval()(*args) for member in whole.members()]).detach()


@pytest.mark.parametrize("count", [1, 4])
def test_mean_and_deviation_are_those_of_the_members(count: int) -> None:
    whole = ensemble(count)
    outputs = outputs_of(whole, X)
    for kind, expected in (("values", outputs), ("logits", outputs), ("probabilities", outputs.softmax(-1))):
        mean, std = whole.deploy(kind)(X)  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(mean, expected.mean(0), rtol=1e-12, atol=1e-12)
        deviation = expected.std(0) if count > 1 else torch.zeros_like(mean)
        torch.testing.assert_close(std, deviation, rtol=1e-12, atol=1e-12)
        assert not mean.requires_grad and whole.training
    prediction, each = hfta.step.Prediction(outputs), outputs.softmax(-1)
    whole_entropy = -(each.mean(0) * each.mean(0).log()).sum(-1)
    torch.testing.assert_close(prediction.entropy, whole_entropy, rtol=1e-12, atol=1e-12)
    parts = whole_entropy + (each * each.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.mutual_information, parts, rtol=1e-10, atol=1e-12)
    sure = hfta.step.Prediction(torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]]))
    assert sure.entropy.tolist() == sure.mutual_information.tolist() == [pytest.approx(0.6931472)]


LOAD = """
import sys
sys.modules["hfta_func"] = None
import torch
x, mean, std = torch.load(sys.argv[2])
found = torch.export.load(sys.argv[1]).module()(x, torch.arange(1.0, 7.0).double())
torch.testing.assert_close(found, (mean, std), rtol=1e-12, atol=1e-12)
print("loaded")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [3, 1])
def test_a_program_takes_any_number_of_rows_without_this_package(rows: int, tmp_path: pathlib.Path) -> None:
    deployed = ensemble().deploy("probabilities")
    scale = torch.arange(1.0, 7.0).double()
    program = deployed.export(X[:rows], scale[:rows])
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in operators if "hfta" in name or "batch_dim" in name]
    for count in (2, 6):
        found = program.module()(X[:count], scale[:count])
        torch.testing.assert_close(found, deployed(X[:count], scale[:count]), rtol=1e-12, atol=1e-12)
    if rows == 3:
        torch.export.save(program, tmp_path / "model.pt2")
        torch.save((X, *deployed(X, scale)), tmp_path / "expected.pt")
        arguments = [sys.executable, "-W", "ignore", "-c", LOAD, tmp_path / "model.pt2", tmp_path / "expected.pt"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300)
        assert done.stdout == "loaded\n", done.stderr


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_onnx_runtime_takes_any_number_of_rows() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    deployed, file = ensemble().float().deploy("probabilities"), io.BytesIO()
    program: Any = torch.onnx.export(deployed.export(X[:1].float()), verbose=False, output_names=["mean", "std"])
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    assert [output.name for output in session.get_outputs()] == ["mean", "std"]
    for count in (2, 6):
        found = session.run(None, {session.get_inputs()[0].name: X[:count].float().numpy()})
        for one, expected in zip(found, deployed(X[:count].float()), strict=True):
            torch.testing.assert_close(torch.tensor(one), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_deployed() -> None:
    with pytest.raises(ValueError, match="outputs is 'classes'; pass 'values', 'logits' or 'probabilities'"):
        ensemble().deploy("classes")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"scores are \[M, N, C\]"):
        models = [nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)) for _ in range(2)]
        hfta.Ensemble.from_modules(models).deploy("probabilities")(torch.randn(4, 3))
