"""A small BERT, trained on the captions alone: --lm scratch of tp.py, icmlm.py, mmcontrastive.py.

It learns masked language modelling as BERT does. In place of next-sentence prediction, [CLS] learns
to predict the tokens of its caption, because TP-Cluster needs its vector. [ours]
"""

import itertools
import math

import numpy as np
import regex
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

import common
from common import fail, print_main, progress

# Batch size, learning rate and its schedule, the model's size and length are [ours].
BATCH_SIZE = 64
LR = 1e-3
MAX_LENGTH = 64  # tokens per caption, or more with --max-words

transformers = common.import_transformers()


def train(folder, captions, iters, seed, device, amp, layers=4, width=256, max_words=0):
    """Train on the captions and save the model in `folder`, in the format of transformers.

    max_words: how many tokens it must be able to read, beside [CLS] and [SEP]. Longer captions
    still teach it words.
    """
    if not captions:
        fail("no photo has a caption")
    if max_words and min(len(caption.split()) for caption in captions) > max_words:
        fail(f"all captions have more than {max_words} words: raise --max-words")
    print_main(f"first, a small BERT is trained on the captions: {iters} iterations (--lm-iters); "
               "--lm FOLDER takes that of another run")
    max_length = max(MAX_LENGTH, max_words + 2)  # longer captions are cut
    tokenizer = train_tokenizer(captions, max_length)
    masking = transformers.DataCollatorForLanguageModeling(tokenizer)  # 15%, split 80/10/10
    special_ids = torch.tensor(tokenizer.all_special_ids)
    torch.manual_seed(seed)
    bert_config = config(tokenizer, layers, width, max_position_embeddings=max_length)
    model = transformers.BertForMaskedLM(bert_config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.01)
    order = shuffled_forever(captions, seed)
    bar = progress(range(iters), desc="small BERT", unit=" its")
    for iteration in bar:
        common.set_lr(optimizer, common.lr_factor(iteration, iters, warmup=0.1))
        batch = list(itertools.islice(order, BATCH_SIZE))
        inputs = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
        tokens = inputs["input_ids"]  # (B, T)
        special = torch.isin(tokens, special_ids)
        masked, targets = masking.torch_mask_tokens(tokens.clone(), special)
        predicted = targets >= 0  # -100 elsewhere
        bags = torch.zeros(len(tokens), len(tokenizer))  # (B, |V|)
        bags.scatter_(1, tokens, 1.0)
        bags[:, special_ids] = 0
        counts = bags.sum(1, keepdim=True)
        bags /= counts.clamp(min=1)

        with common.autocast(device, "off" if amp == "fp16" else amp):  # fp16 would need a scaler
            output = model.bert(masked.to(device), inputs["attention_mask"].to(device))
            hidden = output.last_hidden_state  # (B, T, width)
            logits = model.cls(hidden[predicted.to(device)])
            bag_logits = model.cls(hidden[:, 0])
        loss = F.cross_entropy(logits.float(), targets[predicted].to(device))
        bag_loss = F.cross_entropy(bag_logits.float(), bags.to(device), reduction="sum")
        loss = loss + bag_loss / (counts > 0).sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if iteration % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    if not math.isfinite(loss.item()):
        fail("the loss of the small BERT is not finite: try another --seed or --amp off")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_language_model(folder, args, data, device):
    """icmlm.py --lm scratch: train a small BERT on the captions"""
    captions = data.all_captions()
    common.extra("nouns").require_spaces(captions)  # ICMLM predicts words
    train(
        folder, captions, args.lm_iters, args.seed, device, args.amp,
        layers=args.lm_layers, max_words=args.max_words,
    )


def make_caption_model(folder, args, captions, device):
    """For mmcontrastive.py --lm scratch: with --lm-iters train a small BERT, else save a tokenizer
    and the configuration of a BERT whose weights will be random
    """
    layers, width = args.lm_layers or 12, args.lm_width or 768  # of BERT-base, if not given
    if args.lm_iters:
        train(folder, captions, args.lm_iters, args.seed, device, args.amp, layers, width)
        return
    tokenizer = train_tokenizer(captions)
    tokenizer.save_pretrained(folder)
    # With BERT's 0.02, all captions would start with nearly the same vector. [ours]
    config(tokenizer, layers, width, initializer_range=width**-0.5).save_pretrained(folder)


def shuffled_forever(captions, seed):
    """Yield captions, each once per epoch, in an order that depends on the seed alone."""
    for epoch in itertools.count():
        for i in np.random.default_rng([seed, epoch]).permutation(len(captions)):
            yield captions[i]


ACCENTS = "(?<=[a-zß-ɏ])[\u0300-\u036f]+"  # of decomposed, lower-case Latin letters
UNSPACED = regex.compile(r"\p{Han}|\p{Hiragana}|\p{Katakana}|\p{Thai}|\p{Lao}|\p{Khmer}")


def train_tokenizer(captions, max_length=MAX_LENGTH):
    """A lower-case WordPiece tokenizer like BERT's, with 10K tokens or all characters of `captions`

    Accents are taken off Latin letters only, because BERT's tokenizer also drops vowels of Hindi.
    [ours]
    """
    names = "pad", "unk", "cls", "sep", "mask"
    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    accents = normalizers.Replace(tokenizers.Regex(ACCENTS), "")
    lower = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    normalizer = normalizers.Sequence([lower, normalizers.NFD(), accents, normalizers.NFC()])
    # The letters are given in order; otherwise each training would number them differently.
    letters = {letter for caption in captions for letter in normalizer.normalize_str(caption)}
    letters = sorted(letter for letter in letters if not letter.isspace())
    trainer = trainers.WordPieceTrainer(
        vocab_size=10_000,
        min_frequency=2,
        limit_alphabet=len(letters),
        special_tokens=[*special.values(), *(f"##{letter}" for letter in letters)],
        show_progress=False,
    )
    pieces = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizer
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.train_from_iterator(iter(captions), trainer)
    # Without spaces (Thai, Japanese) a whole sentence looks like a word and could become one
    # token: no such token is longer than 8 characters. [ours]
    tokens = sorted(pieces.get_vocab(), key=pieces.token_to_id)
    tokens = [token for token in tokens if len(token) <= 8 or not UNSPACED.search(token)]
    vocabulary = {token: n for n, token in enumerate(tokens)}
    pieces.model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=1000)
    ends = [(token, pieces.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    pieces.decoder = decoders.WordPiece()
    pieces.post_processor = processors.BertProcessing(*ends)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, model_max_length=max_length, **special
    )


def config(tokenizer, layers, width, **kwargs):
    """The configuration of a small BERT, whose attention heads have 64 dimensions, as BERT's"""
    return transformers.BertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        hidden_size=width,
        intermediate_size=4 * width,
        **kwargs,
    )
