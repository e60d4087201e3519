"""spaCy: --tagger spacy of tp.py and icmlm.py [ICMLM Sec. 3.1], --tags nouns-spacy.

    pip install spacy && python -m spacy download en_core_web_sm
"""

import spacy

UNIVERSAL = {"NOUN": "nouns", "PROPN": "nouns", "ADJ": "adjectives", "VERB": "verbs"}


def tag_words(rows):
    """rows: the words of each caption. Yield (word, "nouns" | "adjectives" | "verbs" | None)."""
    nlp = spacy.load("en_core_web_sm", disable=["parser", "ner", "lemmatizer"])
    documents = (spacy.tokens.Doc(nlp.vocab, words) for words in rows)
    for document in nlp.pipe(documents):
        for token in document:
            yield token.text, UNIVERSAL.get(token.pos_)
