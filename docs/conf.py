# Sphinx settings. The pages build offline: no intersphinx, no fonts or scripts from elsewhere.
import re
from pathlib import Path

project = "M*"
author = "The M* contributors"
copyright = "the M* contributors"
release = re.search(r'__version__ = "(.+)"', (Path(__file__).parent.parent / "mstar" / "__init__.py").read_text())[1]
version = release

extensions: list[str] = []
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = f"M* {release}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {"navigation_with_keys": True}
