#!/usr/bin/env bash
# A model trained by sentencepiece with its default ids (0 unknown, 1 begin, 2 end), read by
# transformers' T5Tokenizer. T5's own models have 2 for unknown, which is taken for granted: each
# unknown letter becomes </s>, the end of the caption, without a message. LlamaTokenizer reads
# such a model without its normalisation: the one half of a pizza is dropped.
# Guess: the same ids as sentencepiece's, but for the </s> at the end.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    sentencepiece==0.2.3 transformers==5.24.0 tokenizers==0.23.3 protobuf==7.36.2
export HF_HOME=$folder/hf HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error

cat > expected.txt <<'END'
sentencepiece 0.2.3
transformers 5.24.0
tokenizers 0.23.3
'it’s a dog' by sentencepiece: special tokens ['<unk>'], text 'its a dog'
'it’s a dog' by T5Tokenizer: special tokens ['</s>'], text 'its a dog'
'a café' by sentencepiece: special tokens ['<unk>'], text 'a caf'
'a café' by T5Tokenizer: special tokens ['</s>'], text 'a caf'
'½ pizza' by sentencepiece: special tokens ['<unk>'], text '12 pizza'
'½ pizza' by LlamaTokenizer: special tokens [], text 'pizza'
END

venv/bin/python - > seen.txt <<'END'
import os
from importlib.metadata import version

import sentencepiece
import transformers

for package in ("sentencepiece", "transformers", "tokenizers"):
    print(package, version(package))
captions = [
    "a dog runs on the grass", "two men ride a bus", "1 or 2 slices of pizza", "it is a cat",
]
for kind, file in (("unigram", "t5/spiece.model"), ("bpe", "llama/tokenizer.model")):
    os.makedirs(os.path.dirname(file))
    with open(file, "wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(captions * 50), model_writer=writer, model_type=kind,
            vocab_size=40, hard_vocab_limit=False, num_threads=1, minloglevel=2,
        )
t5 = transformers.T5Tokenizer.from_pretrained("t5")
llama = transformers.LlamaTokenizer.from_pretrained("llama")
for tokenizer, file, caption in (
    (t5, "t5/spiece.model", "it’s a dog"),
    (t5, "t5/spiece.model", "a café"),
    (llama, "llama/tokenizer.model", "½ pizza"),
):
    pieces = sentencepiece.SentencePieceProcessor(model_file=file)
    right = [pieces.id_to_piece(number) for number in pieces.encode(caption)]
    found = tokenizer(caption, add_special_tokens=False)["input_ids"]
    found = tokenizer.convert_ids_to_tokens(found)
    for what, tokens in (("sentencepiece", right), (type(tokenizer).__name__, found)):
        special = [token for token in tokens if token in ("<unk>", "<s>", "</s>")]
        text = "".join(token for token in tokens if token not in special).replace("▁", " ")
        print(f"{caption!r} by {what}: special tokens {special}, text {text.strip()!r}")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "t5-tokenizer-unknown-letters: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "t5-tokenizer-unknown-letters: unchanged"
