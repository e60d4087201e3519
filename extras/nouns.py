"""Nouns of the captions as tags: --tags nouns of mmcontrastive.py [contrastive paper, Sec. 4.4]."""

from collections import Counter
from dataclasses import replace
from functools import partial

import regex

import common
from common import LETTERS, fail, progress

NUM_NOUNS = 1000  # at most [ours]
WORD = regex.compile(rf"{LETTERS}(?:-{LETTERS})*")  # t-shirt is one


def tagged(args, data):
    """-> CaptionData whose tags are the most frequent nouns of its captions [Sec. 4.4]"""
    find = partial(find_nouns, data.all_captions(), args.tags)
    nouns = common.read_json(common.once(args, "nouns.json", find))
    tags = []
    for captions in data.captions:
        words = set(WORD.findall(" ".join(captions).lower()))
        tags.append([noun for noun in nouns if noun in words])
    return replace(data, tags=common.lists(tags), tag_names=nouns)


def require_spaces(captions):
    """For what needs words: Chinese, Japanese, Thai... write no spaces between them."""
    if sum(" " in caption for caption in captions) < len(captions) / 2:
        fail("most captions have no space between words: join keywords to one caption. For "
             "Chinese use virtex.py, mmcontrastive.py or tp.py --labels cluster")  # fmt: skip


def find_nouns(captions, tagger, path):
    """Write as JSON the words that are mostly nouns [ours], the most frequent first."""
    require_spaces(captions)
    captions = progress(captions, desc="nouns", unit=" captions", leave=False)
    words = (WORD.findall(caption.lower()) for caption in captions)
    if tagger == "nouns":
        from textblob.en.taggers import PatternTagger  # its lexicon is in the package

        pattern = PatternTagger()
        tagged = (pair for row in words for pair in pattern.tag(" ".join(row), tokenize=False))
    else:
        tagged = common.extra("spacy_tagger").tag_words(words)
    counts, as_noun = Counter(), Counter()
    for word, tag in tagged:
        counts[word] += 1
        as_noun[word] += (tag or "").startswith(("NN", "nouns"))  # TextBlob's, ours of spaCy's
    nouns = [word for word in counts if len(word) > 1 and as_noun[word] > counts[word] / 2]
    nouns.sort(key=lambda word: (-counts[word], word))
    sides = "left", "right"  # wrong in a flipped photo [ours]
    common.save(path, [noun for noun in nouns[:NUM_NOUNS] if noun not in sides])
