"""The cells of docs/how-to/notebooks-and-training.md in a real Jupyter kernel, run by nbclient."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .forked_python import write_command

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "notebooks-and-training.md"
#: Cells after those of the page -> what their HTML contains.
RESULTS = {
    "statecli.diff(before, model)": "<table",
    "statecli.inspect(model)": "<table",
    "statecli.audit(model)": "1 audited: clean",
    "statecli.lock(model)": "statecli.lock/1",
    "statecli.inspect({'<b>bold</b>': torch.ones(1)})": "&lt;b&gt;bold&lt;/b&gt;",
}
#: A kernel in a fork of a process with torch imported. It ends if this variable does not name its parent.
KERNEL = """
import os
del os.environ["JPY_PARENT_PID"]
from ipykernel import kernelapp
kernelapp.launch_new_instance()
"""


def run_cells(folder):
    """Run the cells; return their outputs by source. The kernel is this interpreter, whatever kernels are installed."""
    spec = folder / "jupyter" / "kernels" / "here"
    spec.mkdir(parents=True)
    write_command(spec / "kernel.sh", "-c", KERNEL, libraries="torch")
    argv = [str(spec / "kernel.sh"), "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "here", "language": "python"}))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    sources = [*(block.strip() for block in blocks[:3]), *RESULTS, "statecli.inspect('missing.pt')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        client = nbclient.NotebookClient(
            notebook, kernel_name="here", timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}
        )
        client.execute()
    return {source: cell["outputs"] for source, cell in zip(sources, notebook.cells, strict=True)}


def find_output(cells, source):
    """Return the data of the only result of a cell."""
    (output,) = (output_ for output_ in cells[source] if output_["output_type"] == "execute_result")
    return output["data"]


def test_cells_show_results(tmp_path):
    """Each cell of the page runs; results are HTML and text, names are escaped, and an error is that of statecli."""
    cells = run_cells(tmp_path)
    failed = [source for source, outputs in cells.items() for output in outputs if output["output_type"] == "error"]
    assert failed == ["statecli.inspect('missing.pt')"]
    (error,) = (output_ for output_ in cells["statecli.inspect('missing.pt')"] if output_["output_type"] == "error")
    assert error["ename"] == "UnreadableError"
    assert error["evalue"] == "missing.pt: cannot be opened: no such file or directory"
    for source, text in RESULTS.items():
        data = find_output(cells, source)
        assert text in data["text/html"]
        assert data["text/plain"]
    assert "<b>bold</b>" not in find_output(cells, "statecli.inspect({'<b>bold</b>': torch.ones(1)})")["text/html"]
