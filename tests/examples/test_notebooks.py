"""The notebooks as committed, and the program that runs them."""

import copy
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RUN = NOTEBOOKS / "run.py"
PATHS = re.compile(
    r"(?<![\w/.])/(?:home|Users|root|tmp|work|usr|opt|mnt|var|private)/|[A-Z]:\\|site-packages|0x[0-9a-f]{6,}"
)


def load_run():
    spec = importlib.util.spec_from_file_location("notebooks_run", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load_run()


@pytest.fixture(params=sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def notebook(request):
    return nbformat.read(NOTEBOOKS / request.param, as_version=4)


def make(path, *sources):
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources)]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("Text.", id="text"), *cells]), path)
    return path


def check(*arguments):
    return subprocess.run([sys.executable, str(RUN), *map(str, arguments)], capture_output=True, text=True)


def test_notebooks_hold_the_outputs_of_their_code_and_no_errors(notebook):
    nbformat.validate(notebook)
    assert run.code_cells(notebook) and run.stale(notebook) == []
    for cell in run.code_cells(notebook):
        if re.search(r"^ *print\(|^plt\.show\(", cell.source, re.MULTILINE):
            assert cell.outputs, cell.id
        if "plt.show(" in cell.source:
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.id
        assert {output.output_type for output in cell.outputs} <= {"stream", "display_data", "execute_result"}
        assert all(output.get("name", "stdout") == "stdout" for output in cell.outputs)


def test_nothing_tells_of_a_machine(notebook):
    for cell in notebook.cells:
        texts = [cell.source]
        for output in cell.get("outputs", []):
            texts += [output.get("text", "")]
            texts += [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
        for text in texts:
            assert not PATHS.search(text), (cell.id, PATHS.search(text))
        assert not cell.metadata, cell.id
    assert set(notebook.metadata) == {"kernelspec", "language_info", "executed"}
    assert "version" not in notebook.metadata.language_info


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [["--check"], []])
def test_a_failing_notebook_stays_as_it_was_and_the_cell_is_named(options, tmp_path):
    path = make(tmp_path / "broken.ipynb", "print(1)", "def divide(a):\n    return a / 0\n\ndivide(1)", "print(2)")
    before = path.read_bytes()
    result = check(*options, path)
    assert result.returncode == 1 and path.read_bytes() == before
    assert "broken.ipynb: cell 3: ZeroDivisionError: division by zero" in result.stderr


@pytest.mark.exhaustive
def test_run_saves_outputs_and_check_accepts_them(tmp_path):
    source = "import sys\nprint('\\x1b[31mred\\x1b[0m')\nprint('bar', file=sys.stderr)\nsys.executable == {!r}"
    path = make(tmp_path / "good.ipynb", source.format(sys.executable), "", "from IPython import display\n2 + 2")
    assert (
        "good.ipynb: cell 2: execution count is None, not 1; run python notebooks/run.py"
        in check("--check", path).stderr
    )
    assert check(path).returncode == 0
    notebook = nbformat.read(path, as_version=4)
    first, second = run.code_cells(notebook)
    assert [output.get("text") for output in first.outputs] == ["red\n", None]
    assert first.outputs[1].data["text/plain"] == "True"
    assert second.outputs[0].data["text/plain"] == "4"
    assert check("--check", path).returncode == 0


def test_changed_code_and_missing_outputs_are_stale(notebook):
    changed, emptied = copy.deepcopy(notebook), notebook
    run.code_cells(changed)[0].source += "\nx = 1"
    assert run.stale(changed) == ["the code has changed since it was executed; run python notebooks/run.py"]
    for cell in run.code_cells(emptied):
        cell.outputs = []
    assert run.stale(emptied) == ["no cell has outputs; run python notebooks/run.py"]
    run.code_cells(emptied)[1].execution_count = 7
    assert any(
        problem.endswith("execution count is 7, not 2; run python notebooks/run.py") for problem in run.stale(emptied)
    )
