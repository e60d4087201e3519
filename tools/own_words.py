"""Make a probe of the words in photos' own captions: is what captions say in the backbone?

    python tools/own_words.py photos.jsonl --weights runs/virtex-photos/backbone.pth imagenet random
    python tools/own_words.py photos.jsonl   # only makes the probe, and says how to measure with it

The words are the 50 most frequent nouns, verbs and adjectives of the training captions that between
2% and 30% of the training photos have. They become the tags of the validation photos: a photo has a
word if one of its captions has it. One half of the validation photos is there to learn from, the
other to be scored. A backbone that was trained on the captions of the training photos has seen such
labels on such photos, so this probe tells what it learned there, not what it is worth elsewhere.

With fewer than 1,000 validation photos, each half is learned from and scored once: the score is the
mean. The interval of a difference, which eval_linear.py prints, says how many points are noise.
"""

import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import eval_linear
import tp
from common import fail, print_main


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("data", metavar="JSONL", help="captioned photos, with the splits train and val")
    add("--weights", nargs="+", help="backbones to measure with it, as eval_linear.py takes them")
    add("--output", default="own_words.jsonl", help="file to write (in the current folder)")
    return parser.parse_args(argv)


def main(args):
    train, val = common.caption_data(args.data)
    train, val = train.captioned(), val.captioned()
    words = choose_words(train)
    order = np.random.default_rng(0).permutation(len(val))
    learn = set(order[: len(val) // 2].tolist())
    with common.writing(args.output) as file:
        for n, photo_words in enumerate(words_of_photos(val)):
            row = {
                "image": str(Path(val.images[n]).resolve()),
                "tags": [word for word in words if word in photo_words],
                "split": "learn" if n in learn else "score",
            }
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    print_main(f"{args.output}: {len(val)} photos, {len(words)} words: {', '.join(words)}")
    flags = ["--data", args.output, "--train-split", "learn", "--val-split", "score"]
    flags += ["--both-ways"] if len(val) < 1000 else []
    if args.weights:
        eval_linear.main(eval_linear.get_args(["--weights", *args.weights, *flags]))
    else:
        weights = "runs/virtex-photos/backbone.pth random"
        print_main(f"measure: python eval_linear.py --weights {weights} {shlex.join(flags)}")


def words_of_photos(data):
    """-> for each photo the set of words that its captions have"""
    return [{word for text in captions for word in tp.words_of(text)} for captions in data.captions]


def choose_words(train):
    """The 50 most frequent nouns, verbs and adjectives that 2% to 30% of the photos have"""
    concepts = tp.count_concepts(train.all_captions(), "textblob")
    concepts = set().union(*concepts.values())
    photos = Counter(word for words in words_of_photos(train) for word in words & concepts)
    words = [word for word, n in photos.most_common() if 0.02 <= n / len(train) <= 0.3]
    if not words:
        fail("no word is in 2% to 30% of the training photos' captions")
    return sorted(words[:50], key=lambda word: (-photos[word], word))


if __name__ == "__main__":
    main(get_args())
