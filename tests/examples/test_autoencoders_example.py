"""The example of sparse autoencoders, in small."""

import re

import pytest
from examples.autoencoders.main import main

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = "--limit 40 --length 16 --epochs 1 --compare 2 --batch-size 64".split()


def table(capsys):
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"CPU time per step: [\d.]+ ms as one array", lines[-3])
    assert all(re.match(rf"[\d.]+ ms as {name}, [\d.]+ of the array's", line) for name, line in
               zip(("a loop", "one autoencoder"), lines[-2:], strict=True))  # fmt: skip
    return [line.split() for line in lines if line.startswith("blocks.")]


def test_every_member_is_the_one_trained_alone(tmp_path, capsys):
    assert main([*SMALL, *"--widths 8 12 --l1 0.01 1 --out".split(), str(tmp_path / "all")]) == 0
    members = table(capsys)
    assert [row[:3] for row in members[:3]] == [["blocks.0", *"8 0.01".split()], ["blocks.0", *"8 1".split()],
                                                ["blocks.0", *"12 0.01".split()]]  # fmt: skip
    assert len({tuple(row[3:]) for row in members}) == len(members) == 8
    assert main([*SMALL, *"--widths 8 --l1 0.01 --out".split(), str(tmp_path / "few")]) == 0
    first, other = table(capsys)
    assert first == members[0]
    assert other[0] == "blocks.2"
