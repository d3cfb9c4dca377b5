"""Batches that become files of rows."""

import os

import pytest
import safetensors.torch
import torch

import hfta_func as hfta
from hfta_func.files import read_rows, write_rows

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)], ids=str)
def test_rows_are_those_of_the_batches(tmp_path, dtype, shape):
    values = [torch.randint(2, (rows, *shape)).to(dtype) for rows in (4, 1, 0, 3)]
    turned, folder = [x.mT if len(shape) > 1 else x for x in values], tmp_path / "deep" / "er"
    rows = write_rows(folder, ({"a.b": value, "c": other} for value, other in zip(values, turned, strict=True)))
    for name, value in {"a.b": torch.cat(values), "c": torch.cat(turned)}.items():
        assert torch.equal(rows[name], value)
        assert torch.equal(safetensors.torch.load_file(folder / f"{name}.safetensors")[name], value)
    assert sorted(rows) == ["a.b", "c"]


def test_what_is_broken_off_leaves_the_files_as_they_were(tmp_path):
    before = write_rows(tmp_path, [{"a": torch.ones(2, 3)}])["a"].clone()

    def batches():
        yield {"a": torch.zeros(2, 3)}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(tmp_path, batches())
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert torch.equal(read_rows(tmp_path)["a"], before)


def test_rows_of_several_kinds_and_none_are_refused(tmp_path):
    message = r"^a batch has \{'a': \(torch.float32, \[4\]\)\} and the first one"
    with pytest.raises(hfta.errors.BatchError, match=message):
        write_rows(tmp_path, [{"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 4)}])
    with pytest.raises(hfta.errors.BatchError, match="there is no batch to write"):
        write_rows(tmp_path, [])
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file; write them by write_rows"):
        read_rows(tmp_path)
