"""Which releases of PyTorch the package supports, and what it says of others."""

import pathlib
import re

import pytest
import torch

from hfta_func import _torch


@pytest.mark.parametrize("version", ["2.8.1", "2.14.0", "2.14.0.dev20261101+cpu", "3.0.0", "1.13.1"])
def test_other_releases_are_refused_in_one_line_with_the_cure(version):
    with pytest.raises(ImportError) as caught:
        _torch.check_version(version)
    assert str(caught.value) == (
        f"hfta_func does not support PyTorch {version}; pip install 'torch>=2.9,<2.14', or a later release of hfta_func"
    )


@pytest.mark.parametrize("version", ["2.9.0", "2.11.0+cu130", "2.13.0+cpu", "2.13.1", str(torch.__version__)])
def test_supported_releases(version):
    _torch.check_version(version)


def test_the_requirement_says_the_same():
    text = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    requirements = set(re.findall(r'"(torch>=[^"]*)"', text))
    assert requirements == {f"torch>={'.'.join(map(str, _torch.OLDEST))},<{_torch.NEWEST[0]}.{_torch.NEWEST[1] + 1}"}
