"""What is read in captions: words by part of speech, SentencePiece tokens, and language models.

    words              words_of, count_concepts, top_concepts
    labels             multi_hot, caption_labels, concept_labels, sparse_parts, sparse_from, label_rows
    mirrored photos    swap_left_right, mirrored_labels
    tokens             clean, train_tokenizer
    language models    language_model (of the hub, of a folder, or trained from scratch), attention_mask,
                       train_wordpiece, embed_captions
"""

import contextlib
import io
import itertools
import json
import math
import os
import re
import shutil
import unicodedata
from array import array
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from scipy import sparse
from torch import nn
from torch.nn import functional as F

from common import InfiniteSampler, World, autocast, fail, progress, tag_loss, warmup_cosine

# ------------------------------------------------------------------------------------------ words

PARTS_OF_SPEECH = {"nn": "nouns", "adj": "adjectives", "vb": "verbs"}
PENN = {"NN": "nouns", "JJ": "adjectives", "VB": "verbs"}  # the first two letters of the Penn Treebank's tags
UNIVERSAL = {"NOUN": "nouns", "PROPN": "nouns", "ADJ": "adjectives", "VERB": "verbs"}  # spaCy's
# Verbs that show nothing. spaCy has a part of speech for them, the Penn Treebank has none. [ours]
AUXILIARIES = set("be am is are was were been being do does did have has had having can could may might must shall should will would".split())


def words_of(caption):
    """The words of a caption in lower case, in their order, without a possessive 's. Letters, possibly joined: t-shirt, can't."""
    return re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", re.sub(r"['’]s\b", "", caption.lower()))


def tag_words(captions, tagger):
    """Yield [(word, "nouns" | "adjectives" | "verbs" | None), ...] for each caption. tagger: textblob or spacy.

    Both see the words alone, in lower case: captions are written in all ways. [ours]
    """
    if tagger == "textblob":
        try:
            from textblob.en.taggers import PatternTagger  # its lexicon comes with the package
        except ImportError:
            fail("the part-of-speech tagger is missing: python -m pip install textblob")
        tag = PatternTagger().tag
        for caption in captions:
            yield [(word, PENN.get(tag[:2])) for word, tag in tag(" ".join(words_of(caption)), tokenize=False)]
    else:
        try:
            import spacy

            nlp = spacy.load("en_core_web_sm", disable=["parser", "ner", "lemmatizer"])
        except (ImportError, OSError):
            fail("--tagger spacy needs its English model: python -m pip install spacy && python -m spacy download en_core_web_sm")
        for document in nlp.pipe(spacy.tokens.Doc(nlp.vocab, words_of(caption)) for caption in captions):
            yield [(token.text, UNIVERSAL.get(token.pos_)) for token in document]


def count_concepts(captions, tagger="textblob"):
    """The words of the captions by part of speech -> {"nouns": {word: count}, "adjectives": ..., "verbs": ...} by frequency.

    A tagger may see a word differently in different captions: the word belongs to the part of speech that it is
    given most often in all of them. The count is that of all its occurrences. [ICMLM Sec. 3.1, TP-Postag]
    """
    seen = defaultdict(Counter)
    for tagged in progress(tag_words(captions, tagger), total=len(captions), desc="parts of speech", unit=" captions"):
        for word, part in tagged:
            auxiliary = part == "verbs" and word in AUXILIARIES
            seen[word][None if auxiliary or len(word) < 2 or not word.replace("-", "").isalpha() else part] += 1
    concepts = {part: {} for part in PARTS_OF_SPEECH.values()}
    for word, counts in sorted(seen.items(), key=lambda item: (-item[1].total(), item[0])):
        part = counts.most_common(1)[0][0]
        if part:
            concepts[part][word] = counts.total()
    return concepts


def top_concepts(concepts, pos, number):
    """The `number` most frequent words of the parts of speech in `pos`, "nn+adj+vb" for example -> {word: count}"""
    chosen = {word: count for part in pos.split("+") for word, count in concepts[PARTS_OF_SPEECH[part]].items()}
    return dict(sorted(chosen.items(), key=lambda item: (-item[1], item[0]))[:number])


# ------------------------------------------------------------------------------------------ labels


def multi_hot(rows, size):
    """An iterable of sets of labels -> (N, size) sparse, 1 where a label is present"""
    indices, ends = array("i"), array("q", [0])
    for row in rows:
        indices.extend(sorted(row))
        ends.append(len(indices))
    return sparse.csr_array((np.ones(len(indices), np.float32), np.array(indices), np.array(ends)), (len(ends) - 1, size))


def caption_labels(data, labels_of, size):
    """An image has the labels of all its captions. labels_of: function caption -> labels -> (N, size) sparse"""
    images = progress(range(len(data)), desc="labels", unit=" images")
    return multi_hot(({label for caption in data.captions_of(i) for label in labels_of(caption)} for i in images), size)


def concept_labels(data, concepts):
    """Which of the words `concepts` occur in the captions of each image [ICMLM Sec. 3.1, TP-Postag] -> (N, K) sparse"""
    index = {word: k for k, word in enumerate(concepts)}
    return caption_labels(data, lambda caption: (index[word] for word in words_of(caption) if word in index), len(concepts))


CSR = ("data", "indices", "indptr")


def sparse_parts(name, matrix):
    """A sparse matrix as arrays for a file, and `sparse_from` them again."""
    return {f"{name}_{part}": getattr(matrix, part) for part in CSR}


def sparse_from(name, arrays, columns):
    return sparse.csr_array(tuple(arrays[f"{name}_{part}"] for part in CSR), (len(arrays[f"{name}_indptr"]) - 1, columns))


def label_rows(samples, targets, mirrored=None):
    """The rows of `targets`, sparse (N, K), of photo samples -> (B, K)

    mirrored: (K,) which label takes the place of each when a photo is mirrored.
    """
    rows, flips = targets[[sample["index"] for sample in samples]].toarray(), np.array([sample["mirrored"] for sample in samples])
    if flips.any():
        rows[flips] = rows[flips][:, mirrored]
    return torch.from_numpy(rows)


def swap_left_right(caption):
    """The caption of the mirrored photo: the whole words left and right interchanged [VirTex Sec. 3]."""
    return re.sub(r"\b(left|right)\b", lambda match: "right" if match[0].lower() == "left" else "left", caption, flags=re.IGNORECASE)


def mirrored_labels(names):
    """The labels left and right change places in the mirrored photo, where words or tokens are labels [ours] -> (K,) indices"""
    order = np.arange(len(names))
    for left, right in (("left", "right"), ("▁left", "▁right")):
        if left in names and right in names:
            a, b = names.index(left), names.index(right)
            order[[a, b]] = b, a
    return order


# ------------------------------------------------------------------------------------------ tokens

UNKNOWN, SOS, EOS, MASK = range(4)  # SentencePiece ids of VirTex's official model; padding shares that of unknown


def clean(caption):
    """Lower case, accents stripped [VirTex Sec. 3, Tokenization], by NFKD [official code], which can bring forth capitals: first."""
    decomposed = unicodedata.normalize("NFKD", caption).lower()
    return "".join(char for char in decomposed if not unicodedata.combining(char))


def train_tokenizer(captions, vocab_size):
    """SentencePiece BPE [VirTex Sec. 3] -> the serialised model. The size is an upper bound: few captions hold fewer tokens."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(captions), model_writer=model, model_type="bpe", vocab_size=vocab_size, hard_vocab_limit=False,
            split_by_unicode_script=True,  # no piece joins letters and punctuation: dog? dog! [Sec. 3]
            character_coverage=1.0, unk_id=UNKNOWN, bos_id=-1, eos_id=-1, pad_id=-1, control_symbols="[SOS],[EOS],[MASK]", minloglevel=3,
        )  # fmt: skip
    except RuntimeError as error:  # more letters than tokens, or no letter at all
        fail(f"no tokenizer of {vocab_size} tokens can be trained on these captions ({str(error).split('] ')[-1].strip()})")
    return model.getvalue()


# ------------------------------------------------------------------------------------------ language models


def language_model(args, captions, folder, device, masked_words=True):
    """`--lm`: a BERT-like masked language model, frozen and in eval mode -> (tokenizer, model), of transformers

    A name of the hub, a local folder, or "scratch": a small BERT trained on `captions`, kept in `folder` and found there
    again.  masked_words: whether it must be able to predict them; otherwise an encoder will do.
    """
    transformers, name = quiet_transformers(), args.lm
    if name == "scratch":
        name, made_of = str(folder), {"captions": captions.digest(), "iters": args.lm_iters, "seed": args.seed}
        note = Path(folder, "made_of.json")
        if not note.exists() or json.loads(note.read_text()) != made_of:
            train_language_model(captions, folder, args.lm_iters, args.seed, device, args.amp, made_of)
    with loading(name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model, report = transformers.AutoModelForMaskedLM.from_pretrained(name, output_loading_info=True)
    missing = sorted(key for key in report["missing_keys"] if masked_words or key.startswith(f"{model.base_model_prefix}."))
    if missing:
        fail(f"--lm {name} is not a whole masked language model: it lacks {', '.join(missing[:3])}")
    return tokenizer, model.to(device).eval().requires_grad_(False)


@contextlib.contextmanager
def loading(name, flag="--lm"):
    """Within the block a model `name` is read; when it cannot be, the program ends with the reason and what to give."""
    if str(name).startswith(("/", ".", "~")) or str(name).count("/") > 1:  # no name of the hub
        if not os.path.isdir(name):
            fail(f"{flag} {name}: no such folder")
    try:
        yield
    except Exception as error:  # not there, half there, of another kind: transformers and safetensors have many ways to say it
        reason, other = " ".join(str(error).split())[:300], ", or scratch, which needs no download" if flag == "--lm" else ""
        fail(f"{flag} {name} cannot be loaded ({reason}): give a model of the right kind of the hub (downloaded once) or its folder{other}")


def quiet_transformers():
    import transformers  # only here: it takes seconds, and most runs need no language model

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def attention_mask(model, visible):
    """The mask that a language model wants for tokens (B, T) of which those `visible` (B, T) are no padding.

    Given one of 2 dimensions transformers asks the GPU at every step whether it is all ones; only with fused attention it
    takes one of 4 as it is.
    """
    return visible[:, None, None] if model.config._attn_implementation == "sdpa" else visible.long()


def train_wordpiece(captions):
    """BERT's kind of tokenizer, WordPiece in lower case, with a vocabulary of at most 10K learned from `captions`."""
    transformers = quiet_transformers()
    from tokenizers import BertWordPieceTokenizer

    pieces = BertWordPieceTokenizer(lowercase=True)
    # The letters of the captions are given in order: the trainer would number them differently every time.
    letters = sorted({letter for caption in captions for letter in pieces.normalize(caption) if not letter.isspace()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"##{letter}" for letter in letters)]
    pieces.train_from_iterator(iter(captions), vocab_size=10_000, min_frequency=2, special_tokens=special, show_progress=False)
    pieces = BertWordPieceTokenizer(pieces.get_vocab(), lowercase=True)  # with [CLS] and [SEP] around a caption
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, model_max_length=64, **names)


def train_language_model(captions, folder, iters, seed, device, amp, made_of, batch_size=64):
    """`--lm scratch`: a BERT of 4 layers and 256 dimensions with its own WordPiece vocabulary, kept in `folder`.

    Masked language modelling as BERT does it: 15% of the tokens; of these 80% [MASK], 10% any token, 10% kept. Beside
    it [CLS] learns to name the tokens of its caption through the same output layer: BERT gives it a meaning by
    predicting the next sentence, and captions have none. [ours]
    """
    transformers = quiet_transformers()
    tokenizer = train_wordpiece(captions)
    torch.manual_seed(seed)
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
            max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    order = iter(InfiniteSampler(len(captions), batch_size, World(0, 1, device), seed))
    bar = progress(range(iters), desc="language model", unit=" its")
    for iteration in bar:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warmup_cosine(iteration, iters, 0.1 * iters)
        inputs = tokenizer([captions[i] for _, i in itertools.islice(order, batch_size)], padding=True, truncation=True, return_tensors="pt")
        tokens = inputs["input_ids"]
        special = torch.isin(tokens, torch.tensor(tokenizer.all_special_ids))
        chosen = (torch.rand(tokens.shape) < 0.15) & ~special
        draw = torch.rand(tokens.shape)
        masked = torch.where(chosen & (draw < 0.8), tokenizer.mask_token_id, tokens)
        masked = torch.where(chosen & (draw >= 0.9), torch.randint(len(tokenizer), tokens.shape), masked)
        named = torch.zeros(len(tokens), len(tokenizer)).scatter_(1, tokens, 1.0)
        named[:, tokenizer.all_special_ids] = 0
        with autocast(device, "off" if amp == "fp16" else amp):  # a small model needs no scaler
            hidden = model.bert(masked.to(device), attention_mask=inputs["attention_mask"].to(device)).last_hidden_state
            loss = F.cross_entropy(model.cls(hidden[chosen.to(device)]).float(), tokens[chosen].to(device))
            loss = loss + tag_loss(model.cls(hidden[:, 0]), named.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if iteration % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.2f}")
    if not math.isfinite(loss.item()):
        fail(f"the language model's loss is {loss.item()}: try another --seed, --amp off, or --lm FOLDER", everywhere=False)
    temporary = f"{folder}.tmp"  # whole or not there
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    Path(temporary, "made_of.json").write_text(json.dumps(made_of))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


@torch.no_grad()
def embed_captions(tokenizer, model, captions, vectors, device, amp, batch_size=256):
    """Write the [CLS] vector of each caption, of the last layer before the pooler, into vectors (N, dimensions)."""
    for first in progress(range(0, len(captions), batch_size), desc="caption vectors", unit=" batches"):
        batch = [captions[i] for i in range(first, min(first + batch_size, len(captions)))]
        inputs = tokenizer(batch, padding=True, truncation=True, max_length=64, return_tensors="pt").to(device)
        with autocast(device, amp):
            hidden = model.base_model(**inputs).last_hidden_state
        vectors[first : first + len(batch)] = hidden[:, 0].float().cpu().numpy()


