"""How Sphinx builds the documentation."""

import base64
import importlib.metadata
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

import hfta_func

DOCS = Path(__file__).parent
# Sphinx reads no files outside its folder, so notebooks and a picture of each are copied into it. They are not executed.
NOTEBOOKS = DOCS / "notebooks"
NOTEBOOKS.mkdir(exist_ok=True)
for _path in (DOCS.parent / "notebooks").glob("*.ipynb"):
    shutil.copyfile(_path, NOTEBOOKS / _path.name)
    _outputs = [output for cell in json.loads(_path.read_text())["cells"] for output in cell.get("outputs", [])]
    _pictures = [output["data"]["image/png"] for output in _outputs if "image/png" in output.get("data", {})]
    for _picture in _pictures[:1]:
        (NOTEBOOKS / f"{_path.stem}.png").write_bytes(base64.b64decode(_picture))

project = "hfta_func"
author = "the authors of hfta_func"
release = version = hfta_func.__version__
html_title = f"hfta_func {release}"
html_theme = "furo"
# The address of the repository, once there is one; without it, pages do not link to their source.
REPOSITORY = importlib.metadata.metadata("hfta_func").json.get("project_url", [""])[0].partition(", ")[2]
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
html_theme_options = (
    {**html_theme_options, "top_of_page_buttons": ["view"]} if REPOSITORY else {"top_of_page_buttons": []}
)
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_copyright = False
html_math_renderer = "mathml"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
suppress_warnings = ["mystnb.unknown_mime_type"]

nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: f"hfta_func.{name}" for name in ("PerModel", "Schedule")}
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Else names that end with an underscore, as those of fitted estimators, lose it.
strip_signature_backslash = True
# PyTorch's docstrings have this section too.
napoleon_custom_sections = ["Shape"]


def _without_module_text(
    app: Sphinx, what: str, name: str, obj: Any, options: dict[str, bool], lines: list[str]
) -> None:
    """The pages introduce the modules themselves."""
    if what == "module":
        lines.clear()


def _readable(
    app: Sphinx, what: str, name: str, obj: Any, options: dict[str, bool], signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Types as they are written in the source, which autodoc spells otherwise inside of others."""

    def rewritten(text: str | None) -> str | None:
        text = text and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", text)
        for shown, written in {"Callable[[...], ": "Callable[..., ", "<factory>": "...", "~typing.": ""}.items():
            text = text and text.replace(shown, written)
        return text

    return rewritten(signature), rewritten(returns)


def _plain_returns(app: Sphinx, what: str, name: str, obj: Any, options: dict[str, bool], lines: list[str]) -> None:
    """What functions return and properties are is prose here; napoleon would take the words before a colon for a type."""
    if what == "property":
        lines.insert(0, "\\ ")
    for i in reversed(range(len(lines) - 1)):
        if lines[i].strip() == "Returns:":
            indent = len(lines[i + 1]) - len(lines[i + 1].lstrip())
            lines.insert(i + 1, " " * indent + "\\ ")


def _skip_fields(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: dict[str, bool]) -> bool | None:
    """Fields of a NamedTuple are described among its arguments."""
    return True if type(obj).__name__ in ("_tuplegetter", "member_descriptor") else None


def _math(self: Any, node: nodes.math | nodes.math_block) -> None:
    """Formulas as MathML, which browsers show without a script."""
    self.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def _without_blank_ends(app: Sphinx, docname: str, source: list[str]) -> None:
    """A doctest needs an empty line after its output; the page does not."""
    if not docname.startswith("notebooks/"):
        source[0] = source[0].replace("\n\n```\n", "\n```\n")


def _to_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links to examples open them in the repository, or name them; Sphinx would offer single files to download."""
    link = rf"[\1]({REPOSITORY}/blob/main/\2)" if REPOSITORY else r"\1 (`\2`)"
    source[0] = re.sub(r"\[([^\]]*)\]\((?:\.\./)+(examples/[^)]*)\)", link, source[0])


def _notebook_source(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The link to a page's source; notebooks lie beside the documentation, not in it."""
    if pagename.startswith("notebooks/"):
        context["theme_source_directory"] = ""


def _every_optimizer(app: Sphinx, docname: str, source: list[str]) -> None:
    """The reference lists what the package exports, so that a new optimizer is in it; some are on the page by themselves."""
    public = [name for name, make in vars(hfta_func.optim).items() if inspect.isfunction(make)]
    names = [name for name in public if "lr" in inspect.signature(getattr(hfta_func, name)).parameters]
    listed = "\n\n".join(one for name in names if (one := f".. autofunction:: hfta_func.{name}") not in source[0])
    source[0] = source[0].replace("<!-- every optimizer -->", f"```{{eval-rst}}\n{listed}\n```")


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("source-read", _without_blank_ends)
    app.connect("source-read", _to_repository)
    app.connect("source-read", _every_optimizer)
    app.connect("html-page-context", _notebook_source)
    app.connect("autodoc-process-signature", _readable)
    # Before napoleon.
    app.connect("autodoc-process-docstring", _plain_returns, priority=400)
    app.connect("autodoc-process-docstring", _without_module_text)
    app.connect("autodoc-skip-member", _skip_fields)
    app.add_html_math_renderer("mathml", (_math, None), (_math, None))
