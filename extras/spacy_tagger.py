"""spaCy: --tagger spacy of tp.py and icmlm.py [ICMLM Sec. 3.1], --tags nouns-spacy.

[ours] The model is its smallest English one; it reads the words in lower case and without commas
and full stops, as the scripts do; proper nouns count as nouns. A core takes 8 to 14 minutes for
COCO's captions and 1 to 2 hours for Visual Genome's.
"""

from common import fail

MODEL = "en_core_web_sm"
UNIVERSAL = {"NOUN": "nouns", "PROPN": "nouns", "ADJ": "adjectives", "VERB": "verbs"}


def tag_words(rows):
    """rows: the words of each caption. Yield (word, "nouns" | "adjectives" | "verbs" | None)."""
    try:
        import spacy

        nlp = spacy.load(MODEL, disable=["parser", "ner", "lemmatizer"])
    except (ModuleNotFoundError, OSError):  # the latter: there is no such model
        fail("spaCy needs two commands: python -m pip install spacy, and python -m spacy download "
             f"{MODEL}")  # fmt: skip
    documents = (spacy.tokens.Doc(nlp.vocab, words) for words in rows)
    for document in nlp.pipe(documents):
        for token in document:
            yield token.text, UNIVERSAL.get(token.pos_)
