#!/usr/bin/env bash
# The lower-casing normaliser of BERT's tokenizers takes accents off, and what it takes for
# accents are also vowels and tones: "horse" becomes "to come" in Thai, "bread" another word in
# Japanese, and "dog" in Hindi loses its vowels.
# Guess: a Thai caption of more than 100 letters without spaces is one [UNK]; nothing else happens
# to it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    tokenizers==0.23.3

cat > expected.txt <<'END'
tokenizers 0.23.3
lowercase=True
  Thai, horse: ม้า -> มา
  Thai, to come: มา -> มา
  Japanese, bread: パン -> ハン
  Hindi, dog: कुत्ता -> कतता
lowercase=False
  Thai, horse: ม้า -> ม้า
  Thai, to come: มา -> มา
  Japanese, bread: パン -> パン
  Hindi, dog: कुत्ता -> कुत्ता
END

venv/bin/python - > seen.txt <<'END'
from importlib.metadata import version

from tokenizers.normalizers import BertNormalizer

print("tokenizers", version("tokenizers"))
words = {
    "Thai, horse": "ม้า",
    "Thai, to come": "มา",
    "Japanese, bread": "パン",
    "Hindi, dog": "कुत्ता",
}
for lower in (True, False):
    normalizer = BertNormalizer(lowercase=lower)
    print(f"lowercase={lower}")
    for what, word in words.items():
        print(f"  {what}: {word} -> {normalizer.normalize_str(word)}")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "bert-tokenizer-thai: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "bert-tokenizer-thai: unchanged"
