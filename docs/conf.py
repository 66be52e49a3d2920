"""How Sphinx builds the site. The sources come from docs/builder; run it by `make docs`."""

import tomllib
from pathlib import Path

pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())

project = "quire"
author = copyright = "the quire authors"
release = version = pyproject["project"]["version"]

extensions = ["myst_nb", "sphinx_copybutton"]
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are kept with their results; tests run them again
nb_merge_streams = True
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
highlight_language = "none"
pygments_style, pygments_dark_style = "friendly", "github-dark"

linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)[:/].*"]  # a reader's own server
linkcheck_timeout, linkcheck_retries = 20, 3

html_theme = "furo"
html_title = "quire"
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
python_maximum_signature_line_length = 80
