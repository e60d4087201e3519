#!/usr/bin/env bash
# BLEU-4 of captions that are all equal to their references, two of four having three words. A
# caption of three words has no group of four; nltk counts one that is missed, so perfect captions
# do not get 100. sacrebleu and pycocoevalcap count none.
# Guess: all three agree to 0.01.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    nltk==3.10.4 sacrebleu==2.6.0 pycocoevalcap==1.2 numpy==2.4.6

cat > expected.txt <<'END'
nltk 3.10.4: 96.49
sacrebleu 2.6.0: 100.00
pycocoevalcap 1.2: 100.00
END

venv/bin/python - > seen.txt <<'END'
import contextlib
import io
from importlib.metadata import version

import sacrebleu
from nltk.translate.bleu_score import corpus_bleu
from pycocoevalcap.bleu.bleu import Bleu

captions = [
    "a red bus",
    "two dogs run",
    "a man rides a brown horse on the beach",
    "a plate with a slice of pizza and a fork",
]
words = [text.split() for text in captions]
by_nltk = 100 * corpus_bleu([[row] for row in words], words)
by_sacrebleu = sacrebleu.corpus_bleu(captions, [captions], tokenize="none").score
table = {number: [text] for number, text in enumerate(captions)}
with contextlib.redirect_stdout(io.StringIO()):
    by_coco = 100 * Bleu(4).compute_score(table, table)[0][3]
print(f"nltk {version('nltk')}: {by_nltk:.2f}")
print(f"sacrebleu {version('sacrebleu')}: {by_sacrebleu:.2f}")
print(f"pycocoevalcap {version('pycocoevalcap')}: {by_coco:.2f}")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "nltk-bleu-of-short-captions: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "nltk-bleu-of-short-captions: unchanged"
