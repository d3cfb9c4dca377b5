"""Tests of the installed wheel in an environment without extras; `make wheel` runs them outside the checkout."""

import importlib.metadata
import importlib.util
import pkgutil
import sysconfig
from pathlib import Path

import pytest
import torch

import hfta_func as hfta

SITE = Path(sysconfig.get_path("purelib"))


# Rooms that build on a package of an extra.
WITH_EXTRA = {"hfta_func.rl": "rl", "hfta_func.sklearn": "sklearn"}


@pytest.mark.parametrize("name", WITH_EXTRA)
def test_a_room_names_the_extra_that_it_needs(name):
    with pytest.raises(ImportError, match=rf"pip install 'hfta_func\[{WITH_EXTRA[name]}\]'"):
        importlib.import_module(name)


def test_every_module_is_that_of_the_wheel_and_needs_no_extra():
    names = [module.name for module in pkgutil.walk_packages(hfta.__path__, "hfta_func.")]
    modules = [importlib.import_module(name) for name in names if name not in WITH_EXTRA]
    assert len(modules) > 10
    assert all(SITE in Path(module.__file__).parents for module in [hfta, *modules])


def test_nothing_but_the_wheel_is_installed():
    for package in ("numpy", "pandas", "matplotlib", "scipy", "sklearn", "tensorboard"):
        assert importlib.util.find_spec(package) is None


def test_the_version_is_that_of_the_metadata():
    assert hfta.__version__ == importlib.metadata.version("hfta_func")


def test_annotations_and_licence_are_there():
    assert (Path(hfta.__file__).parent / "py.typed").exists()
    assert "MIT License" in importlib.metadata.distribution("hfta_func").read_text("licenses/LICENSE")


def test_pictures_name_the_extra_that_they_need():
    from hfta_func.plot import bands

    with pytest.raises(ImportError, match=r"not installed; pip install '?hfta_func\[plot\]'?$"):
        bands(None, "loss")


def test_tensorboard_names_the_extra_that_it_needs(tmp_path):
    with pytest.raises(ImportError, match=r"pip install '?hfta_func\[tensorboard\]"):
        hfta.callbacks.tensorboard(str(tmp_path))


def test_a_model_is_trained():
    def loss_fn(model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    inputs = torch.randn(64, 4)
    loader = hfta.ArrayLoader((inputs, inputs.sum(1, keepdim=True)), 16, seeds=[0, 1])
    step = hfta.make_train_step(torch.nn.Linear(4, 1), loss_fn, hfta.adam(lr=[0.1, 0.03]))
    state = step.init(*hfta.init_params(lambda: torch.nn.Linear(4, 1), seeds=[0, 1]), seeds=[0, 1])
    _, history = hfta.fit(step, state, loader, epochs=10, progress=False)
    assert (history["loss"][-1] < history["loss"][0] / 2).all()
