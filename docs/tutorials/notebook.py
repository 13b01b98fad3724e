"""Write first-plan.ipynb from first-plan.md: python docs/tutorials/notebook.py."""

import json
import re
from itertools import zip_longest
from pathlib import Path

PAGE = Path(__file__).with_name("first-plan.md")
BLOCK = re.compile(r"^```(python|text)\n(.*?)\n```$", re.S | re.M)


def notebook(page: str) -> str:
    """Return the notebook of a page, of whose blocks the python ones are cells and the text ones what these print."""
    parts = BLOCK.split(page)
    cells: list[dict[str, object]] = []
    for prose, language, block in zip_longest(parts[::3], parts[1::3], parts[2::3], fillvalue=""):
        for kind, source in (("markdown", prose.strip()), ("code", block if language == "python" else "")):
            if source:
                outputs = {"execution_count": None, "outputs": []} if kind == "code" else {}
                cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, **outputs}
                cells.append(cell | {"source": source.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text()))
