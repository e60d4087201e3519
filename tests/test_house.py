"""The house: width, size, flags, copies, who imports whom, and that the documents are right."""

import argparse
import ast
import importlib
import re
import shlex
from collections import Counter

import pytest
from conftest import ROOT, SCRIPTS, run_script

PATTERNS = "*.py extras/*.py downstream/*.py tools/*.py papers/*.py tests/*.py".split()
PATTERNS += "README.md docs/**/*.md".split()
FILES = {str(p.relative_to(ROOT)): p for x in PATTERNS for p in sorted(ROOT.glob(x))}
TOP = [name for name in FILES if name.endswith(".py") and "/" not in name]
ROOMS = [name for name in FILES if name.startswith(("extras/", "downstream/"))]
SMALL = [name for name in FILES if name.startswith(("extras/", "downstream/", "tools/", "papers/"))]
OURS = {name.removesuffix(".py") for name in TOP}
OURS |= {"extras", "downstream", "tools", "papers", "tests"}

MOST_LINES = {  # of a file, or of all Python files in a folder
    "common.py": 902,
    "virtex.py": 696,
    "tp.py": 676,
    "icmlm.py": 815,
    "mmcontrastive.py": 860,
    "eval_linear.py": 768,
    "README.md": 185,
    "extras/": 1150,
    "downstream/": 2700,
    "tools/": 2025,
}
FLAGS = {"virtex": 37, "tp": 36, "icmlm": 40, "mmcontrastive": 49}  # beside --help

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


def size_of(*starts):
    """The lines of all Python files and pages whose names start like this

    Comments of pages, which their readers do not see, are not counted.
    """
    lines = 0
    for name in FILES:
        if name.startswith(starts) and name.endswith(".md"):
            text = re.sub(r"<!--.*?-->\n*", "", FILES[name].read_text(), flags=re.S)
            lines += len(text.splitlines())
        elif name.startswith(starts):
            lines += len(lines_of(name))
    return lines


@pytest.mark.parametrize("start", MOST_LINES)
def test_size(start):
    assert size_of(start) <= MOST_LINES[start]


def test_size_of_the_whole():
    """What somebody reads who reads a script; all Python but the tests; the pages"""
    for script, most in zip(SCRIPTS, (1605, 1585, 1720, 1770), strict=True):
        assert size_of("common.py", f"{script}.py") <= most, script
    assert size_of(*TOP, *SMALL) <= 10_590
    pages = [name for name in FILES if name.startswith("docs/")]
    assert len(pages) <= 10 and size_of(*pages) <= 1770


@pytest.mark.parametrize("name", SMALL)
def test_size_of_small_files(name):
    assert len(lines_of(name)) <= (480 if name == "tools/to_jsonl.py" else 350)


def main_lines(script):
    """How often each line stands in the script's main; empty lines do not count"""
    name = f"{script}.py"
    for node in ast.parse(FILES[name].read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            return Counter(filter(None, lines_of(name)[node.lineno - 1 : node.end_lineno]))


def test_mains_are_alike():
    """Differences between two mains are differences between two papers."""
    mains = {script: main_lines(script) for script in SCRIPTS}
    alike = mains["virtex"] & mains["tp"] & mains["icmlm"] & mains["mmcontrastive"]
    for script, lines in mains.items():
        others = lines - alike
        print(f"\n{script}: {others.total()} lines of main are not in all four\n")
        print("\n".join(others.elements()))
    assert alike.total() >= 45, "the lines that are not in all four mains are printed above"


def test_refusals():
    """At most 65 places where the scripts of the top level refuse something"""
    nodes = [node for name in TOP for node in ast.walk(ast.parse(FILES[name].read_text()))]
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    assert sum(call in ("fail", "common.fail", "parser.error") for call in calls) <= 65


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
    """{flag: what argparse knows of it} of a script, without --help"""
    parsers = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AttributeError):  # there are no args
        keep = lambda parser, _: parsers.append(parser)
        patch.setattr(argparse.ArgumentParser, "parse_args", keep)
        importlib.import_module(script).get_args([])
    return {action.option_strings[0]: action for action in parsers[0]._actions[1:]}


@pytest.mark.parametrize("script", FLAGS)
def test_flags(script):
    flags = flags_of(script)
    assert len(flags) <= FLAGS[script] and all(action.help for action in flags.values())


# Flags that are not the same thing in every script that has them
DIFFERENT = "--arch --init --lm --lm-iters --layers --pos".split()
DIFFERENT += "--batch-size --epochs --lr --text-lr".split()


def test_shared_flags():
    """Flags that mean the same are spelled and explained alike."""
    seen = {}
    for script in SCRIPTS:
        for flag, action in flags_of(script).items():
            about = action.type, action.choices, action.default, action.nargs, action.help
            if flag not in DIFFERENT:
                assert seen.setdefault(flag, about) == about, (script, flag)


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
