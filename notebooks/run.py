"""Execute the notebooks from top to bottom in kernels of the Python that runs this file.

``python notebooks/run.py`` writes the outputs back into the files; ``python notebooks/run.py --check`` writes nothing
and exits with status 1 if a cell raises, or if the outputs in a file are missing or older than its code. Paths choose
other notebooks than those beside this file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

try:
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from nbformat import NotebookNode
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[notebooks]'") from None

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class OwnPython(AsyncKernelManager):
    """Starts kernels with the running Python, whatever kernels are installed on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The kernel of the running Python."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def execute(notebook: NotebookNode, folder: Path, timeout: int) -> list[str]:
    """Run all cells, in place and up to the first that raises; what went wrong, one line each."""
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_manager_class=OwnPython,
        record_timing=False,
        # A kernel on this machine has nothing to warn of that concerns a notebook.
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    with tempfile.TemporaryDirectory() as empty:
        # Neither the user's IPython start-up files nor a backend chosen outside may change what a notebook does.
        env = os.environ | {"IPYTHONDIR": empty, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        try:
            client.execute(env=env)
        except CellExecutionError:
            # The run ends at the first cell that raises, whose outputs hold the error.
            pass
        except (CellTimeoutError, DeadKernelError) as error:
            last = next((index for index, cell in _numbered(notebook) if cell.execution_count is None), 0)
            return [f"cell {last}: {type(error).__name__}: {str(error).splitlines()[0]}"]
    return [
        f"cell {index}: {output.ename}: {_ANSI.sub('', output.evalue)}"
        for index, cell in _numbered(notebook)
        for output in cell.outputs
        if output.output_type == "error"
    ]


def clean(notebook: NotebookNode) -> None:
    """Keep what the code printed and drew, and leave out what belongs to the machine that ran it."""
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
        executed=digest(notebook),
    )
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
    for cell in code_cells(notebook):
        # Progress bars and warnings go to stderr.
        outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        cell.outputs = []
        for output in outputs:
            if "metadata" in output:
                output.metadata = NotebookNode()
            if output.output_type != "stream":
                cell.outputs.append(output)
                continue
            text = _ANSI.sub("", output.text)
            if cell.outputs and cell.outputs[-1].output_type == "stream":
                # Where a kernel flushes is a matter of time.
                cell.outputs[-1].text += text
            else:
                cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=text))


def stale(notebook: NotebookNode) -> list[str]:
    """Why the outputs in a file are not those of its code; empty if they are."""
    cells = _numbered(notebook)
    problems = [
        f"cell {index}: execution count is {cell.execution_count}, not {position}"
        for position, (index, cell) in enumerate(cells, start=1)
        if cell.execution_count != position
    ]
    if not any(cell.outputs for _, cell in cells):
        problems.append("no cell has outputs")
    if not problems and notebook.metadata.get("executed") != digest(notebook):
        problems.append("the code has changed since it was executed")
    return [f"{problem}; run python notebooks/run.py" for problem in problems]


def digest(notebook: NotebookNode) -> str:
    """A fingerprint of the code of all cells."""
    return hashlib.sha256("\0".join(cell.source for cell in code_cells(notebook)).encode()).hexdigest()[:16]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that run."""
    return [cell for _, cell in _numbered(notebook)]


def _numbered(notebook: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """Code cells that have code, with their position among all cells, counted from 1."""
    return [
        (index, cell)
        for index, cell in enumerate(notebook.cells, start=1)
        if cell.cell_type == "code" and cell.source.strip()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if all is well."""
    parser = argparse.ArgumentParser(description="Execute the notebooks and save their outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all notebooks beside this file")
    parser.add_argument("--check", action="store_true", help="execute in memory, write nothing, fail on errors")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that one cell may take (default: 600)")
    options = parser.parse_args(arguments)
    failed = False
    for path in options.notebooks or sorted(Path(__file__).parent.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        problems = stale(notebook) if options.check else []
        problems += execute(notebook, path.resolve().parent, options.timeout)
        for problem in problems:
            print(f"{path.name}: {problem}", file=sys.stderr)
        failed |= bool(problems)
        if not problems:
            print(f"{path.name}: {len(code_cells(notebook))} cells ran")
        if not options.check and not problems:
            clean(notebook)
            nbformat.validate(notebook)
            nbformat.write(notebook, path)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
