"""What is read in captions: concepts, the labels of tag prediction, and language models.

    words, concepts    words_of, swap_left_right, count_concepts, top_concepts, filter_captions
    tag prediction     concept_labels, label_rows, tag_head, tag_loss (Eq. 2): of tp.py and icmlm.py
    language models    language_model: of the hub, of a folder, or a small BERT trained from scratch

ICMLM is Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. 2020.
"""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
from array import array
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import nn

import common
from common import CaptionData, check, fail, progress, say

# -------------------------------------------------------------------------------------- concepts

PARTS_OF_SPEECH = {"nn": "nouns", "adj": "adjectives", "vb": "verbs"}
PENN = {"NN": "nouns", "JJ": "adjectives", "VB": "verbs"}  # first two letters of the Penn tags
UNIVERSAL = {"NOUN": "nouns", "PROPN": "nouns", "ADJ": "adjectives", "VERB": "verbs"}  # spaCy's
# Auxiliary verbs name nothing visible. spaCy has a part of speech for them, Penn has none. [ours]
AUXILIARIES = set(
    "be am is are was were been being do does did have has had having can could may might must "
    "shall should will would".split()
)


def words_of(caption):
    """The words of a caption in lower case, without a possessive 's; t-shirt, can't are one."""
    caption = re.sub(r"['’]s\b", "", caption.lower())
    return re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", caption)


def tag_words(captions, tagger):
    """Yield [(word, "nouns" | "adjectives" | "verbs" | None), ...] for each caption.

    tagger: "textblob" or "spacy". Both see the words alone, in lower case: captions are written in
    all ways. [ours]
    """
    if tagger == "textblob":
        try:
            from textblob.en.taggers import PatternTagger  # its lexicon comes with the package
        except ImportError:
            fail("the part-of-speech tagger is missing: python -m pip install textblob")
        tag = PatternTagger().tag
        for caption in captions:
            tagged = tag(" ".join(words_of(caption)), tokenize=False)
            yield [(word, PENN.get(tag[:2])) for word, tag in tagged]
    else:
        try:
            import spacy

            nlp = spacy.load("en_core_web_sm", disable=["parser", "ner", "lemmatizer"])
        except (ImportError, OSError):
            install = "python -m pip install spacy && python -m spacy download en_core_web_sm"
            fail(f"--tagger spacy needs its English model: {install}")
        documents = (spacy.tokens.Doc(nlp.vocab, words_of(caption)) for caption in captions)
        for document in nlp.pipe(documents):
            yield [(token.text, UNIVERSAL.get(token.pos_)) for token in document]


def for_parts(function, captions, desc, size=10_000):
    """Yield function([caption, ...]) of one part of the captions after another, by all cores."""
    firsts = range(0, len(captions), size)
    parts = ([captions[i] for i in range(n, min(n + size, len(captions)))] for n in firsts)
    with progress(total=len(captions), desc=desc, unit=" captions", leave=False) as bar:
        for result in common.all_cores(function, parts):
            yield result
            bar.update(min(size, bar.total - bar.n))


def swap_left_right(caption):
    """The caption of the mirrored photo: the whole words left and right interchanged."""
    other = {"left": "right", "right": "left"}
    return re.sub(r"\b(left|right)\b", lambda word: other[word[0].lower()], caption, flags=re.I)


def count_words(tagger, captions):
    """-> {word: Counter of the parts of speech that it is given}"""
    seen = defaultdict(Counter)
    for words in tag_words(captions, tagger):
        for word, part in words:
            if part == "verbs" and word in AUXILIARIES:
                part = None
            if len(word) < 2 or not word.replace("-", "").isalpha():
                part = None
            seen[word][part] += 1
    return seen


def count_concepts(captions, tagger="textblob"):
    """The words of the captions by part of speech, with their counts, the most frequent first

    -> {"nouns": {word: count}, "adjectives": ..., "verbs": ...}. A tagger may see a word
    differently in different captions: it belongs to the part of speech that it is given most
    often, and the count is that of all its occurrences. [ICMLM Sec. 3.1, TP-Postag]
    """
    seen = defaultdict(Counter)
    for found in for_parts(partial(count_words, tagger), captions, "parts of speech"):
        for word, counts in found.items():
            seen[word].update(counts)
    concepts = {part: {} for part in PARTS_OF_SPEECH.values()}
    for word, counts in sorted(seen.items(), key=lambda item: (-item[1].total(), item[0])):
        part = counts.most_common(1)[0][0]
        if part:
            concepts[part][word] = counts.total()
    return concepts


def top_concepts(concepts, pos, number):
    """The `number` most frequent words of the parts of speech in `pos`, as "nn+adj+vb" -> [word]"""
    chosen = Counter()
    for part in pos.split("+"):
        chosen.update(concepts[PARTS_OF_SPEECH[part]])
    return sorted(chosen, key=lambda word: (-chosen[word], word))[:number]


def count_tokens(tokenize, captions):
    return [len(tokenize(caption)) for caption in captions]


def filter_captions(data, tokenize):
    """Each image's captions without repetitions and with 3 to 25 tokens [ICMLM Sec. 4, Datasets]

    tokenize: caption -> its tokens: words in tp.py, the language model's in icmlm.py.
    -> CaptionData; what was left out is counted in the log.
    """
    kept = CaptionData(type(data.images)(), data.tag_names)
    repeated = wrong_length = 0
    lengths = for_parts(partial(count_tokens, tokenize), data.captions, "caption lengths")
    lengths = itertools.chain.from_iterable(lengths)
    for i in range(len(data)):
        captions = data.captions_of(i)
        different = dict(zip(captions, lengths))
        fitting = [caption for caption, length in different.items() if 3 <= length <= 25]
        repeated += len(captions) - len(different)
        wrong_length += len(different) - len(fitting)
        kept.add(data.images[i], fitting, data.tags_of(i))
    say(f"{len(kept.captions)} captions; left out: {repeated} repeated for their image, "
        f"{wrong_length} of fewer than 3 or more than 25 tokens")  # fmt: skip
    return kept


# -------------------------------------------------------------------------------- tag prediction


def multi_hot(rows, size):
    """An iterable of sets of labels -> (N, size) sparse, 1 where a label is present"""
    indices, ends = array("i"), array("q", [0])
    for row in rows:
        indices.extend(sorted(row))
        ends.append(len(indices))
    ones = np.ones(len(indices), np.float32)
    return sparse.csr_array((ones, np.array(indices), np.array(ends)), (len(ends) - 1, size))


def concept_labels(data, concepts):
    """Which of the words `concepts` occur in an image's captions [ICMLM Sec. 3.1, TP-Postag]

    -> (N, K) sparse
    """
    index = {word: k for k, word in enumerate(concepts)}

    def labels_of(i):
        words = {word for caption in data.captions_of(i) for word in words_of(caption)}
        return {index[word] for word in words if word in index}

    images = progress(range(len(data)), desc="labels", unit=" images")
    return multi_hot(map(labels_of, images), len(concepts))


CSR = "data", "indices", "indptr"


def sparse_parts(name, matrix):
    """A sparse matrix as arrays for a file, and `sparse_from` them again."""
    return {f"{name}_{part}": getattr(matrix, part) for part in CSR}


def sparse_from(name, arrays, columns):
    parts = tuple(arrays[f"{name}_{part}"] for part in CSR)
    return sparse.csr_array(parts, (len(parts[2]) - 1, columns))


def label_rows(labels, indices, mirrored=(), swap=None):
    """The rows `indices` (B,) of `labels`, sparse (N, K) -> (B, K)

    mirrored: (B,) which photos are mirrored.  swap: (K,) which label then takes each one's place.
    """
    rows, mirrored = labels[list(indices)].toarray(), np.array(mirrored, dtype=bool)
    if mirrored.any():
        rows[mirrored] = rows[mirrored][:, swap]
    return torch.from_numpy(rows)


def left_right_swap(names):
    """The labels left and right change places in a mirrored photo [ours] -> (K,) indices"""
    order = np.arange(len(names))
    if "left" in names and "right" in names:
        left, right = names.index("left"), names.index("right")
        order[[left, right]] = right, left
    return order


def tag_head(arch, channels, num_labels):
    """Module tp of ICMLM's Fig. 2: (B, channels, h, w) -> logits (B, K). Widths, norms are [ours].

    ResNets: pooling and a 2-layer MLP [ICMLM Sec. 4.3]. VGG-16: 4 convolutions, pooling and a
    linear layer, in place of its fully connected layers [ICMLM Sec. 4, Networks].
    """
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    if arch != "vgg16":
        hidden = nn.Linear(channels, channels)
        return nn.Sequential(*pool, hidden, nn.ReLU(), nn.Linear(channels, num_labels))
    layers = []
    for _ in range(4):
        layers.append(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, *pool, nn.Linear(channels, num_labels))


def tag_loss(logits, labels):
    """Eq. 2 of ICMLM: softmax cross-entropy with labels that sum to one

    logits (B, K); labels (B, K), multi-hot -> scalar. A row without labels adds nothing.
    """
    targets = labels / labels.sum(1, keepdim=True).clamp(min=1)
    return F.cross_entropy(logits.float(), targets)


# ------------------------------------------------------------------------------- language models


def language_model(name, device, scratch=None, masked_words=True):
    """`--lm`: a BERT-like masked language model, frozen and in eval mode -> (tokenizer, model)

    name: of the hub, a local folder, or "scratch": then `scratch` holds what scratch_language_model
    wants.  masked_words: it must be able to predict them; otherwise an encoder will do.
    """
    if name == "scratch":
        name = scratch_language_model(device, *scratch)
    with loading(name):
        transformers = quiet_transformers()
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        read = transformers.AutoModelForMaskedLM.from_pretrained
        model, report = read(name, output_loading_info=True)
    encoder = f"{model.base_model_prefix}."
    missing = [key for key in report["missing_keys"] if masked_words or key.startswith(encoder)]
    if missing:
        fail(f"--lm {name} is not a whole masked language model: it lacks {sorted(missing)[:3]}")
    model.float()  # transformers 5 keeps the precision of the file
    return tokenizer, model.to(device).eval().requires_grad_(False)


def scratch_language_model(device, captions, folder, cache, iters, seed, amp, layers=4, width=256):
    """A small BERT trained on `captions` for `iters` iterations -> its folder

    It is kept in `cache` for all runs. With its own copy, in `folder`, a run can be moved.
    """
    made_of = {"captions": captions.digest(), "iters": iters, "seed": seed}
    if (layers, width) != (4, 256):
        made_of |= {"layers": layers, "width": width}
    note = Path(folder, "made_of.json")
    if not note.exists() or note.read_text() != json.dumps(made_of):
        kept = common.cache_path(cache, "language_model", made_of)
        with common.locked(kept):
            if not kept.exists():
                say(f"first a small BERT is trained on the captions: {iters} its (--lm-iters)")
                trained = train_language_model(captions, iters, seed, device, amp, layers, width)
                common.write_folder(kept, partial(write_language_model, *trained, made_of))
        with common.reading(kept / "made_of.json", "what --lm scratch made: delete its folder"):
            copy = partial(shutil.copytree, kept, dirs_exist_ok=True)
            common.write_folder(folder, copy)
    return str(folder)


@contextlib.contextmanager
def loading(name, flag="--lm"):
    """Within the block a model `name` is read; if it cannot be, the program ends and says why."""
    is_path = str(name).startswith(("/", ".", "~")) or str(name).count("/") > 1  # not of the hub
    check(not is_path or os.path.isdir(name), f"{flag} {name}: no such folder")
    try:
        yield
    except Exception as error:  # transformers and safetensors have many ways to say it
        reason = " ".join(str(error).split())[:300]
        give = "give a model of the right kind of the hub (downloaded once) or its folder"
        other = ", or scratch, which needs no download" if flag == "--lm" else ""
        fail(f"{flag} {name} cannot be loaded ({reason}): {give}{other}")


def quiet_transformers():
    import transformers  # only here: it takes seconds, and most runs need no language model

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes tokenise side by side
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def attention_mask(model, visible):
    """The mask that a language model wants; visible (B, T): the tokens that are no padding.

    Given two dimensions transformers asks the GPU at every step whether all are ones; four it takes
    as they are, but only with fused attention.
    """
    fused = model.config._attn_implementation == "sdpa"
    return visible[:, None, None] if fused else visible.long()


def train_wordpiece(captions):
    """BERT's kind of tokenizer, lower-case WordPiece, with at most 10K tokens of `captions`."""
    transformers = quiet_transformers()
    from tokenizers import BertWordPieceTokenizer

    pieces = BertWordPieceTokenizer(lowercase=True)
    # The letters are given in order: the trainer would number them differently every time.
    found = {letter for caption in captions for letter in pieces.normalize(caption)}
    letters = [f"##{letter}" for letter in sorted(found) if not letter.isspace()]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    sizes = {"vocab_size": 10_000, "min_frequency": 2}
    pieces.train_from_iterator(iter(captions), special_tokens=special, show_progress=False, **sizes)
    # Built again from its vocabulary, to have [CLS] and [SEP] around a caption.
    pieces = BertWordPieceTokenizer(pieces.get_vocab(), lowercase=True)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, model_max_length=64, **names
    )


def train_language_model(captions, iters, seed, device, amp, layers=4, width=256, batch_size=64):
    """`--lm scratch`: a small BERT -> (tokenizer, model)

    Masked language modelling as BERT does it. Beside it [CLS] learns to name the tokens of its
    caption through the same output layer: BERT's gets a meaning by predicting the next sentence,
    and captions have none. [ours]
    """
    tokenizer = train_wordpiece(captions)
    torch.manual_seed(seed)
    config = bert_config(tokenizer, layers, width, max_position_embeddings=64)
    model = quiet_transformers().BertForMaskedLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    alone = common.World(0, 1, device)
    order = common.infinite_sampler(len(captions), batch_size, alone, seed)
    bar = progress(range(iters), desc="language model", unit=" its")
    for iteration in bar:
        common.set_lr(optimizer, common.lr_factor(iteration, iters, warmup=0.1))
        batch = [captions[i] for _, i in itertools.islice(order, batch_size)]
        inputs = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
        tokens, visible = inputs["input_ids"], inputs["attention_mask"].to(device)
        masked, chosen = mask_tokens(tokens, tokenizer)
        with common.autocast(device, "off" if amp == "fp16" else amp):  # too small for a scaler
            hidden = model.bert(masked.to(device), attention_mask=visible).last_hidden_state
            logits = model.cls(hidden[chosen.to(device)])
            loss = F.cross_entropy(logits.float(), tokens[chosen].to(device))
            named = token_sets(tokens, tokenizer).to(device)
            loss = loss + tag_loss(model.cls(hidden[:, 0]), named)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if iteration % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.2f}")
    if not math.isfinite(loss.item()):
        advice = "try another --seed, --amp off, or --lm FOLDER"
        fail(f"the language model's loss is {loss.item()}: {advice}", everywhere=False)
    return tokenizer, model


def bert_config(tokenizer, layers, width, **more):
    """The configuration of a small BERT; heads are 64 wide, as BERT's."""
    return quiet_transformers().BertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        hidden_size=width,
        intermediate_size=4 * width,
        **more,
    )


def mask_tokens(tokens, tokenizer):
    """BERT's masking: 15% of the tokens; of these 80% [MASK], 10% any token, 10% kept

    tokens (B, T) -> masked (B, T), chosen (B, T) bool: those to be predicted
    """
    special = torch.isin(tokens, torch.tensor(tokenizer.all_special_ids))
    chosen = (torch.rand(tokens.shape) < 0.15) & ~special
    draw = torch.rand(tokens.shape)
    masked = torch.where(chosen & (draw < 0.8), tokenizer.mask_token_id, tokens)
    random = torch.randint(len(tokenizer), tokens.shape)
    return torch.where(chosen & (draw >= 0.9), random, masked), chosen


def token_sets(tokens, tokenizer):
    """tokens (B, T) -> (B, vocabulary), 1 where a token occurs; special tokens do not count"""
    sets = torch.zeros(len(tokens), len(tokenizer)).scatter_(1, tokens, 1.0)
    sets[:, tokenizer.all_special_ids] = 0
    return sets


def write_language_model(tokenizer, model, made_of, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Path(folder, "made_of.json").write_text(json.dumps(made_of))
