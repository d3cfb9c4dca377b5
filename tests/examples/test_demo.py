import os
import re
import subprocess
import sys

import pytest
from matplotlib import pyplot

import hfta_func as hfta

pytest.importorskip("sklearn", reason="needs scikit-learn; pip install 'hfta_func[examples]'")
from examples import digits

ROW = re.compile(
    r"^ *(?P<lr>[\d.e-]+) +(?P<mean>[\d.]+) +(?P<low>[\d.]+) - (?P<high>[\d.]+) +(?P<worst>[\d.]+) +(?P<best>[\d.]+) "
    r"+(?P<seed>\d+)$",
    re.MULTILINE,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The demo's output and picture, for two seeds and two learning rates."""
    picture = tmp_path_factory.mktemp("demo") / "new" / "digits.png"
    options = ["--epochs", "2", "--seeds", "2", "--lr", "0.001", "0.01", "--out", str(picture)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, digits.__file__, *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout, done.stderr, picture


def alone(seed, lr):
    """Test accuracy in % of one member trained as an array of one."""
    train, test = digits.load_digits()
    loader = hfta.ArrayLoader(train, batch_size=32, seeds=[seed], drop_last=True)
    schedule = hfta.schedules.cosine(lr, T_max=2 * len(loader))
    step = hfta.make_train_step(digits.CNN(), digits.loss_fn, hfta.adam(lr=schedule))
    state = step.init(*hfta.init_params(digits.CNN, [seed]), seeds=[seed])
    state, _ = hfta.fit(step, state, loader, epochs=2, progress=False)
    return 100 * hfta.make_eval_step(digits.CNN(), digits.accuracy)(state, test)["accuracy"].item()


@pytest.mark.exhaustive
def test_table_holds_the_accuracy_of_every_member_trained_alone(run):
    rows = [{name: float(text) for name, text in match.groupdict().items()} for match in ROW.finditer(run[0])]
    assert [row["lr"] for row in rows] == [0.001, 0.01]
    for row in rows:
        accuracies = [alone(seed, row["lr"]) for seed in (0, 1)]
        # float32 sums in another order may turn one of the 450 images over.
        assert row["worst"] == pytest.approx(min(accuracies), abs=0.23)
        assert row["best"] == pytest.approx(max(accuracies), abs=0.23)
        assert row["mean"] == pytest.approx((row["worst"] + row["best"]) / 2, abs=0.011)
        assert row["worst"] <= row["low"] <= row["mean"] <= row["high"] <= row["best"]
        assert accuracies[int(row["seed"])] == pytest.approx(row["best"], abs=0.23)
    assert rows[0]["mean"] < 92 < rows[1]["mean"]


@pytest.mark.exhaustive
def test_the_ratio_is_that_of_the_times_it_names_a_picture_is_drawn_and_progress_shown(run):
    output, progress, picture = run
    (line,) = [line for line in output.splitlines() if line.startswith("Ratio")]
    words = r"Ratio: ([\d.]+)x\. A member's step takes ([\d.]+) ms .* and ([\d.]+) ms as 1/4 of an array"
    ratio, single, together = map(float, re.match(words, line).groups())
    assert ratio == pytest.approx(single / together, rel=0.1)
    assert "2 members timed" in line and "eager" in line and "batches of 32, 1 threads" in line
    pixels = pyplot.imread(picture)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 800 and 0.01 < pixels[..., :3].std() < 0.5
    assert "epoch 2/2" in progress and "accuracy" in progress
