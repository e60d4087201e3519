"""Words by part of speech: --tags nouns of mmcontrastive.py [contrastive paper, Sec. 4.4], and
spaCy for it (--tags nouns-spacy) and for --tagger spacy of tp.py and icmlm.py [ICMLM Sec. 3.1].
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import regex

import common
from common import fail, print_main, progress

NUM_NOUNS = 1000  # at most [ours]
LETTERS = r"\p{L}[\p{L}\p{M}\u200c\u200d]*"  # with their marks and joiners
WORD = regex.compile(rf"{LETTERS}(?:-{LETTERS})*")  # t-shirt is one
SPACY_MODEL = "en_core_web_sm"  # its smallest English one [ours]
SPACY_TAGS = {"NOUN": "nouns", "PROPN": "nouns", "ADJ": "adjectives", "VERB": "verbs"}


def tagged(args, data):
    """-> CaptionData whose tags are the most frequent nouns of its captions [Sec. 4.4]"""
    common.make_folder(args.output)
    path = Path(args.output, "nouns.json")
    if common.is_main() and not Path(args.output, "checkpoint.pth").exists():
        find_nouns(data.all_captions(), args.tags, path)  # once, for all processes
    common.barrier()
    nouns = common.read_json(path)
    tags = []
    for captions in data.captions:
        words = set(WORD.findall(" ".join(captions).lower()))
        tags.append([noun for noun in nouns if noun in words])
    return replace(data, tags=common.lists(tags), tag_names=nouns)


def require_spaces(captions):
    """For what needs words: Chinese, Japanese, Thai... write no spaces between them."""
    if sum(" " in caption for caption in captions) < len(captions) / 2:
        fail("most captions have no space between words: join keywords into a caption. For "
             "Chinese use virtex.py, mmcontrastive.py or tp.py --labels cluster")


def find_nouns(captions, tagger, path):
    """Write as JSON the words that are mostly nouns [ours], the most frequent first."""
    require_spaces(captions)
    captions = progress(captions, desc="nouns", unit=" captions", leave=False)
    words = (WORD.findall(caption.lower()) for caption in captions)
    if tagger == "nouns":
        print_main("TextBlob says which words are nouns, and mistakes some for verbs, for example "
                   "bear and sink; --tags nouns-spacy asks spaCy, as the paper of tp.py does")
        from textblob.en.taggers import PatternTagger  # its lexicon is in the package

        pattern = PatternTagger()
        pairs = (pair for row in words for pair in pattern.tag(" ".join(row), tokenize=False))
    else:
        pairs = tag_by_spacy(words)
    counts, as_noun = Counter(), Counter()
    for word, tag in pairs:
        counts[word] += 1
        as_noun[word] += (tag or "").startswith(("NN", "nouns"))  # TextBlob's tag, or spaCy's
    nouns = [word for word in counts if len(word) > 1 and as_noun[word] > counts[word] / 2]
    nouns.sort(key=lambda word: (-counts[word], word))
    common.save(path, nouns[:NUM_NOUNS])


def tag_by_spacy(rows):
    """rows: the words of each caption. Yield (word, "nouns" | "adjectives" | "verbs" | None).

    [ours] spaCy reads the words in lower case and without commas and full stops, as the scripts
    do. A core takes 8 to 14 minutes for COCO's captions and 1 to 2 hours for Visual Genome's.
    """
    try:
        import spacy

        nlp = spacy.load(SPACY_MODEL, disable=["parser", "ner", "lemmatizer"])
    except (ModuleNotFoundError, OSError):  # the latter: there is no such model
        fail("spaCy needs two commands: python -m pip install spacy, and python -m spacy download "
             f"{SPACY_MODEL}")
    documents = (spacy.tokens.Doc(nlp.vocab, words) for words in rows)
    for document in nlp.pipe(documents):
        for token in document:
            yield token.text, SPACY_TAGS.get(token.pos_)
