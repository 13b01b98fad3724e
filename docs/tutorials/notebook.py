"""Write first-plan.ipynb from first-plan.md: python docs/tutorials/notebook.py."""

import json
import re
from pathlib import Path

PAGE = Path(__file__).with_name("first-plan.md")
BLOCK = re.compile(r"^```(python|text)\n(.*?)\n```$", re.S | re.M)


def notebook(page: str) -> str:
    """Return the notebook of a page: its python blocks are cells, and its text blocks, which they print, are left out."""
    cells: list[dict[str, object]] = []
    for position, part in enumerate(BLOCK.split(page)):
        kind = ("markdown", "language", "code")[position % 3]
        language = part if kind == "language" else language if kind == "code" else "markdown"
        if kind == "language" or language == "text" or not part.strip():
            continue
        cell: dict[str, object] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}}
        cell |= {"execution_count": None, "outputs": []} if kind == "code" else {}
        cells.append(cell | {"source": part.strip().splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text()))
