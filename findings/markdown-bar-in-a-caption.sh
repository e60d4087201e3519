#!/usr/bin/env bash
# A table of captions in Markdown, where a caption in backticks has a bar. markdown-it-py cuts the
# cell there and drops what is too much, as GitHub's specification says. mistune takes the whole
# table, with all other rows, for a paragraph.
# Guess: both cut the cell at the bar; the other rows are a table.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    markdown-it-py==4.3.0 mistune==3.4.0

cat > expected.txt <<'END'
markdown-it-py 4.3.0
mistune 3.4.0
`stop; go` sign, markdown-it-py: ['<code>stop; go</code> sign', '2', 'a bus', '3']
`stop; go` sign, mistune: ['<code>stop; go</code> sign', '2', 'a bus', '3']
`stop|go` sign, markdown-it-py: ['`stop', 'go` sign', 'a bus', '3']
`stop|go` sign, mistune: no table
END

venv/bin/python - > seen.txt <<'END'
import re
from importlib.metadata import version

import markdown_it
import mistune

print("markdown-it-py", version("markdown-it-py"))
print("mistune", version("mistune"))
renderers = {
    "markdown-it-py": markdown_it.MarkdownIt().enable("table").render,
    "mistune": mistune.create_markdown(plugins=["table"]),
}
for caption in ("`stop; go` sign", "`stop|go` sign"):
    table = f"| caption | times |\n|---|---|\n| {caption} | 2 |\n| a bus | 3 |\n"
    for package, render in renderers.items():
        html = render(table)
        cells = re.findall(r"<td[^>]*>(.*?)</td>", html)
        print(f"{caption}, {package}:", cells if "<table>" in html else "no table")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "markdown-bar-in-a-caption: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "markdown-bar-in-a-caption: unchanged"
