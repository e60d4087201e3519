"""What is read from captions: concepts, labels for tag prediction, and language models.

    words, concepts    words_of, word_spans, count_concepts, top_concepts, filter_captions
    tag prediction     concept_labels, label_rows, tag_head, tag_loss (Eq. 2): tp.py and icmlm.py
    language models    language_model: from the hub or a folder; scratch_language_model

ICMLM is Sariyildiz, Perez, Larlus. Learning Visual Representations with Caption Annotations. 2020.
"""

import itertools
import math
import multiprocessing
import os
import re
from array import array
from collections import Counter, defaultdict
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import nn

import common
from common import fail, print_main, progress, require

# -------------------------------------------------------------------------------------- concepts

POS = "nn", "nn+adj", "nn+adj+vb"  # --pos [Tab. 4]
TAGGERS = "textblob", "spacy"
PARTS_OF_SPEECH = {"nn": "nouns", "adj": "adjectives", "vb": "verbs"}
PENN = {"NN": "nouns", "JJ": "adjectives", "VB": "verbs"}  # first two letters of the Penn tags
UNIVERSAL = {"NOUN": "nouns", "PROPN": "nouns", "ADJ": "adjectives", "VERB": "verbs"}  # spaCy's
# Auxiliary verbs name nothing visible. spaCy has a tag for them; the Penn tags do not. [ours]
AUXILIARIES = set(
    "be am is are was were been being do does did have has had having can could may might must "
    "shall should will would".split()
)
# t-shirt, black-and-white and can't are one word each; a possessive 's belongs to none.
WORD = re.compile(r"['’]s\b|(?<![^\W_])([^\W\d_]+(?:(?!['’]s\b)['’-][^\W\d_]+)*)", re.IGNORECASE)


def word_spans(caption):
    """[(word in lower case, first, last)], where the word is caption[first:last]"""
    matches = [match for match in WORD.finditer(caption) if match[1]]
    return [(match[1].lower(), match.start(), match.end()) for match in matches]


def words_of(caption):
    return [word for word, _, _ in word_spans(caption)]


def tag_words(captions, tagger):
    """Yield [(word in lower case, "nouns" | "adjectives" | "verbs" | None)] for each caption."""
    if tagger == "textblob":
        from textblob.en.taggers import PatternTagger  # its lexicon is in the package

        pattern = PatternTagger()
        for caption in captions:
            tagged = pattern.tag(" ".join(words_of(caption)), tokenize=False)
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


def map_captions(function, captions, desc, size=10_000):
    """Yield function([caption, ...]) for each chunk of the captions in turn, using all cores."""
    firsts = range(0, len(captions), size)
    chunks = (list(captions[n : n + size]) for n in firsts)
    if len(firsts) < 2:
        yield from map(function, chunks)
        return
    with multiprocessing.Pool() as pool:
        results = pool.imap(function, chunks)
        yield from progress(results, desc=desc, total=len(firsts), unit=" chunks", leave=False)


def count_words(tagger, captions):
    """-> {word: Counter of the parts of speech that it is tagged as}"""
    counts = defaultdict(Counter)
    for words in tag_words(captions, tagger):
        for word, part in words:
            is_word = len(word) > 1 and word.replace("-", "").isalpha()
            if not is_word or (part == "verbs" and word in AUXILIARIES):
                part = None
            counts[word][part] += 1
    return counts


def count_concepts(captions, tagger=TAGGERS[0]):
    """The words of the captions by part of speech, with their counts, the most frequent first

    -> {"nouns": {word: count}, "adjectives": ..., "verbs": ...}. A word that is tagged in several
    ways belongs to its most frequent part of speech; all its occurrences count. [Sec. 3.1]
    """
    counts = defaultdict(Counter)
    for chunk in map_captions(partial(count_words, tagger), captions, "parts of speech"):
        for word, parts in chunk.items():
            counts[word].update(parts)
    concepts = {part: {} for part in PARTS_OF_SPEECH.values()}
    for word, parts in sorted(counts.items(), key=lambda item: (-item[1].total(), item[0])):
        part = parts.most_common(1)[0][0]
        if part:
            concepts[part][word] = parts.total()
    return concepts


def top_concepts(concepts, pos, num_concepts):
    """The most frequent words of the parts of speech `pos` -> [word]"""
    chosen = Counter()
    for part in pos.split("+"):
        chosen.update(concepts[PARTS_OF_SPEECH[part]])
    words = sorted(chosen, key=lambda word: (-chosen[word], word))[:num_concepts]
    if ("left" in words) != ("right" in words):  # one alone would be wrong in a flipped photo
        words = [word for word in words if word not in ("left", "right")]
    return words


def count_tokens(tokenize, captions):
    return [len(tokenize(caption)) for caption in captions]


def filter_captions(data, tokenize):
    """Keep each image's distinct captions of 3 to 25 tokens [ICMLM Sec. 4, Datasets]

    tokenize: caption -> its tokens: words in tp.py, the language model's in icmlm.py.
    """
    captions = data.all_captions()
    chunks = map_captions(partial(count_tokens, tokenize), captions, "caption lengths")
    lengths = itertools.chain.from_iterable(list(chunks))
    kept = []
    for i in range(len(data)):
        length_of = {caption: next(lengths) for caption in data.captions_of(i)}
        kept.append([caption for caption in length_of if 3 <= length_of[caption] <= 25])
    counts = f"{len(captions) - sum(map(len, kept))} of {len(captions)} captions"
    print_main(f"{counts} are left out: repeated for one image, or not of 3 to 25 tokens")
    return data.with_captions(kept)


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
    """Which of K words occur in an image's captions -> (N, K) sparse [ICMLM Sec. 3.1]"""
    index = {word: k for k, word in enumerate(concepts)}
    images = progress(range(len(data)), desc="labels", unit=" images")
    texts = (" ".join(data.captions_of(i)) for i in images)
    rows = ({index[word] for word in words_of(text) if word in index} for text in texts)
    return multi_hot(rows, len(concepts))


def save_labels(path, names, train, val):
    """The labels of both splits in an .npz.  names: K strings.  train, val: (N, K) sparse"""
    rows = sparse.vstack([train, val], format="csr")
    np.savez(path, names=names, data=rows.data, indices=rows.indices, indptr=rows.indptr)


def load_labels(path, num_train):
    """-> names, train, val as given to save_labels.  num_train: the rows of train"""
    with np.load(path) as file:
        names = file["names"].tolist()
        shape = len(file["indptr"]) - 1, len(names)
        csr = file["data"], file["indices"], file["indptr"]
        rows = sparse.csr_array(csr, shape)
    return names, rows[:num_train], rows[num_train:]


def label_rows(labels, indices, flipped=(), flip_permutation=None):
    """The rows `indices` (B,) of `labels`, sparse (N, K) -> (B, K)

    flipped: (B,) bool.  flip_permutation: (K,), the label that replaces each when flipped.
    """
    rows = labels[list(indices)].toarray()
    flipped = np.array(flipped, dtype=bool)
    if flipped.any():
        rows[flipped] = rows[flipped][:, flip_permutation]
    return torch.from_numpy(rows)


def flip_permutation(names):
    """The labels left and right are swapped in a flipped photo [ours] -> (K,) indices"""
    order = np.arange(len(names))
    if "left" in names and "right" in names:
        left = names.index("left")
        right = names.index("right")
        order[[left, right]] = right, left
    return order


def tag_head(arch, channels, num_labels):
    """Module tp of ICMLM's Fig. 2: (B, channels, h, w) -> logits (B, K). Widths and norms [ours].

    ResNets: pooling and a 2-layer MLP [Sec. 4.3]. VGG-16: 4 convolutions, pooling and a linear
    layer, in place of its fully connected layers [Sec. 4, Networks].
    """
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if arch == "vgg16_bn":
        layers = []
        for _ in range(4):
            layers.append(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
            layers.append(nn.BatchNorm2d(channels))
            layers.append(nn.ReLU())
        layers += pool
    else:
        layers = [*pool, nn.Linear(channels, channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(channels, num_labels))


def tag_loss(logits, labels):
    """Eq. 2 of ICMLM: softmax cross-entropy with multi-hot labels, normalised to sum to one

    logits (B, K), labels (B, K) -> scalar, the mean over the rows that have a label
    """
    counts = labels.sum(1, keepdim=True)
    targets = labels / counts.clamp(min=1)
    total = F.cross_entropy(logits.float(), targets, reduction="sum")
    return total / (counts > 0).sum().clamp(min=1)


# ------------------------------------------------------------------------------- language models


def quiet_transformers():
    import transformers  # only here: it takes seconds, and most runs need no language model

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes tokenise in parallel
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def language_model(name, device, masked_words=True):
    """A BERT-like masked language model, frozen and in eval mode -> (tokenizer, model)

    name: on the hub, or a folder.  masked_words: False if the encoder alone is needed.
    """
    transformers = quiet_transformers()
    with common.error_context(f"--lm {name}: give a model on the hub, a folder, or scratch"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model, report = transformers.AutoModelForMaskedLM.from_pretrained(
            name, output_loading_info=True
        )
    encoder = f"{model.base_model_prefix}."
    missing = [key for key in report["missing_keys"] if masked_words or key.startswith(encoder)]
    lacks = f"it lacks {sorted(missing)[:3]}"
    require(not missing, f"--lm {name} is not a complete masked language model: {lacks}")
    model.float()  # transformers 5 keeps the file's precision
    return tokenizer, model.to(device).eval().requires_grad_(False)


def attention_mask(model, visible):
    """The mask in the model's format.  visible: (B, T), True where a token is not padding

    Fused attention gets 4 dimensions: with 2, `transformers` waits for the GPU to check for zeros.
    """
    fused = model.config._attn_implementation == "sdpa"
    return visible[:, None, None] if fused else visible.long()


def train_wordpiece(captions):
    """A lower-case WordPiece tokenizer, as BERT's, with at most 10K tokens, from `captions`"""
    transformers = quiet_transformers()
    from tokenizers import BertWordPieceTokenizer

    pieces = BertWordPieceTokenizer(lowercase=True)
    # The letters are given in order: otherwise each training numbers them differently.
    letters = {letter for caption in captions for letter in pieces.normalize(caption)}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    special += [f"##{letter}" for letter in sorted(letters) if not letter.isspace()]
    pieces.train_from_iterator(
        iter(captions), vocab_size=10_000, special_tokens=special, show_progress=False
    )
    # Rebuilt from its vocabulary: it then puts [CLS] and [SEP] around a caption.
    pieces = BertWordPieceTokenizer(pieces.get_vocab(), lowercase=True)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, model_max_length=64, **names
    )


def bert_config(tokenizer, layers, width, **kwargs):
    """The configuration of a small BERT; the head dim is 64, as in BERT."""
    return quiet_transformers().BertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        hidden_size=width,
        intermediate_size=4 * width,
        **kwargs,
    )


def scratch_language_model(folder, captions, iters, seed, device, amp, layers=4, width=256):
    """`--lm scratch`: train a small BERT on `captions` and save it in `folder`.

    Masked language modelling, as in BERT. In place of BERT's next-sentence prediction, [CLS] learns
    to predict the tokens of its caption. [ours]
    """
    print_main(f"first, training a small BERT on the captions: {iters} iterations (--lm-iters)")
    transformers = quiet_transformers()
    tokenizer = train_wordpiece(captions)
    masking = transformers.DataCollatorForLanguageModeling(tokenizer)  # 15%, split 80/10/10
    special_ids = torch.tensor(tokenizer.all_special_ids)
    batch_size = 64
    torch.manual_seed(seed)
    config = bert_config(tokenizer, layers, width, max_position_embeddings=64)
    model = transformers.BertForMaskedLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    alone = common.World(0, 1, device)
    order = common.infinite_sampler(len(captions), batch_size, alone, seed)
    bar = progress(range(iters), desc="language model", unit=" its")
    for iteration in bar:
        common.set_lr(optimizer, common.lr_factor(iteration, iters, warmup=0.1))
        batch = [captions[i] for *_, i in itertools.islice(order, batch_size)]
        inputs = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
        tokens = inputs["input_ids"]  # (B, T)
        special = torch.isin(tokens, special_ids)
        masked, targets = masking.torch_mask_tokens(tokens.clone(), special)
        predicted = targets >= 0  # -100 elsewhere
        bags = torch.zeros(len(tokens), len(tokenizer)).scatter_(1, tokens, 1.0)  # (B, |V|)
        bags[:, special_ids] = 0
        with common.autocast(device, "off" if amp == "fp16" else amp):  # fp16 would need a scaler
            visible = inputs["attention_mask"].to(device)
            output = model.bert(masked.to(device), attention_mask=visible)
            hidden = output.last_hidden_state  # (B, T, width)
            logits = model.cls(hidden[predicted.to(device)])
            loss = F.cross_entropy(logits.float(), targets[predicted].to(device))
            loss = loss + tag_loss(model.cls(hidden[:, 0]), bags.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if iteration % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.2f}")
    finite = math.isfinite(loss.item())
    require(finite, "the language model's loss is not finite: try another --seed or --amp off")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
