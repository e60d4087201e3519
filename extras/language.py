"""BERTs and RoBERTas from the hub or a folder: --lm of tp.py, icmlm.py and mmcontrastive.py"""

import json
import os

import huggingface_hub
import transformers
from tokenizers import Tokenizer

from common import fail, print_main

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # DataLoader workers tokenise
transformers.logging.set_verbosity_error()  # no reports on what it loads and saves
transformers.logging.disable_progress_bar()


def load_tokenizer(name, **options):
    """name: a model on the hub, or a folder -> its tokenizer, its configuration

    options: of the tokenizer. It reads no more tokens than its model has positions.
    """
    try:
        folder = name
        if not os.path.isdir(name):  # asks once; transformers would ask for a minute
            patterns = "*.json", "*.txt", "*.model"  # not the weights
            folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns)
        config = transformers.AutoConfig.from_pretrained(folder)
        # The vector of the first token must be that of [CLS], not of padding.
        options["padding_side"] = "right"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        positions = config.max_position_embeddings
    except huggingface_hub.errors.LocalEntryNotFoundError:
        fail(f"--lm {name} is not a folder, and the hub (huggingface.co) cannot be reached")
    except (OSError, ValueError, AttributeError):  # the last of a T5, which has no positions
        fail(f"--lm {name}: give a BERT, on the hub or in a folder, or scratch")
    if "roberta" in config.model_type:  # numbers them from there
        positions -= config.pad_token_id + 1
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    return tokenizer, config


def load_model(name, kind, **options):
    """name: as above -> the model in float32, in eval mode. A missing pooler is drawn at random.

    kind: a class of transformers, such as "AutoModel".  options: of its from_pretrained
    """
    build = getattr(transformers, kind).from_pretrained
    try:
        model, report = build(name, output_loading_info=True, **options)
    except (OSError, ValueError) as error:
        fail(f"--lm {name} cannot be loaded: {str(error).splitlines()[0]}")
    missing = sorted(weight for weight in report["missing_keys"] if "pooler" not in weight)
    if missing:
        fail(f"--lm {name} lacks weights of {type(model).__name__}: {missing[:3]}")
    return model.float()  # transformers 5 keeps half precision


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
