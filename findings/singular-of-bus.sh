#!/usr/bin/env bash
# Class names made singular, as one does with nouns of captions. TextBlob and inflect make bus of
# buses, but bu of bus: one class becomes two. inflect leaves dress and glass alone and TextBlob
# does not; TextBlob makes py of pies and ty of ties.
# Guess: inflect leaves all words alone that are singular already, bus, dress and glass among
# them.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    textblob==0.20.1 inflect==7.6.0

cat > expected.txt <<'END'
textblob 0.20.1
inflect 7.6.0
bus: textblob bu, inflect bu
buses: textblob bus, inflect bus
tennis: textblob tenni, inflect tenni
lens: textblob len, inflect len
canvas: textblob canva, inflect canva
octopus: textblob octopu, inflect octopu
glass: textblob glas, inflect glass
glasses: textblob glass, inflect glass
dress: textblob dres, inflect dress
pie: textblob pie, inflect pie
pies: textblob py, inflect pie
tie: textblob tie, inflect tie
ties: textblob ty, inflect tie
END

venv/bin/python - > seen.txt <<'END'
from importlib.metadata import version

import inflect
import textblob

print("textblob", version("textblob"))
print("inflect", version("inflect"))
engine = inflect.engine()
for word in "bus buses tennis lens canvas octopus glass glasses dress pie pies tie ties".split():
    by_inflect = engine.singular_noun(word) or word  # False: it is no plural
    print(f"{word}: textblob {textblob.Word(word).singularize()}, inflect {by_inflect}")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "singular-of-bus: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "singular-of-bus: unchanged"
