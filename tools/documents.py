"""Write our tables into README and docs/, from docs/logs:   python tools/documents.py

Between these markers a page has the table of a log (or of all logs that a pattern matches) with
these columns; NAME = the heading. `means` instead of `table` leaves out deviations.

    <!-- table race/own-photos.json: own-mean = mean, own-knn-flowers, seeds -->
    <!-- end -->

A paragraph, a list item or a table of its own names the logs of its scores: <!-- log:
tables/scenes/scenes.json papers 0.06 -->, where 0.06 is a setting and "papers" is docs/papers.md.
tests/test_documents.py looks for each number there.
"""

import json
import re
import statistics
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
LOGS, PAPERS = REPO / "docs/logs", REPO / "docs/papers.md"
PAGES = [REPO / "README.md", *sorted(REPO.glob("docs/*.md"))]
MARKED = r"(<!-- (table|means) (\S+): ([^>]+) -->\n+)(?:\|.*\n)*(\n*<!-- end -->)"
SCORE = r"(?<![\d.^-])\d{1,3}\.\d{1,2}(?![\d.])"


def main():
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


def with_tables(text):
    """A page with our tables between its markers"""

    def replaced(match):
        marker, kind, files, columns, end = match.groups()
        lines = "".join(f"{line}\n" for line in table(files, columns))
        return marker + (re.sub(r" ± [\d.]+", "", lines) if kind == "means" else lines) + end

    return re.sub(MARKED, replaced, text)


def table(files, columns):
    """files: a pattern in docs/logs/tables -> lines of Markdown, for rows that have a score"""
    logs = [json.loads(path.read_text()) for path in sorted((LOGS / "tables").glob(files))]
    heads = {}  # {name of a column: its heading}
    for column in re.split(r",\s+", columns):
        name, _, head = column.partition(" = ")
        heads[name] = head or logs[0]["columns"].get(name, name)
    lines = [f"|  | {' | '.join(heads.values())} |", "|" + (1 + len(heads)) * "---|"]
    for row in (row for log in logs for row in log["rows"]):
        cells = {name: row["cells"][name]["ours"] for name in heads if name != "seeds"}
        counts = sorted({len(seeds) for seeds in cells.values()} - {0})
        if counts:
            words = {name: in_words(cells[name], 2 if "loss" in name else 1) for name in cells}
            words["seeds"] = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
            lines.append(f"| {row['row']} | {' | '.join(words[name] for name in heads)} |")
    return lines


def in_words(seeds, digits=1):
    """[[88.9, 53.8], [88.5, 53.8]] of two seeds -> "88.7 ± 0.3 / 53.8 ± 0.0" """
    parts = []
    for values in zip(*seeds):
        deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        parts.append(f"{statistics.mean(values):.{digits}f}{deviation}")
    return " / ".join(parts)


# --------------------------------------------------------------------------- scores in sentences


def scores(text):
    """[(the logs that a paragraph, list item or table names, its scores)], without code"""
    text = re.sub(MARKED, "", text)
    text = re.sub(r"^```.*?^```|`[^`]*`", "", text, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n(?!\|)|\n(?=\* |\d\. )", text):
        logs = " ".join(re.findall(r"<!-- log: ([^>]*) -->", block)).split()
        yield logs, set(re.findall(SCORE, re.sub(r"<!--[^>]*-->|\((http|Sec).*?\)", "", block)))


def numbers(name):
    """-> the numbers of a log as our pages write them: one or two digits, means and deviations"""
    if not name.endswith(".json"):
        return {name} if name != "papers" else {*re.findall(r"\d+\.\d+", PAPERS.read_text())}
    path = LOGS / name
    content = json.loads(path.read_text())
    found = []
    for row in content.get("rows", []):
        for cell in row["cells"].values():
            found += [in_words(cell["ours"], digits) for digits in (1, 2)]
    for number in re.findall(r"\d+\.\d+(?:e-?\d+)?", path.read_text()):
        found.append(f"{float(number):.1f} {float(number):.2f}")
    return set(re.findall(r"\d+\.\d+", " ".join(found)))


if __name__ == "__main__":
    main()
