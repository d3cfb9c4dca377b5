"""Which releases of PyTorch the package supports, and what it says of others."""

import importlib
import pathlib
import re
import runpy

import pytest
import torch

import hfta_func as hfta
from hfta_func import _torch
from processes import output
from ways import start


@pytest.mark.parametrize("version", ["2.9.0", "2.11.0+cu130", "2.13.0+cpu", "2.15.1", str(torch.__version__)])
def test_tested_releases_say_nothing(version):
    _torch.check_version(version)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20261101+cpu", "3.0.0"])
def test_newer_releases_are_warned_of(version):
    with pytest.warns(hfta.errors.VersionWarning) as told:
        _torch.check_version(version)
    assert [str(one.message) for one in told] == [
        f"hfta_func is tested with PyTorch 2.9 to 2.15, and this is PyTorch {version}: keep verify=True, by which "
        f"members are compared with ordinary PyTorch"
    ]


def test_the_requirement_has_the_same_lower_bound_and_no_upper_one():
    text = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert set(re.findall(r'"(torch>=[^"]*)"', text)) == {f"torch>={'.'.join(map(str, _torch.OLDEST))}"}


@pytest.mark.exhaustive
def test_a_newer_release_is_imported_with_one_warning_and_computes():
    code = """
import warnings
import torch
torch.__version__ = torch.torch_version.TorchVersion("9.1.0")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import hfta_func as hfta
    assert hfta.vmap(torch.mm)(torch.ones(3, 2, 2), torch.ones(3, 2, 2)).shape == (3, 2, 2)
print([one.category.__name__ for one in told])
"""
    assert output(code) == "['VersionWarning']\n"


SOURCE = pathlib.Path(_torch.__file__).parent


def lacking(module, name, monkeypatch):
    """Take an attribute of PyTorch away."""
    *owners, last = name.split(".")
    owner = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    monkeypatch.delattr(owner, last)


@pytest.mark.parametrize(
    ("file", "module", "name"),
    [
        ("levels", "torch._C._functorch", "_add_batch_dim"),
        ("levels", "torch._functorch.vmap", "restore_vmap"),
        ("levels", "torch._C", "_len_torch_dispatch_stack"),
        ("modules", "torch.nn.utils.stateless", "_reparametrize_module"),
        ("compiler", "torch.utils.checkpoint", "checkpoint.__wrapped__"),
    ],
)
def test_a_release_without_a_private_name_is_refused_in_one_line(file, module, name, monkeypatch):
    lacking(module, name, monkeypatch)
    with pytest.raises(ImportError) as refused:
        runpy.run_path(str(SOURCE / f"{file}.py"))
    assert str(refused.value) == (
        f"hfta_func needs {module}.{name}, which PyTorch {torch.__version__} does not have; pip install "
        f"'torch>=2.9,<2.16', or a later release of hfta_func"
    )


def test_a_name_of_the_compiler_is_looked_up_at_first_use(monkeypatch):
    lacking("torch._dynamo.config", "allow_rnn", monkeypatch)
    with pytest.raises(ImportError, match=r"hfta_func needs torch\._dynamo\.config\.allow_rnn, which PyTorch"):
        _torch.allow_recurrent_layers()


def test_a_missing_operator_is_refused_in_the_same_line():
    with pytest.raises(ImportError, match=r"hfta_func needs torch\.ops\.aten\.no_such\.default, which PyTorch"):
        _torch.operator("no_such")


def test_every_private_name_is_looked_up_by_the_function_that_names_it():
    for path in SOURCE.glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if re.search(r"torch\._[a-zA-Z]", line)]
        allowed = r"private\(|^_[A-Z, _]+ = |sys\.modules|importlib\.import_module"
        assert not [line for line in lines if not re.search(allowed, line) and "import " not in line], path


@pytest.mark.parametrize(("setting", "during"), [(None, True), (False, False)])
def test_a_compiled_step_makes_no_programs_to_try_the_processor(setting, during):
    config, seen = importlib.import_module("torch._inductor.config"), []

    def backend(graph, inputs):
        seen.append(config.cpp.vec_isa_ok)
        return graph.forward

    step, state = start([torch.nn.Linear(2, 1) for _ in range(2)], lambda model, x: model(x).sum(), hfta.sgd(lr=0.1))
    with config.patch({"cpp.vec_isa_ok": setting}):
        torch.compile(step, backend=backend)(state, torch.ones(2, 3, 2))
        seen.append(config.cpp.vec_isa_ok)
    assert seen == [during, setting]
