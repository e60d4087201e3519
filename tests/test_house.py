"""The house: width, flags, copies, who imports whom, and commands and links on the pages."""

import ast
import importlib
import re
import shlex

import pytest
from conftest import ROOT, SCRIPTS, run_script

PATTERNS = "*.py extras/*.py downstream/*.py tools/*.py papers/*.py tests/*.py".split()
PATTERNS += "README.md docs/**/*.md".split()
FILES = {str(p.relative_to(ROOT)): p for x in PATTERNS for p in sorted(ROOT.glob(x))}
TOP = [name for name in FILES if name.endswith(".py") and "/" not in name]
ROOMS = [name for name in FILES if name.startswith(("extras/", "downstream/"))]
OURS = {name.removesuffix(".py") for name in TOP}
OURS |= {"extras", "downstream", "tools", "papers", "tests"}

# What of ours a file imports at its top. (Scripts load extras with common.extra, when a flag asks.)
ALLOWED = {
    "common": set(),
    **dict.fromkeys((*SCRIPTS, "eval_linear", "extras"), {"common"}),
    "downstream": {*SCRIPTS, "eval_linear", "common", "downstream", "extras"},
}


def lines_of(name):
    return FILES[name].read_text().splitlines()


@pytest.mark.parametrize("name", FILES)
def test_width(name):
    """No line is wider than 100 columns, but for rows of tables, and papers/*.sh."""
    wide = [n for n, line in enumerate(lines_of(name), 1) if len(line) > 100 and line[0] != "|"]
    assert wide == []


def copies(name):
    """{what: its text} that is marked as copied between tp.py and icmlm.py"""
    text = FILES[name].read_text()
    section = r"captions to concepts: this section is copied.*?\n(.*?)\n# -----"
    found = {"section": re.search(section, text, re.S)[1].strip()}
    for function in re.findall(r"^# Copied (?:in|from) \w+\.py\n(.*?)\n\n\n", text, re.S | re.M):
        found[function.split("(")[0]] = function
    return found


def test_copies():
    """What belongs to the paper stands in both of its scripts, word for word."""
    assert copies("tp.py") == copies("icmlm.py")
    assert copies("tp.py").keys() == {"section", "def tag_head", "def tag_loss"}


def flags_of(script):
    """{name: (what may be given, help without its sources)} of a script's table"""
    table = importlib.import_module(script).FLAGS
    return {name: (given, re.sub(r" \[[^]]*\]", "", about)) for name, (*_, given, about) in
            table.items()}


# Flags that are not the same thing in every script that has them
DIFFERENT = "arch init lm lm_iters lm_layers layers pos dropout num_labels".split()
DIFFERENT += "batch_size epochs lr head_lr text_lr".split()


def test_shared_flags():
    """Flags that mean the same are spelled and explained alike."""
    seen = {}
    for script in SCRIPTS:
        for name, about in flags_of(script).items():
            assert about[1], (script, name)
            if name not in DIFFERENT:
                assert seen.setdefault(name, about) == about, (script, name)


def imported(tree):
    """The modules of ours that a file imports"""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found & OURS


@pytest.mark.parametrize("name", [*TOP, *ROOMS])
def test_imports(name):
    """They go one way and make no circle."""
    assert imported(ast.parse(FILES[name].read_text())) <= ALLOWED[re.split(r"[/.]", name)[0]]


HELP = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    sys.modules.pop(name, None)  # downstream.classify imports search
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as ended:
        slow = {"transformers", "torchvision", "pycocotools"} & set(sys.modules)
        print(name, ended.code, sorted(slow), file=sys.stderr)
"""


def test_help_is_quick():
    """It ends well and has not waited for the libraries that take seconds."""
    started = [name for name in ROOMS if "__main__" in FILES[name].read_text()]
    scripts = [name.removesuffix(".py").replace("/", ".") for name in started]
    scripts += [*SCRIPTS, "eval_linear"]
    ended = run_script("-c", HELP, *scripts)
    assert ended.stdout.count("usage: ") == len(scripts)
    assert ended.stderr.splitlines() == [f"{script} 0 []" for script in scripts]


# Scripts of others, and names that stand for any
FOREIGN = {"X.py", "downstream.NAME", "tools/convert-torchvision-to-d2.py"}
FOREIGN |= {"venv", "pip", "pytest", "spacy"}


def commands(name):
    """[(module, its flags)] of our scripts in a document, or in the docstring of a script"""
    text = FILES[name].read_text()
    fence = r"^ *```.*?\n(.*?)^ *```"
    code = re.findall(fence, text, re.S | re.M)
    if name.endswith(".py"):
        code = [text] = [ast.get_docstring(ast.parse(text)) or ""]
    passages = re.sub(r"\s*\\\n\s*", " ", "\n".join(code)).splitlines()
    text = re.sub(fence, "", text, flags=re.S | re.M)
    passages += [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", text)]
    found = set()
    for command in re.findall(r"\b(?:python|torchrun) [^#|;&()`\n]*", "\n".join(passages)):
        command = re.sub(r"\$n\b|(?<= )[A-Z](?= |$)", "1", command.split("  ")[0])  # any number
        words = [word for word in shlex.split(command) if word not in ("FLAGS", "...")]
        at = [n for n, word in enumerate(words) if word.endswith(".py") or words[n - 1] == "-m"]
        if at and words[at[0]] not in FOREIGN:
            module = words[at[0]].removesuffix(".py").replace("/", ".")
            found.add((module, tuple(words[at[0] + 1 :])))
    return sorted(found)


def anchors(page):
    """Those of a page's headings, as GitHub makes them"""
    text = re.sub("```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".md")])
def test_links(name):
    """Files and headings that README and pages link to are there."""
    for link in re.findall(r"\]\s*\(([^)\s]+)\)", FILES[name].read_text()):
        path, _, heading = link.partition("#")
        if not path.startswith("http"):
            target = FILES[name].parent / path if path else FILES[name]
            assert target.exists(), link
            assert not heading or heading in anchors(target), link


@pytest.mark.parametrize("name", [name for name in FILES if commands(name)])
def test_commands(name):
    """Every command in README, documents and docstrings is parsed by its script."""
    for module, flags in commands(name):
        importlib.import_module(module).get_args(list(flags))
