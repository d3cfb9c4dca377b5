"""Adapters over a small language model, trained in small."""

import re

import pytest
import torch

pytest.importorskip("peft", reason="needs peft; pip install 'hfta_func[adapters]'")
from examples.lora.main import _parse, main, mixed, next_token, read_code, rows
from peft import PeftModel
from transformers import GPT2LMHeadModel

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = [*"--size small --limit 40 --length 16 --batch-size 10 --epochs 1 --pretrain-epochs 1".split()]


@pytest.mark.exhaustive
def test_every_adapter_is_the_one_trained_alone_and_the_best_one_is_written(tmp_path, capsys):
    wanted = [*"--ranks 1 3 --lr 0.003 0.1 --mixes 0 0.5".split()]
    assert main([*SMALL, *wanted, "--out", str(tmp_path / "grid")]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = {tuple(line.split()[:2]): line.split()[2:] for line in lines if re.match(r"[13]  ", line)}
    assert table.keys() == {("1", "0"), ("1", "0.5"), ("3", "0"), ("3", "0.5")}
    assert len({cell for row in table.values() for cell in row}) == 8
    one = [*"--ranks 1 --lr 0.1 --mixes 0.5".split()]
    assert main([*SMALL, *one, "--out", str(tmp_path / "one")]) == 0
    (alone,) = (line.split()[2] for line in capsys.readouterr().out.splitlines() if re.match("1  ", line))
    assert float(alone) == pytest.approx(float(table["1", "0.5"][1]), rel=1e-3)

    base = GPT2LMHeadModel.from_pretrained(tmp_path / "grid" / "base")
    best = PeftModel.from_pretrained(base, str(tmp_path / "grid" / "adapter")).eval()
    value = float(re.search(r"Best: ([\d.]+) by rank", lines[-1]).group(1))
    assert value == min(float(cell) for row in table.values() for cell in row)
    with torch.no_grad():
        test = rows(read_code()[1], _parse(SMALL))
        assert float(next_token(best, test).exp()) == pytest.approx(value, rel=1e-3)


def test_mixes_that_the_manual_cannot_fill_are_refused():
    assert mixed(4, 2, 0.5) == [0, 1, 4, 5]
    for share in (0.75, 1.5):
        with pytest.raises(SystemExit, match=f"--mixes has {share}, but the manual has 2 rows"):
            mixed(4, 2, share)
