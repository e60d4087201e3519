"""--lm: language models of others, and whether their tokenizers fit captions."""

import json
import re
import shutil

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from conftest import refusal, run_here
from tokenizers import BertWordPieceTokenizer, Tokenizer, models, pre_tokenizers, processors
from tokenizers import trainers

import common
import mmcontrastive
import tp
from extras import language

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 16}


def byte_level(captions, trim):
    """A BPE tokenizer in the layout of RoBERTa's. trim: spans without the space before a word"""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces.train_from_iterator(captions, trainers.BpeTrainer(special_tokens=special, vocab_size=90))
    ends = ("</s>", 2), ("<s>", 0)
    pieces.post_processor = processors.RobertaProcessing(*ends, trim, add_prefix_space=False)
    return pieces


def metaspace(captions, _):
    """A Unigram model as SentencePiece's, whose tokens hold the space before a word"""
    words = {word for caption in captions for word in caption.replace(",", "").split()}
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", ",", *(f"▁{x}" for x in sorted(words))]
    pieces = Tokenizer(models.Unigram([(word, -1.0) for word in vocabulary], unk_id=3))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    ends = [("<s>", 0), ("</s>", 2)]
    pieces.post_processor = processors.TemplateProcessing("<s> $A </s>", None, ends)
    return pieces


GERMAN = ["Ein Mädchen läuft", "Das T-Shirt ist rot"]
EXPECTED = ["Ein", "Mädchen", "läuft"]


def german(folder, config):
    """A cased BERT's tokenizer in a folder, which splits at white space alone, as its file says"""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({*" ".join(GERMAN).lower()} - {" "})
    words = " ".join(GERMAN).split() + ["ein", *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {word: n for n, word in enumerate(dict.fromkeys([*special, *words]))}
    pieces = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pieces.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder.mkdir(parents=True, exist_ok=True)
    pieces.save(str(folder / "tokenizer.json"))
    transformers.BertConfig(**SIZES).save_pretrained(folder)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("config", ({}, {"tokenizer_class": "BertTokenizer"}))
def test_another_tokenizer_than_the_folders(config, tmp_path, capsys):
    """transformers lower-cases for it; the line says what to write, and that helps."""
    german(tmp_path, config)
    tokenizer, _ = common.load_lm_tokenizer(tmp_path)
    assert tokenizer.tokenize(GERMAN[0]) != EXPECTED
    language.check_tokenizer(tokenizer, ["rot", *GERMAN], "--lm x")
    printed = capsys.readouterr().out
    assert "--lm x reads 'Ein Mädchen läuft' as ['ein', " in printed and f"{EXPECTED}" in printed
    assert printed.count("\n") == 1
    german(tmp_path, json.loads(printed.split("tokenizer_config.json ")[1]))
    tokenizer, _ = common.load_lm_tokenizer(tmp_path)
    assert tokenizer.tokenize(GERMAN[0]) == EXPECTED and tokenizer.mask_token_id == 4
    language.check_tokenizer(tokenizer, ["rot", *GERMAN], "--lm x")
    assert not capsys.readouterr().out


def test_tokenizers_that_are_rebuilt_as_they_were(tmp_path, tiny_lm, capsys):
    """An uncased BERT, RoBERTa's and XLM-R's classes, --lm scratch, and vocab.txt alone: silence"""
    captions = ["A red Dog, on the grass!", "t-shirts  in Köln", "dogs"]
    bert = BertWordPieceTokenizer()
    bert.train_from_iterator(captions, show_progress=False)
    roberta = byte_level(50 * captions, True)
    xlmr = metaspace(captions, None)
    xlmr.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    kinds = {"Bert": bert._tokenizer, "Roberta": roberta, "XLMRoberta": xlmr}
    for kind, pieces in kinds.items():
        folder = tmp_path / kind
        config = getattr(transformers, f"{kind}Config")(**SIZES)
        config.save_pretrained(folder)
        pieces.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "{kind}Tokenizer"}}')
        tokenizer, _ = common.load_lm_tokenizer(folder)
        assert type(tokenizer).__name__ == f"{kind}Tokenizer"
        language.check_tokenizer(tokenizer, captions, kind)
        assert len(set(tokenizer("A red Dog")["input_ids"])) > 3
    (tmp_path / "Bert" / "tokenizer.json").unlink()
    bert.save_model(str(tmp_path / "Bert"))
    for folder in tmp_path / "Bert", tiny_lm:
        tokenizer, _ = common.load_lm_tokenizer(folder)
        language.check_tokenizer(tokenizer, captions, "x")
    assert "tokenizer.json says" not in capsys.readouterr().out


def test_a_tokenizer_of_the_hub(tmp_path, monkeypatch, capsys):
    """From its cache, where the hub cannot be reached: it is compared with its tokenizer.json."""
    commit = "0123456789012345678901234567890123456789"
    german(tmp_path / f"models--some--bert/snapshots/{commit}", {})
    (tmp_path / "models--some--bert/refs").mkdir()
    (tmp_path / "models--some--bert/refs/main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    tokenizer, _ = common.load_lm_tokenizer("some/bert")
    language.check_tokenizer(tokenizer, GERMAN, "--lm some/bert")
    assert "--lm some/bert reads 'Ein Mädchen läuft' as ['ein', " in capsys.readouterr().out


@pytest.mark.parametrize("script", ("icmlm", "tp", "mmcontrastive"))
def test_scripts_name_another_tokenizer(script, tiny, tiny_lm, tmp_path):
    """Once, with one of the captions both ways, before they train"""
    folder = tmp_path / "lm"
    shutil.copytree(tiny_lm, folder)
    (folder / "tokenizer_config.json").unlink()
    content = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"String": "there is"}
    content["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "the circle is"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    flags = ["--labels", "cluster", "--num-labels", 4] if script == "tp" else []
    printed = run_here(tiny(script, tmp_path / "run", "--lm", folder, "--iters", 1, *flags))
    assert printed.count(f"--lm {folder} reads 'there is a") == 1
    assert printed.count("but tokenizer.json says ['the', 'circle', ") == 1


def test_no_hub(tiny, tmp_path, monkeypatch):
    """Without a network a model of the hub is refused at once: transformers would ask for long."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)
    message = refusal(tiny("icmlm", tmp_path, "--lm", "some/bert"))
    assert "--lm some/bert is not a folder, and the hub (huggingface.co) cannot be" in message


def test_bars_of_downloads():
    """transformers' own are off, which would also switch off those of the hub's downloads."""
    transformers = common.import_transformers()
    assert not transformers.logging.is_progress_bar_enabled()
    assert not huggingface_hub.utils.are_progress_bars_disabled()


def test_models_that_do_not_load(tiny, tiny_lm, tmp_path):
    """A folder without weights, as caption_model is; weights that lack a layer; another kind"""
    shutil.copytree(tiny_lm, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    wrong = refusal(tiny("mmcontrastive", tmp_path / "run", "--lm", tmp_path / "bare"))
    assert f"--lm {tmp_path}/bare cannot be loaded: " in wrong and "model.safetensors" in wrong
    bert = transformers.AutoModel.from_pretrained(tiny_lm)
    bert.save_pretrained(tmp_path / "headless")
    for kind, lacks in (("AutoModelForMaskedLM", r"lacks weights of BertForMaskedLM: \['cls"),
                        ("AutoModelForCausalLM", r"lacks weights of BertLMHeadModel: \['cls"),
                        ("AutoModelForCTC", "cannot be loaded: Unrecognized configuration")):
        with pytest.raises(SystemExit, match=f"--lm {tmp_path}/headless {lacks}"):
            common.load_lm(tmp_path / "headless", kind)
    loaded = common.load_lm(tmp_path / "headless", "AutoModel")
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in bert.state_dict().items())


@torch.no_grad()
def test_caption_vectors_do_not_depend_on_padding(tiny_lm, tmp_path):
    """Also if the tokenizer's files say that padding comes first, as those of GPT do."""
    folder = tmp_path / "lm"
    shutil.copytree(tiny_lm, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.save_pretrained(folder)
    assert transformers.AutoTokenizer.from_pretrained(folder).padding_side == "left"
    texts = ["dog", "a dog and a cat on a table"]
    tokenizer, _ = common.load_lm_tokenizer(folder)
    bert = common.load_lm(folder, "AutoModel")
    together = tp.embed_captions(tokenizer, bert, texts, "off")
    alone = [tp.embed_captions(tokenizer, bert, [text], "off")[0] for text in texts]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    [tokens, mask] = mmcontrastive.tokenize(tokenizer, texts)
    assert mask[:, 0].all() and not mask[0, -1]


@pytest.fixture(scope="module")
def short_lm(tiny_lm, tmp_path_factory):
    """A BERT of 12 positions whose tokenizer does not say so"""
    folder = tmp_path_factory.mktemp("lm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_lm)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    (folder / "vocab.txt").write_text("\n".join(words))
    sizes = {**SIZES, "vocab_size": len(words), "max_position_embeddings": 12}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("script, flags", [
    ("tp", "--labels cluster --num-labels 4 --max-words 40"),
    ("icmlm", "--max-words 40"),
    ("mmcontrastive", ""),
])
def test_captions_longer_than_a_language_model_can_read(script, flags, tiny, short_lm, tmp_path):
    command = tiny(script, tmp_path / "run", *flags.split(), "--iters", 1, "--lm", short_lm)
    printed = run_here(command)
    assert re.search("they do not have 3 to 10 words|are cut at 12 tokens", printed)


def test_positions_of_a_roberta(tmp_path):
    """Its first positions stand for padding."""
    sizes = {**SIZES, "vocab_size": 90, "max_position_embeddings": 14, "pad_token_id": 1}
    model = transformers.RobertaModel(transformers.RobertaConfig(**sizes))
    model.save_pretrained(tmp_path)
    byte_level(["a dog"], True).save(str(tmp_path / "tokenizer.json"))
    tokenizer, _ = common.load_lm_tokenizer(tmp_path)
    ids = torch.zeros(1, tokenizer.model_max_length, dtype=torch.long)
    assert tokenizer.model_max_length == 12 and model(ids).last_hidden_state.shape == (1, 12, 32)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.zeros(1, 13, dtype=torch.long))


class Vocabulary:
    """A tokenizer that knows no word with an x"""

    unk_token_id = 7
    name_or_path = ""

    def __call__(self, texts, add_special_tokens):
        rows = [[7 if "x" in word else 1 for word in text.split()] for text in texts]
        return {"input_ids": rows}


@pytest.mark.parametrize("unknown, said", [(0, False), (4, False), (5, True), (49, True)])
def test_unknown_tokens_are_counted(unknown, said, capsys):
    captions = ["x"] * unknown + ["a b"] * ((100 - unknown) // 2) + ["a"] * ((100 - unknown) % 2)
    language.check_known(Vocabulary(), captions, "--lm bert")
    language.check_known(Vocabulary(), [], "--lm bert")
    expected = f"{unknown}% of the captions' tokens are unknown to --lm bert, which"
    assert (expected in capsys.readouterr().out) == said


def test_words_that_a_model_does_not_know():
    for check in language.check_known, language.check_tokenizer:
        with pytest.raises(SystemExit, match="^error: 50% of the captions' tokens are unknown to"):
            check(Vocabulary(), ["x a"] * 50, "me")
