"""Captions in other languages than English, and as they come from the web"""

import json
import unicodedata

import numpy as np
import pytest
import transformers
from conftest import CPU, captioned
from PIL import Image

import common
import icmlm
import tp
import virtex
from extras import nouns, small_bert

HINDI = "एक कुत्ता पार्क में दौड़ रहा है"
JAPANESE = "犬が公園でパンを食べている"
THAI = "หมาวิ่งในสวนสาธารณะกับเด็ก"


@pytest.mark.parametrize(
    "read, expected",
    [
        ("gar\u0327con  qui la\u0308uft", "garçon qui läuft".replace("rç", "ŗc")),
        (" a\n cat ", "a cat"),
        ("か\u3099", "が"),
        ("می\u200cخواهم", "می\u200cخواهم"),  # a joiner within a word
        ("\ud83d half", "half"),
    ],
)
def test_captions_are_composed(read, expected):
    assert common.one_line(read) == expected


@pytest.mark.parametrize(
    "caption, cleaned",
    [
        ("Crème BRÛLÉE İstanbul ǿ Ǟ ﬁ Ｆ", "creme brulee istanbul ø a fi f"),
        ("Tiếng Việt", "tieng viet"),
        ("パン が ﾊﾟﾝ й Ё ά 한국어", "パン が パン й ё ά 한국어"),
        (HINDI, HINDI),
        (THAI, THAI),
        ("שָׁלוֹם مُحَمَّد", "שָׁלוֹם مُحَمَّد"),
    ],
)
def test_accents_are_taken_off_latin_letters_only(caption, cleaned):
    """By VirTex and by the tokenizer of the small BERT, from composed and decomposed text alike"""
    for form in "NFC", "NFD":
        text = unicodedata.normalize(form, caption)
        assert virtex.normalise(text) == unicodedata.normalize("NFC", cleaned)
        if "ﬁ" not in caption and "ﾊ" not in caption:  # compatible forms: VirTex only
            tokenizer = small_bert.train_tokenizer([cleaned, cleaned])
            tokens = tokenizer(text)["input_ids"]
            assert tokens == tokenizer(cleaned)["input_ids"]
            assert "".join(tokenizer.tokenize(text)).replace("##", "") == cleaned.replace(" ", "")


def test_a_word_keeps_its_marks():
    joined = "می\u200cخواهم کتاب"
    assert tp.words_of(HINDI) == HINDI.split() and tp.words_of(joined) == joined.split()
    assert tp.words_of("Elle s’arrête, l'Été.") == ["elle", "s’arrête", "l'été"]
    assert nouns.WORD.findall(HINDI) == HINDI.split()
    assert [*tp.count_concepts([HINDI], "textblob")["nouns"]] == sorted(HINDI.split())
    data, tokenizer = captioned([HINDI]), small_bert.train_tokenizer(2 * [HINDI])
    [row] = icmlm.find_triplets(data, ["कुत्ता"], tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokenizer(HINDI)["input_ids"])[row[2]] == "कुत्ता"


def test_the_small_bert_knows_all_characters():
    captions = [f"{chr(0x4E00 + n)}{chr(0x4E00 + 7 * n % 3000)}" for n in range(3000)]
    tokenizer = small_bert.train_tokenizer([*captions, 20 * THAI])
    tokens = np.concatenate(tokenizer([*captions, 20 * THAI])["input_ids"])
    assert not np.isin(tokenizer.unk_token_id, tokens)


def test_the_small_bert_learns(tmp_path):
    """A masked word that the rest of its caption tells, by heart"""
    captions = ["a red dog runs", "two blue cats sleep", "one green bird sings", "five men talk"]
    small_bert.train(tmp_path, captions, 120, 0, CPU, "off", layers=1, width=128)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    tokens = tokenizer(captions, return_tensors="pt", padding=True)["input_ids"]
    right = []
    for place in (1, 2, 3):
        masked = tokens.clone()
        masked[:, place] = tokenizer.mask_token_id
        right += (model(masked).logits[:, place].argmax(1) == tokens[:, place]).tolist()
    assert np.mean(right) > 0.8


def test_long_captions_train_the_tokenizer():
    """SentencePiece ignores what is longer than 4,192 bytes, unless it is told not to."""
    tokenizer = virtex.train_tokenizer(["a red dog " * 500], 40)
    assert b"dog" in tokenizer


def test_words_need_spaces(tmp_path):
    """Words of Japanese captions are refused before a language model is trained on them."""
    rows = [{"image": name, "captions": [JAPANESE, THAI]} for name in ("a.png", "b.png")]
    for row in rows:
        Image.new("RGB", (32, 32)).save(tmp_path / row["image"])
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--data", f"{tmp_path}/a.jsonl", "--output", f"{tmp_path}/run"]
    for script, more in (icmlm, []), (tp, []), (tp, ["--labels", "lda"]):
        message = "no space between words" if script is icmlm else "none is left: .* virtex"
        with pytest.raises(SystemExit, match=message):
            script.main(script.get_args([*flags, *more]))
    assert not (tmp_path / "run/language_model").exists()
    args = tp.get_args([*flags, "--labels", "cluster", "--lm-iters", "2", "--num-labels", "2"])
    args.amp = "off"
    data = captioned([JAPANESE, THAI, "犬"])
    names, [labels] = tp.cluster_labels(args, [data], CPU)
    assert sorted(names) == sorted([JAPANESE, THAI]) and labels.sum() == 2
