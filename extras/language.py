"""Does the tokenizer of a language model (--lm) suit the captions?"""

import json
import os

from tokenizers import Tokenizer

from common import fail, print_main


def check_tokenizer(tokenizer, captions, name):
    """check_known; and say so if a tokenizer does not read captions as its tokenizer.json says.

    Of a BertTokenizer's file, transformers 5 takes the vocabulary alone; without a setting in
    tokenizer_config.json, it writes all words in lower case.  name: of the model, for the message
    """
    check_known(tokenizer, captions, name)
    path = f"{tokenizer.name_or_path}/tokenizer.json"  # of the folder that it was read from
    if not os.path.exists(path):
        return
    own = Tokenizer.from_file(path)
    own.no_truncation()
    for caption in captions[:: 1 + len(captions) // 100]:
        read = tokenizer.tokenize(caption)
        expected = own.encode(caption, add_special_tokens=False).tokens
        if read != expected:
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens_map}
            print_main(f"{name} reads {caption!r} as {read}, but tokenizer.json says {expected}. "
                       f"If the model was trained on the latter, write into tokenizer_config.json "
                       f"{json.dumps(config)}")
            return


def check_known(tokenizer, captions, name):
    """Fail if a vocabulary that was not learned from the captions lacks half of their tokens.

    tokenizer: of transformers.  name: of the model, for the message. It warns from 5% on.
    """
    some = captions[:: 1 + len(captions) // 10_000]  # all would take a minute
    rows = tokenizer(some, add_special_tokens=False)["input_ids"]
    tokens = [token for row in rows for token in row]
    unknown = tokens.count(tokenizer.unk_token_id) / max(1, len(tokens))
    share = f"{unknown:.0%} of the captions' tokens are unknown to {name}"
    if unknown >= 0.5:
        fail(f"{share}: it has learned from texts with other words or letters")
    if unknown >= 0.05:
        print_main(f"{share}, which cannot tell them apart")
