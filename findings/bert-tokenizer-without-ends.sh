#!/usr/bin/env bash
# A BertWordPieceTokenizer that was trained adds no [CLS] and [SEP]; saved as tokenizer.json it
# stays so; made anew from the vocabulary that it saved, it adds them.
# Guess: the trained one adds them, as BERT needs them.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    tokenizers==0.23.3

cat > expected.txt <<'END'
tokenizers 0.23.3
trained: ['a', 'dog']
from tokenizer.json: ['a', 'dog']
from vocab.txt: ['[CLS]', 'a', 'dog', '[SEP]']
END

venv/bin/python - > seen.txt <<'END'
from importlib.metadata import version

from tokenizers import BertWordPieceTokenizer, Tokenizer

print("tokenizers", version("tokenizers"))
trained = BertWordPieceTokenizer()
trained.train_from_iterator(["a dog runs"] * 20, vocab_size=60, show_progress=False)
trained.save("tokenizer.json")
trained.save_model(".")  # vocab.txt
print("trained:", trained.encode("a dog").tokens)
print("from tokenizer.json:", Tokenizer.from_file("tokenizer.json").encode("a dog").tokens)
print("from vocab.txt:", BertWordPieceTokenizer("vocab.txt").encode("a dog").tokens)
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "bert-tokenizer-without-ends: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "bert-tokenizer-without-ends: unchanged"
