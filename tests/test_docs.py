"""The documentation names everything that is public, and says what the files that it speaks of say."""

import csv
import importlib
import inspect
import pathlib
import re
import types

import pytest

import hfta_func as hfta
import reference_names
from cases import FUNCTIONS
from processes import output

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOPICS = (
    "callbacks calls cluster errors es files integrations models optim optim.extend plot random rl "
    "rules run schedules signals sklearn step testing tune workers"
).split()
"""The modules that users reach into; others hold what these export."""
TIMES = "\N{MULTIPLICATION SIGN}"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="needs a checkout")


def public_names():
    """Everything that users may use, by its full name."""
    for name, value in vars(hfta).items():
        # ``annotations`` and its like come from a future import.
        is_object = not isinstance(value, types.ModuleType) and "__future__" not in repr(type(value))
        if is_object and not name.startswith("_"):
            yield f"hfta_func.{name}", value
    for topic in TOPICS:
        module = importlib.import_module(f"hfta_func.{topic}")
        for name, value in vars(module).items():
            home = f"{getattr(value, '__module__', '')}."
            if not name.startswith("_") and callable(value) and home.startswith(f"{module.__name__}."):
                yield f"{module.__name__}.{name}", value


def described():
    """Full names of everything that the reference describes."""
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    yield from re.findall(r"^\.\. (?:auto(?:function|class|exception|data)|py:data):: ([\w.]+)$", text, re.MULTILINE)
    for name in re.findall(r"^\.\. automodule:: ([\w.]+)\n   :members:", text, re.MULTILINE):
        module = importlib.import_module(name)
        members = inspect.getmembers(module, lambda value, name=name: getattr(value, "__module__", "") == name)
        yield from (f"{name}.{member}" for member, value in members if value.__doc__)
    if "<!-- every optimizer -->" in text:
        yield from (f"hfta_func.{name}" for name in FUNCTIONS)


def resolve(name):
    module, member = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), member)


def test_every_public_name_is_in_the_reference():
    found = set(described())
    # An object with two names is described under one of them.
    objects = {id(resolve(name)) for name in found}
    assert not [name for name, value in public_names() if name not in found and id(value) not in objects]


def test_the_reference_describes_public_names_only():
    for name in described():
        assert name.rsplit(".", 1)[0] in ("hfta_func", *(f"hfta_func.{topic}" for topic in TOPICS)), name
        assert resolve(name) is not None


@pytest.mark.parametrize(
    "page", sorted(path.stem for path in (DOCS / "reference").glob("*.md") if path.stem != "index")
)
def test_pages_of_the_reference_name_what_they_describe(page):
    """Also where no Sphinx runs; ``python tests/helpers/reference_names.py`` writes the tables."""
    text = (DOCS / "reference" / f"{page}.md").read_text()
    names = list(reference_names.names_of(text))
    assert names and reference_names.written(text) == text
    assert all(reference_names.summary(name) for name in names)


def test_one_table_shows_all_names():
    text = (DOCS / "reference" / "index.md").read_text()
    assert reference_names.overview(text) == text and text.count("\n| [`") > 200


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if not target.startswith(("http:", "https:", "#")):
            assert (ROOT / target.split("#")[0]).exists(), target


PLAIN = re.compile(r"^```python\n(.*?)^```\n+(?:<!--[^\n]*-->\n+)?(?:^```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
MEASURED = re.compile(r"\d\.\d{4} +\d+|\d+\.\d s\n")
"""What differs between runs and machines: an accuracy with its epoch, and seconds."""


@pytest.mark.filterwarnings("ignore::tqdm.TqdmExperimentalWarning")
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_plain_blocks_run_as_they_stand(page, capsys):
    pytest.importorskip("sklearn", reason="the examples' data: needs scikit-learn")
    text, names = (ROOT / page).read_text(), {"__name__": "pasted"}
    blocks = PLAIN.findall(text)
    assert blocks and ">>>" not in text and any(printed for _, printed in blocks)
    for code, printed in blocks:
        exec(compile(code, page, "exec"), names)
        assert not printed or MEASURED.sub("#", capsys.readouterr().out) == MEASURED.sub("#", printed)
    capsys.readouterr()


def test_the_first_example_is_a_job_of_fourteen_lines():
    """Whose loop is beside it, and whose output ``python -m benchmarks readme`` writes."""
    ((code, printed),) = PLAIN.findall((ROOT / "README.md").read_text())
    lines = [line for line in code.splitlines() if line]
    job = ROOT / "examples" / "jobs" / "first.py"
    assert len(lines) <= 14 and printed
    assert lines == [line for line in job.read_text().splitlines()[1:] if line]


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text().split()) <= 650


def test_few_names_stand_at_the_top():
    # In a process of its own, where no other room has been imported.
    code = "import hfta_func as hfta; print(*vars(hfta).keys() - vars(hfta.optim).keys())"
    names = [name for name in output(code).split() if not name.startswith("_")]
    assert "fit" in names and "adam" not in names and len(names) <= 45, names


ADDRESS = re.compile(r"https?://[\w./-]*")


def test_no_address_is_made_up():
    """Whoever publishes the package adds its address in one place, see CONTRIBUTING."""
    assert ADDRESS.findall((ROOT / "README.md").read_text()) == ["https://arxiv.org/abs/2102.02344"]
    paths = [*ROOT.glob("*.*"), *ROOT.glob(".github/**/*.yml"), *DOCS.glob("*/*.md"), *DOCS.glob("*.*")]
    texts = {path: path.read_text() for path in paths if path.suffix in (".md", ".toml", ".cff", ".yml", ".py")}
    found = {path.name: address for path, text in texts.items() for address in ADDRESS.findall(text)}
    assert len(found) > 5 and not {name for name, address in found.items() if re.search("hfta.?func", address)}
    assert not [path for path, text in texts.items() if "img.shields" in text or "badge.svg" in text]


def test_ratios_in_the_readme_were_measured():
    ratios = re.findall(rf"[\d.]+{TIMES}", (ROOT / "README.md").read_text())
    assert len(ratios) > 12
    measured = set(re.findall(rf"[\d.]+{TIMES}", (DOCS / "benchmarks.md").read_text()))
    assert set(ratios) <= measured


def test_the_gallery_shows_all_notebooks_examples_and_pictures():
    text = (DOCS / "gallery.md").read_text()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.stem}" in text
    for path in (ROOT / "examples").glob("*/main.py"):
        assert f"examples.{path.parent.name}.main" in text
    for path in (DOCS / "convergence").glob("*.png"):
        assert f"convergence/{path.name}" in text


def test_the_gallery_shows_the_qualities_that_were_reached():
    lines = [line for line in (DOCS / "gallery.md").read_text().splitlines() if "is better)" in line]
    with (DOCS / "convergence" / "quality.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        digits = 3 if row["metric"] in ("accuracy", "iou") else 2
        numbers = [
            f"{float(row[f'{how}_{what}']):.{digits}f}" for how in ("array", "solo") for what in ("mean", "min", "max")
        ]
        numbers += [f"{float(row['p']):.2f}", *(f"{float(row[f'{how}_seconds']):.0f}" for how in ("array", "solo"))]
        assert re.findall(r"\d+(?:\.\d+)?", line.split("is better)")[1]) == numbers, row["case"]
