"""The notebooks as committed, and the program that runs them."""

import copy
import importlib.util
import re
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


def test_changed_code_and_missing_outputs_are_stale(notebook):
    changed, emptied = copy.deepcopy(notebook), notebook
    run.code_cells(changed)[0].source += "\nx = 1"
    assert run.stale(changed) == ["the code has changed since it was executed; run python notebooks/run.py"]
    for cell in run.code_cells(emptied):
        cell.outputs = []
    assert run.stale(emptied) == ["no cell has outputs; run python notebooks/run.py"]
    run.code_cells(emptied)[1].execution_count = 7
    problem = "execution count is 7, not 2; run python notebooks/run.py"
    assert any(found.endswith(problem) for found in run.stale(emptied))
