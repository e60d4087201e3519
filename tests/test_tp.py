"""tp.py and language.py, piece by piece, against the paper written out slowly: labels, loss, recipes, heads, scores.

Everything here runs in this process on tiny sizes; the script as a user starts it is tested elsewhere.
"""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import sklearn.cluster
import torch
from scipy import sparse
from torch import nn

import common
import language
import shapes
import tp

CPU = torch.device("cpu")


def captioned(*images):
    """CaptionData of images with these captions."""
    data = common.CaptionData(common.ImageFiles())
    for n, captions in enumerate(images):
        data.add(f"{n}.jpg", captions)
    return data


def arguments(*flags):
    return tp.get_args(["--amp", "off", *map(str, flags)])


def labels_in(folder, train, val, *flags):
    """The labels that a run in `folder` makes, or finds there."""
    return tp.cached_labels(arguments(*flags), train, val, SimpleNamespace(folder=folder), CPU)


def words_of_rows(labels, matrix):
    """Per image the names of its labels."""
    return [{labels.names[k] for k in np.flatnonzero(row)} for row in matrix.toarray()]


# ------------------------------------------------------------------------------------------ Eq. 1: clusters of captions

COLOURS, ANIMALS, VERBS = ("red", "blue", "white"), ("dog", "cat", "horse", "bird"), ("runs", "sleeps fast now", "eats the green grass")
SENTENCES = [f"a {colour} {animal} {verb}" for colour in COLOURS for animal in ANIMALS for verb in VERBS]


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    """The folder of a BERT of two layers and 16 dimensions with large random weights, so that captions differ."""
    import transformers
    from tokenizers import BertWordPieceTokenizer

    folder, words = tmp_path_factory.mktemp("bert"), sorted({word for sentence in SENTENCES for word in sentence.split()})
    pieces = BertWordPieceTokenizer(vocab={word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])})
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(words) + 5, **size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def recorded_kmeans(monkeypatch):
    """-> the k-means that `cluster_labels` will make (in a list) and the vectors of each of its batches"""
    made, batches = [], []

    class Recorded(sklearn.cluster.MiniBatchKMeans):
        def partial_fit(self, vectors):
            if self not in made:
                made.append(self)
            batches.append(vectors.copy())
            return super().partial_fit(vectors)

    monkeypatch.setattr(sklearn.cluster, "MiniBatchKMeans", Recorded)
    return made, batches


def nearest_centre(vector, centres):
    """The one k with y_k = 1 in Eq. 1, and its squared distance."""
    best = None
    for k in range(len(centres)):
        distance = sum((vector[d] - centres[k][d]) ** 2 for d in range(len(vector)))
        if best is None or distance < best[1]:
            best = k, distance
    return best


def literal_cls(folder, sentence):
    """psi(c)_[CLS]: each caption alone through BERT, the last layer, before the pooler."""
    import transformers

    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), transformers.BertForMaskedLM.from_pretrained(folder).eval()
    inputs = tokenizer(sentence, return_tensors="pt")
    assert tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])[0] == "[CLS]"
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True).hidden_states[-1][0, 0].numpy()


def test_clusters_are_equation_1(tiny_bert, tmp_path, monkeypatch):
    """Eq. 1: each caption's label is the centre nearest to its [CLS] vector; an image has those of all its captions."""
    rng, (made, batches) = np.random.default_rng(0), recorded_kmeans(monkeypatch)
    some = lambda count: [SENTENCES[n] for n in rng.choice(len(SENTENCES), count, replace=False)]
    train, val = captioned(*(some(rng.integers(1, 4)) for _ in range(20))), captioned(*(some(2) for _ in range(6)))
    labels = labels_in(tmp_path, train, val, "--labels", "cluster", "--lm", tiny_bert, "--num-labels", 5)

    vector_of = {sentence: literal_cls(tiny_bert, sentence) for sentence in {*train.captions, *val.captions}}
    expected = np.stack([vector_of[sentence] for sentence in train.captions])
    assert len(batches) == 5 and expected.std(0).mean() > 0.2
    for batch in batches:  # few captions: each of the five passes is one batch of all of them
        np.testing.assert_allclose(batch, expected, atol=3e-3)

    (kmeans,) = made
    centres, stored = kmeans.cluster_centers_.tolist(), {s: vector.astype(np.float16).tolist() for s, vector in vector_of.items()}
    found = {sentence: nearest_centre(vector, centres) for sentence, vector in stored.items()}
    for data, matrix in ((train, labels.train), (val, labels.val)):
        literal = np.zeros((len(data), 5))
        for i in range(len(data)):
            for sentence in data.captions_of(i):
                literal[i, found[sentence][0]] = 1
        assert (matrix.toarray() == literal).all() and (literal.sum(1) > 1).any()
    for k, name in enumerate(labels.names):
        members = sorted((distance, sentence) for sentence, (cluster, distance) in found.items() if cluster == k and sentence in list(train.captions))
        assert name == " | ".join(sentence for _, sentence in members[:3])
    assert max(name.count(" | ") for name in labels.names) == 2
    assert not (tmp_path / "caption_vectors.npy").exists()

    objective = sum(nearest_centre(vector, centres)[1] for vector in expected.tolist())
    lloyd = [sklearn.cluster.KMeans(5, init="random", n_init=1, random_state=seed).fit(expected).inertia_ for seed in range(10)]
    assert min(lloyd) * 0.99 < objective < 1.1 * max(lloyd)  # as good as some start of the algorithm without mini-batches


def given_vectors(monkeypatch, points):
    """In place of a language model: caption "17" has the vector points[17]."""

    def embed(tokenizer, model, captions, vectors, device, amp):
        vectors[:] = points[[int(captions[n]) for n in range(len(captions))]]

    monkeypatch.setattr(language, "language_model", lambda *_, **__: (None, SimpleNamespace(config=SimpleNamespace(hidden_size=points.shape[1]))))
    monkeypatch.setattr(language, "embed_captions", embed)


def test_clusters_of_more_captions_than_fit_in_a_batch(tmp_path, monkeypatch):
    """Eq. 1: every pass of the mini-batches sees each caption once; beyond the first 4096, labels are the nearest centres too."""
    points = np.random.default_rng(0).normal(size=(10_000, 3)).astype(np.float16)
    given_vectors(monkeypatch, points)
    made, batches = recorded_kmeans(monkeypatch)
    train, val = captioned(*([str(2 * i), str(2 * i + 1)] for i in range(4500))), captioned(*([str(n)] for n in range(9000, 10_000)))
    labels = tp.cluster_labels(arguments("--labels", "cluster", "--num-labels", 6), train, val, SimpleNamespace(folder=tmp_path), CPU)
    assert len(batches) == 5 * 2
    for n in range(0, 10, 2):
        assert (np.sort(np.concatenate(batches[n : n + 2]), 0) == np.sort(points[:9000].astype(np.float32), 0)).all()
    distances = ((points[:, None].astype(np.float64) - made[0].cluster_centers_) ** 2).sum(2)
    sure = np.diff(np.sort(distances, 1)[:, :2])[:, 0] > 1e-4  # float32 may choose the other one of two that are as near
    assert sure.sum() > 9900
    hot = np.eye(6)[distances.argmin(1)]
    both, rows = sure[:9000].reshape(-1, 2).all(1), labels.train.toarray()
    assert (rows == np.maximum(hot[:9000:2], hot[1:9000:2]))[both].all() and (rows.sum(1) == 2).any()
    assert (labels.val.toarray() == hot[9000:])[sure[9000:]].all()


def test_fewer_captions_than_clusters(tmp_path, monkeypatch):
    """Eq. 1 with K above the number of captions: as many clusters as captions."""
    given_vectors(monkeypatch, np.eye(4, dtype=np.float16))
    labels = tp.cluster_labels(arguments("--labels", "cluster"), captioned(["0", "1"], ["2"]), captioned(["3"]), SimpleNamespace(folder=tmp_path), CPU)
    assert len(labels.names) == 3 and sorted(labels.names) == ["0", "1", "2"]
    assert labels.train.toarray().sum(1).tolist() == [2, 1] and labels.val.toarray().sum() == 1


# ------------------------------------------------------------------------------------------ Eq. 2 and rotations


def test_loss_is_equation_2():
    """Eq. 2: -sum_k y_k log p_k with y normalised to sum to one, mean over images; several labels per image."""
    generator, present = torch.Generator().manual_seed(0), [{0, 3, 6}, {2}, {1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5, 6}, {6}]
    logits, targets = 3 * torch.randn(5, 7, generator=generator), torch.tensor([[float(k in row) for k in range(7)] for row in present])
    total = 0.0
    for scores, row in zip(logits.tolist(), present):
        exponentials = [math.exp(score) for score in scores]
        for k in row:
            total -= 1 / len(row) * math.log(exponentials[k] / sum(exponentials))
    for labels in ("postag", "cluster", "tokens", "instances"):
        assert tp.label_loss(logits, targets, labels).item() == pytest.approx(total / 5, rel=1e-6)
    assert tp.label_loss(logits.double(), targets.double(), "postag").item() == pytest.approx(total / 5, rel=1e-6)


def test_loss_at_the_start_and_at_best():
    """The docstring's: ln K when nothing is known, and ln n for a photo with n labels when all is."""
    targets = torch.zeros(1, 100)
    targets[0, :4] = 1
    assert tp.label_loss(torch.zeros(1, 100), targets, "postag").item() == pytest.approx(math.log(100), abs=1e-5)
    assert tp.label_loss(1000 * targets, targets, "postag").item() == pytest.approx(math.log(4), abs=1e-5)


def test_loss_of_topics():
    """Sec. 4: binary cross-entropy with the topics' probabilities, summed over the topics, mean over images."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = 2 * torch.randn(5, 4, generator=generator), torch.rand(5, 4, generator=generator).softmax(1)
    total = 0.0
    for scores, row in zip(logits.tolist(), targets.tolist()):
        for score, y in zip(scores, row):
            p = 1 / (1 + math.exp(-score))
            total -= y * math.log(p) + (1 - y) * math.log(1 - p)
    assert tp.label_loss(logits, targets, "lda").item() == pytest.approx(total / 5, rel=1e-5)


def test_loss_in_half_precision_is_summed_in_float32():
    """Eq. 2 over 10K labels in bf16 logits keeps the precision of the logits."""
    logits, targets = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.zeros(2, 10_000)
    targets[0, :7] = targets[1, 50:60] = 1
    for labels in ("postag", "lda"):
        loss = tp.label_loss(logits, targets, labels)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(tp.label_loss(logits.float(), targets, labels).item(), rel=1e-6)


def test_four_rotations_pixel_by_pixel():
    """RotNet: each image in four ways, block k turned k quarter turns counter-clockwise, with label k."""
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    turned, labels = tp.four_rotations(images)
    assert turned.shape == (8, 3, 4, 4) and labels.shape == (8, 4)
    expected = images.clone()
    for k in range(4):
        for b in range(2):
            assert torch.equal(turned[2 * k + b], expected[b]), tp.ROTATIONS[k]
            assert labels[2 * k + b].tolist() == [float(j == k) for j in range(4)]
        after = torch.empty_like(expected)
        for i in range(4):
            for j in range(4):
                after[:, :, i, j] = expected[:, :, j, 3 - i]  # the right column becomes the top row
        expected = after
    assert torch.equal(expected, images) and tp.ROTATIONS == ["0°", "90°", "180°", "270°"]


# ------------------------------------------------------------------------------------------ words


def test_words():
    """A word is letters of any script in lower case, joined by hyphens or apostrophes, without a possessive 's."""
    assert language.words_of("A T-shirt, 3 well-known DOGS' café_2x - non- stop; naïve") == ["a", "t-shirt", "well-known", "dogs", "café", "x", "non", "stop", "naïve"]
    assert language.words_of("the Dog's can't man’s") == ["the", "dog", "can't", "man"]
    assert language.words_of("") == language.words_of("12 ... - _") == []


def test_textblob_tags_each_word():
    """Sec. 3.1: nouns, adjectives and verbs; other words have no part of speech; every word of words_of has its tag."""
    (tagged,) = language.tag_words(["A black dog runs on the t-shirt!"], "textblob")
    assert [word for word, _ in tagged] == ["a", "black", "dog", "runs", "on", "the", "t-shirt"]
    assert dict(tagged) | {"t-shirt": None} == {"a": None, "black": "adjectives", "dog": "nouns", "runs": "verbs", "on": None, "the": None, "t-shirt": None}


def counted(monkeypatch, *captions):
    """count_concepts of captions that a tagger gave as "word/n word/a word/v word/-"."""
    parts = {"n": "nouns", "a": "adjectives", "v": "verbs", "-": None}
    tagged = [[(token[:-2], parts[token[-1]]) for token in caption.split()] for caption in captions]
    monkeypatch.setattr(language, "tag_words", lambda captions, tagger: iter(tagged))
    return language.count_concepts(captions, "textblob")


def test_a_word_has_the_part_of_speech_it_is_given_most_often(monkeypatch):
    """Sec. 3.1, DESIGN 5.2: counted over the corpus; the count is that of all occurrences; None may be the most frequent."""
    concepts = counted(monkeypatch, "run/v run/n fast/- fast/a", "run/v fast/- dog/n", "dog/n run/-")
    assert concepts == {"nouns": {"dog": 2}, "adjectives": {}, "verbs": {"run": 4}}


def test_auxiliaries_are_no_concepts(monkeypatch):
    """is, has, can, ... are left out where they are verbs; a can is a noun, and other words with the same beginning stay."""
    concepts = counted(monkeypatch, "is/v has/v can/n being/v does/v must/v island/n having/v hash/v", "can/n can/v do/v do/n do/v")
    assert concepts == {"nouns": {"can": 3, "island": 1}, "adjectives": {}, "verbs": {"hash": 1}}


def test_single_letters_and_contractions_are_no_concepts(monkeypatch):
    """A concept is a word of two letters or more; hyphens may join its parts, apostrophes not."""
    concepts = counted(monkeypatch, "x/n can't/v o'clock/n t-shirt/n ox/n")
    assert concepts == {"nouns": {"ox": 1, "t-shirt": 1}, "adjectives": {}, "verbs": {}}


def test_concepts_come_by_frequency_and_ties_by_alphabet(monkeypatch):
    """concepts.json: each part of speech by frequency, equal ones in the order of the alphabet."""
    concepts = counted(monkeypatch, "tree/n cat/n red/a sits/v", "cat/n bat/n blue/a", "cat/n tree/n bat/n red/a")
    assert list(concepts["nouns"].items()) == [("cat", 3), ("bat", 2), ("tree", 2)]
    assert list(concepts["adjectives"].items()) == [("red", 2), ("blue", 1)]
    assert list(concepts) == ["nouns", "adjectives", "verbs"]


CONCEPTS = {"nouns": {"man": 9, "dog": 5, "hat": 2}, "adjectives": {"red": 7, "big": 2}, "verbs": {"runs": 5, "sits": 1}}


@pytest.mark.parametrize(
    "pos, number, words",
    [
        ("nn", 10, ["man", "dog", "hat"]),
        ("nn", 2, ["man", "dog"]),
        ("nn+adj", 10, ["man", "red", "dog", "big", "hat"]),
        ("nn+adj+vb", 4, ["man", "red", "dog", "runs"]),
        ("nn+adj+vb", 3, ["man", "red", "dog"]),
        ("nn+adj+vb", 10, ["man", "red", "dog", "runs", "big", "hat", "sits"]),
    ],
)
def test_the_k_most_frequent_of_the_chosen_parts_of_speech(pos, number, words):
    """Sec. 4.1, Tab. 4: the K most frequent nouns, adjectives and verbs together; ties in the order of the alphabet."""
    assert list(language.top_concepts(CONCEPTS, pos, number)) == words


def test_spacy_s_parts_of_speech(monkeypatch):
    """--tagger spacy: NOUN, ADJ and VERB of its pipeline, on the words of words_of, hyphens and all; AUX is none."""
    spacy = pytest.importorskip("spacy", reason="spaCy is not installed")
    pipeline, asked = spacy.blank("en"), []
    ruler = pipeline.add_pipe("attribute_ruler")
    for word, part in (("t-shirt", "NOUN"), ("red", "ADJ"), ("runs", "VERB"), ("is", "AUX"), ("the", "DET")):
        ruler.add([[{"LOWER": word}]], {"POS": part})
    monkeypatch.setattr(spacy, "load", lambda name, **kwargs: asked.append(name) or pipeline)
    tagged = list(language.tag_words(["The T-shirt is red!", "runs"], "spacy"))
    assert tagged == [[("the", None), ("t-shirt", "nouns"), ("is", None), ("red", "adjectives")], [("runs", "verbs")]]
    assert asked == ["en_core_web_sm"]


def test_without_spacy_the_error_has_the_install_lines(monkeypatch):
    """--tagger spacy without spaCy: one line that says what to install."""
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(SystemExit) as stopped:
        list(language.tag_words(["a dog runs"], "spacy"))
    assert "python -m pip install spacy && python -m spacy download en_core_web_sm" in str(stopped.value) and "\n" not in str(stopped.value)


# ------------------------------------------------------------------------------------------ captions that are kept


def test_captions_of_3_to_25_tokens_without_duplicates(capsys):
    """Sec. 4, Datasets: an image's duplicates and captions of fewer than 3 or more than 25 tokens go, and are counted."""
    of_length = lambda count: " ".join(["dog"] * count)
    data = captioned(["a big dog", "a big dog", of_length(25), of_length(26), of_length(2)], ["a big dog", "", of_length(3)], [])
    data.tag_names = ["x"]
    kept = common.filter_captions(data, language.words_of)
    assert [kept.captions_of(i) for i in range(3)] == [["a big dog", of_length(25)], ["a big dog", of_length(3)], []]
    assert list(kept.images) == list(data.images) and kept.tag_names == ["x"]
    assert capsys.readouterr().out == "4 captions; left out: 1 repeated for their image, 3 of fewer than 3 or more than 25 tokens\n"


def test_labels_are_made_of_the_captions_that_are_kept(tmp_path, capsys):
    """Sec. 4, Datasets, on both splits: a caption of two words gives its image no label, a repeated one counts once."""
    train = captioned(["a dog runs", "a dog runs"], ["black cat"], ["the dog sleeps"])
    labels = labels_in(tmp_path, train, captioned(["a dog runs"], ["dog sleeps"]))
    assert words_of_rows(labels, labels.train) == [{"dog", "runs"}, set(), {"dog", "sleeps"}]
    assert words_of_rows(labels, labels.val) == [{"dog", "runs"}, set()]
    assert json.loads((tmp_path / "concepts.json").read_text())["nouns"] == {"dog": 2}
    assert capsys.readouterr().out.splitlines() == [
        "2 captions; left out: 1 repeated for their image, 1 of fewer than 3 or more than 25 tokens",
        "1 captions; left out: 0 repeated for their image, 1 of fewer than 3 or more than 25 tokens",
    ]


@pytest.mark.parametrize("labels", ("postag", "cluster", "lda", "tokens"))
def test_no_caption_is_left(labels, tmp_path):
    """One clear line when no caption of a split is of 3 to 25 words."""
    for train, val in ((["two words"], ["a dog runs"]), (["a dog runs"], [])):
        with pytest.raises(SystemExit, match=f"--labels {labels} needs captions of 3 to 25 words in both splits"):
            labels_in(tmp_path, captioned(train), captioned(val), "--labels", labels)


# ------------------------------------------------------------------------------------------ each label set


def test_postag_labels_of_an_image_are_those_of_all_its_captions(tmp_path):
    """Sec. 3.1: y_k = 1 when word k is in a caption of the image, in whatever case; only training words are labels."""
    train = captioned(["a dog runs", "the Red dog sleeps"], ["one red t-shirt here", "a DOG runs"], ["up and down again"])
    val = captioned(["A purple zebra runs", "red red red"], ["the purple zebra"])
    labels = labels_in(tmp_path, train, val)
    assert labels.names[:4] == ["dog", "red", "runs", "sleeps"]  # 3, 2 and 2, then 1 each by the alphabet
    assert words_of_rows(labels, labels.train)[:2] == [{"dog", "red", "runs", "sleeps"}, {"red", "t-shirt", "dog", "runs"}]
    assert words_of_rows(labels, labels.val) == [{"runs", "red"}, set()]
    assert labels.train.dtype == np.float32 and set(labels.train.data.tolist()) == {1.0}

    fewer = labels_in(tmp_path, train, val, "--num-labels", 2)
    assert fewer.names == ["dog", "red"] and words_of_rows(fewer, fewer.train) == [{"dog", "red"}, {"dog", "red"}, set()]
    nouns = labels_in(tmp_path, train, val, "--pos", "nn")
    assert "dog" in nouns.names and not {"red", "runs", "sleeps"} & set(nouns.names)
    both = labels_in(tmp_path, train, val, "--pos", "nn+adj")
    assert {"dog", "red"} <= set(both.names) and not {"runs", "sleeps"} & set(both.names)


def test_topics_are_probabilities(tmp_path):
    """Sec. 4: one document per image, all its captions; targets sum to one; an image without a known word has none."""
    animals, streets = ["the dog runs over grass", "brown dog and grass"], ["a bus on the street", "street with bus and cars"]
    train = captioned(*(animals if n % 2 else streets for n in range(40)), ["this is the one and only"])
    val = captioned(["dog on the grass"], ["a purple zebra yawns"], ["bus in the street"])
    labels = labels_in(tmp_path, train, val, "--labels", "lda", "--num-labels", 2)
    rows, val_rows = labels.train.toarray(), labels.val.toarray()
    np.testing.assert_allclose(rows.sum(1), [1] * 40 + [0], atol=1e-6)
    np.testing.assert_allclose(val_rows.sum(1), [1, 0, 1], atol=1e-6)
    dog, bus = rows[1].argmax(), rows[0].argmax()
    assert dog != bus and (rows[1:40:2, dog] > 0.7).all() and (rows[:40:2, bus] > 0.7).all()
    assert val_rows[0, dog] > 0.6 and val_rows[2, bus] > 0.6
    assert {"dog", "grass"} <= set(labels.names[dog].split(", ")) and {"bus", "street"} <= set(labels.names[bus].split(", "))
    assert all(len(name.split(", ")) == 5 for name in labels.names) and not {"the", "on", "and"} & {word for name in labels.names for word in name.split(", ")}


def test_topics_of_more_images_than_fit_in_a_batch():
    """Sec. 4: beyond the first 1024 images, each row is the posterior of its own image."""
    train = captioned(*(["the dog runs over grass"] if n % 3 else ["a bus on the street"] for n in range(1100)))
    labels = tp.lda_labels(arguments("--labels", "lda", "--num-labels", 2), train, captioned(["dog runs"]), None, CPU, passes=1)
    rows = labels.train.toarray()
    assert rows.shape == (1100, 2) and rows[0].argmax() != rows[1].argmax()
    assert all(np.allclose(row, rows[min(n % 3, 1)], atol=1e-3) for n, row in enumerate(rows))


def test_tokens_of_an_image_are_those_of_all_its_captions(tmp_path):
    """VirTex Sec. 4.2: the set of the captions' tokens, lower case without accents; special and unknown ones are none."""
    train = captioned(["A café table", "two dogs run"], ["two dogs, two cats"])
    val = captioned(["TWO café dogs Ω"], ["Ω ω Ψ and some Ω Ω"])
    labels = labels_in(tmp_path, train, val, "--labels", "tokens")
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert labels.names == [tokenizer.id_to_piece(token) for token in range(4, tokenizer.get_piece_size())]
    literal = lambda *captions: {tokenizer.id_to_piece(token) for caption in captions for token in tokenizer.encode(caption) if token > 3}
    assert words_of_rows(labels, labels.train) == [literal("a cafe table", "two dogs run"), literal("two dogs, two cats")]
    assert words_of_rows(labels, labels.val)[0] == literal("two cafe dogs ω")
    assert 0 in tokenizer.encode("ω") and not {"[MASK]", "[SOS]", "[EOS]", "<unk>"} & set(labels.names)


def tagged_data(names, *images):
    data = common.CaptionData(common.ImageFiles(), names)
    for n, tags in enumerate(images):
        data.add(f"{n}.jpg", [], tags)
    return data


def test_instances_are_the_annotated_tags(tmp_path):
    """Sec. 4, TP-Label: the tags of each image, and no caption is needed."""
    labels = labels_in(tmp_path, tagged_data(["dog", "cat", "cow"], [0, 2], [1], []), tagged_data(["dog", "cat", "cow"], [2]), "--labels", "instances")
    assert labels.names == ["dog", "cat", "cow"]
    assert labels.train.toarray().tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]] and labels.val.toarray().tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("train, val", ((None, None), (["dog"], None), (["dog", "cat"], ["cat", "dog"])))
def test_instances_need_the_same_tags_in_both_splits(train, val, tmp_path):
    """One clear line when a split has no tags, or others."""
    with pytest.raises(SystemExit, match="--labels instances needs tags, the same in both splits"):
        labels_in(tmp_path, tagged_data(train, [0] if train else []), tagged_data(val, [0] if val else []), "--labels", "instances")


def test_an_image_without_label_is_left_out_and_counted(capsys):
    """DESIGN 5.2: images and rows stay side by side; nothing is said when all have a label."""
    rows = sparse.csr_array(np.array([[1, 1], [0, 0], [0, 0.5], [0, 0]], np.float32))
    images, kept = tp.with_labels(common.ImageFiles("abcd"), rows, "train")
    assert list(images) == ["a", "c"] and kept.toarray().tolist() == [[1, 1], [0, 0.5]]
    assert capsys.readouterr().out == "2 of 4 images of the split train have no label and are left out\n"
    scenes, _ = tp.with_labels(shapes.ShapeImages([7, 8]), kept, "train")
    assert list(scenes.index) == [7, 8] and capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="no image of the split val has a label"):
        tp.with_labels(common.ImageFiles("ab"), sparse.csr_array(np.zeros((2, 3), np.float32)), "val")


# ------------------------------------------------------------------------------------------ labels.npz

OTHER = {"labels": "tokens", "pos": "nn", "num_labels": 7, "tagger": "spacy", "lm": "other", "lm_iters": 7, "seed": 1}


class Rebuilt(Exception):
    pass


def rebuilt(*_):
    raise Rebuilt


BUILDERS = ("postag_labels", "cluster_labels", "lda_labels", "token_labels", "instance_labels")


def test_labels_are_made_once(tmp_path, monkeypatch):
    """DESIGN 5.2: the second call reads labels.npz; any other caption, tag or flag that labels depend on makes them anew."""
    train, val = captioned(["a dog runs"], ["a red cat"]), captioned(["the dog runs"])
    first = labels_in(tmp_path, train, val)
    for builder in BUILDERS:
        monkeypatch.setattr(tp, builder, rebuilt)
    for flags in ((), ("--lr", 7), ("--arch", "resnet50"), ("--batch-size", 4), ("--workers", 0), ("--image-size", 32), ("--output", "elsewhere"), ("--root", "moved")):
        again = labels_in(tmp_path, train, val, *flags)
        assert again.names == first.names and all((one != other).nnz == 0 for one, other in zip(again[1:], first[1:]))
    assert set(OTHER) == set(tp.LABEL_FLAGS)
    for flag, value in OTHER.items():
        args = arguments()
        setattr(args, flag, value)
        with pytest.raises(Rebuilt):
            tp.cached_labels(args, train, val, SimpleNamespace(folder=tmp_path), CPU)
    others = captioned(["a dog sits"], ["a red cat"]), captioned(["a dog runs", "a red cat"], []), tagged_data(["x"], [0], [])
    for other in others:  # another word, the same captions of another image, tags
        for data in ((other, val), (train, other)):
            with pytest.raises(Rebuilt):
                labels_in(tmp_path, *data, *(["--labels", "instances"] if other.tag_names else []))


def test_labels_come_back_exactly(tmp_path, monkeypatch):
    """labels.npz: probabilities, empty rows, names in any script and of any length, types and shapes."""
    rng = np.random.default_rng(0)
    dense = lambda n: (rng.random((n, 5)) * (rng.random((n, 5)) < 0.4)).astype(np.float32) * (np.arange(n) % 3 > 0)[:, None]
    made = tp.Labels(["▁left", "", "a | b, c", "собака", "x" * 500], sparse.csr_array(dense(9)), sparse.csr_array(dense(4)))
    monkeypatch.setattr(tp, "lda_labels", lambda *_: made)
    labels_in(tmp_path, captioned(["a dog runs"]), captioned(["a dog runs"]), "--labels", "lda")
    monkeypatch.setattr(tp, "lda_labels", rebuilt)
    read = labels_in(tmp_path, captioned(["a dog runs"]), captioned(["a dog runs"]), "--labels", "lda")
    assert read.names == made.names
    for one, other in zip(made[1:], read[1:]):
        assert one.shape == other.shape and one.dtype == other.dtype == np.float32 and (one.toarray() == other.toarray()).all()
        assert (other[[2, 1]].toarray() == one.toarray()[[2, 1]]).all() and (one.sum(1) == other.sum(1)).all()


# ------------------------------------------------------------------------------------------ samples and batches


def test_left_and_right_change_places_in_the_mirrored_photo():
    """Mirrored photos have the label right for left; all other labels, and all labels of other photos, stay."""
    names, targets = ["dog", "left", "leftover", "right"], sparse.csr_array(np.array([[1, 1, 0, 0], [1, 0, 1, 1], [0, 1, 0, 1], [0.3, 0.7, 0, 0]], np.float32))
    order = language.mirrored_labels(names)
    sample = lambda index, mirrored: {"image": np.zeros((1, 1, 3), np.uint8), "jitter": np.zeros(4, np.float32), "index": index, "mirrored": mirrored, "unreadable": []}
    samples = [sample(i, m) for i in (2, 0, 1, 3) for m in (True, False)]
    batch = tp.collate(samples, targets, order)
    expected = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1], [0.3, 0, 0, 0.7], [0.3, 0.7, 0, 0]])
    assert torch.equal(batch["targets"], expected)
    assert (targets.toarray()[0] == [1, 1, 0, 0]).all()  # the labels themselves are not touched
    assert "targets" not in tp.collate(samples)


def test_which_labels_change_places():
    """Whole words and SentencePiece's whole words left and right; not one without the other, nor parts of words."""
    order = lambda *names: language.mirrored_labels(list(names)).tolist()
    assert order("right", "dog", "left") == [2, 1, 0]
    assert order("▁left", "left", "▁right", "right") == [2, 3, 0, 1]
    assert order("left", "dog", "bright") == [0, 1, 2] and order("left", "▁right") == [0, 1]


def test_a_mirrored_sample_says_so():
    """What is marked as mirrored is the photo mirrored, all else is not; the seed, epoch and index decide, nothing else."""
    args = arguments("--image-size", 16, "--crop-min", 1.0, "--colour-jitter", 0)
    view, seen = tp.TagView(shapes.ShapeImages(range(5)), args), set()
    for epoch in range(8):
        for index in range(5):
            sample, whole = view[epoch, index], common.read_crop(view.images, index, common.centre_crop(1.0), 16)[0]
            assert (sample["image"] == (whole[:, ::-1] if sample["mirrored"] else whole)).all() and sample["index"] == index
            assert (sample["jitter"] == [1, 1, 1, 0]).all() and not sample["unreadable"]
            assert (sample["image"] == view[epoch, index]["image"]).all()
            seen.add((index, bool(sample["mirrored"])))
    assert len(seen) == 10


def test_validation_photos_are_centred(tmp_path):
    """Not in training: the central square as it is, whatever --crop-min and --colour-jitter; a bad photo has the next one's labels."""
    args = arguments("--image-size", 16)
    view = tp.TagView(shapes.ShapeImages(range(3)), args, training=False)
    for index in range(3):
        sample = view[index]
        assert (sample["image"] == common.read_crop(view.images, index, common.centre_crop(1.0), 16)[0]).all()
        assert (sample["jitter"] == [1, 1, 1, 0]).all() and not sample["mirrored"]
    (tmp_path / "bad.jpg").write_bytes(b"no photo")
    shapes.draw_scene(3).save(tmp_path / "good.png")
    sample = tp.TagView(common.ImageFiles([str(tmp_path / "bad.jpg"), str(tmp_path / "good.png")]), args, training=False)[0]
    assert tp.collate([sample], sparse.csr_array(np.eye(2, dtype=np.float32)), np.arange(2))["targets"].tolist() == [[0, 1]]
    assert tp.collate([sample])["unreadable"] == [0]


# ------------------------------------------------------------------------------------------ scores


def slow_average_precision(right, scores):
    """sklearn's definition: sum over thresholds of (R_n - R_{n-1}) P_n; equal scores are one threshold."""
    total, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [r for r, s in zip(right, scores) if s >= threshold]
        precision, recall = sum(chosen) / len(chosen), sum(chosen) / sum(right)
        total, recall_before = total + (recall - recall_before) * precision, recall
    return total


def slow_scores(scores, right):
    top1 = top5 = 0
    for row, truth in zip(scores, right):
        ranked = sorted(range(len(row)), key=lambda k: (-row[k], k))
        top1 += truth[ranked[0]]
        top5 += any(truth[k] for k in ranked[:5])
    columns = [k for k in range(len(scores[0])) if any(truth[k] for truth in right)]
    precision = [slow_average_precision([truth[k] for truth in right], [row[k] for row in scores]) for k in columns]
    return {"top1": 100 * top1 / len(scores), "top5": 100 * top5 / len(scores), "mAP": 100 * sum(precision) / len(precision)}


def test_scores_written_out():
    """top1 and top5 of images, mAP over the labels that occur, images of equal score and labels that never occur among them."""
    rng = np.random.default_rng(0)
    scores, targets = rng.integers(0, 6, (30, 9)) + 0.01 * np.arange(9), (rng.random((30, 9)) < 0.15).astype(np.float32)
    targets[:, 4] = 0
    expected = slow_scores(scores.tolist(), (targets > 0).tolist())
    assert 5 < expected["top1"] < 60 and expected["top1"] < expected["top5"] < 95
    assert tp.tag_scores(scores, sparse.csr_array(targets), "postag") == pytest.approx(expected, abs=1e-9)


def test_scores_of_topics_and_rotations():
    """lda: topics of a tenth or more are right ones; rotation: top1 alone; no label at all: no mAP."""
    rng = np.random.default_rng(0)
    scores, targets = rng.random((20, 7)).astype(np.float32), rng.dirichlet([0.3] * 7, 20).astype(np.float32)
    targets[0, 0], targets[1, 0] = 0.1, 0.0999
    assert tp.tag_scores(scores, sparse.csr_array(targets), "lda") == pytest.approx(slow_scores(scores.tolist(), (targets >= np.float32(0.1)).tolist()), abs=1e-9)
    turned = tp.tag_scores(np.eye(4)[[0, 1, 2, 2]], sparse.csr_array(np.eye(4)), "rotation")
    assert turned == {"top1": 75.0}
    assert tp.tag_scores(scores, sparse.csr_array((20, 7)), "postag") == {"top1": 0.0, "top5": 0.0}


def test_scores_of_label_frequencies():
    """By frequencies alone: top1 is the share of images with the most frequent label, each AP is the share of its label."""
    rng = np.random.default_rng(0)
    targets = (rng.random((40, 8)) < np.linspace(0.7, 0.05, 8)).astype(np.float32)
    share = targets.mean(0)
    scores = tp.tag_scores(np.tile(share, (40, 1)), sparse.csr_array(targets), "postag")
    assert scores == pytest.approx({"top1": 100 * share.max(), "top5": 100 * targets[:, np.argsort(-share)[:5]].any(1).mean(), "mAP": 100 * share.mean()}, abs=1e-4)


@pytest.mark.parametrize("labels", ("postag", "lda", "rotation"))
def test_validation_is_over_all_photos(labels):
    """Loss and scores of the whole split, in eval mode, equal those of the photos one by one; training goes on after it."""
    torch.manual_seed(0)
    args, rng, model = arguments("--image-size", 32, "--workers", 0, "--labels", labels), np.random.default_rng(0), tp.TagPredictor("resnet18", 6 if labels != "rotation" else 4)
    rows = (rng.random((70, 6)) < 0.3).astype(np.float32) + np.eye(6, dtype=np.float32)[rng.integers(0, 6, 70)] / (2 if labels == "lda" else 1)
    rows = rows.clip(max=1) if labels != "lda" else rows / rows.sum(1, keepdims=True)
    view, targets = tp.TagView(shapes.ShapeImages(range(70)), args, training=False), None if labels == "rotation" else sparse.csr_array(rows)
    result = tp.validate(model.train(), view, targets, args, CPU)
    assert model.training and model.backbone.bn1.num_batches_tracked == 0

    losses, scores, wanted = [], [], []
    model.eval()
    for n in range(70):
        pixels, row = common.augment(torch.from_numpy(view[n]["image"])[None]), torch.from_numpy(rows[n : n + 1])
        if labels == "rotation":
            pixels, row = tp.four_rotations(pixels)
        with torch.no_grad():
            logits = model(pixels)
        losses.append(tp.label_loss(logits, row, labels).item())
        scores, wanted = scores + logits.tolist(), wanted + row.tolist()
    assert result.pop("loss") == pytest.approx(np.mean(losses), rel=1e-4)
    expected = slow_scores(scores, (np.array(wanted) >= (0.1 if labels == "lda" else 0.5)).tolist())
    assert result.keys() == ({"top1"} if labels == "rotation" else {"top1", "top5", "mAP"})
    assert result == pytest.approx({name: expected[name] for name in result}, abs=0.5)


# ------------------------------------------------------------------------------------------ recipes of App. F.1

RESNET = {"arch": "resnet50", "optimizer": "sgd", "lr": 3e-2, "weight_decay": 1e-4, "batch_size": 128, "iters": 100_000, "steps": [], "image_size": 224}
VGG = {"arch": "vgg16", "optimizer": "radam", "lr": 1e-4, "weight_decay": 1e-3, "batch_size": 128, "iters": 100_000, "steps": [0.8, 0.9], "image_size": 224}
ROTNET = {**VGG, "lr": 1e-3, "weight_decay": 1e-5, "iters": 120_000, "steps": [5 / 6, 11 / 12]}
BERT = "bert-base-uncased"


@pytest.mark.parametrize(
    "flags, recipe, num_labels, lm",
    [
        ([], RESNET, 5000, BERT),  # Sec. 4.3: postag, 5K
        (["--labels", "cluster"], RESNET, 1000, BERT),
        (["--labels", "lda"], RESNET, 40, BERT),
        (["--labels", "tokens"], RESNET, 10_000, BERT),
        (["--labels", "instances"], RESNET, None, BERT),
        (["--arch", "vgg16"], VGG, 1000, BERT),  # Tab. 2: 1K and 10K
        (["--arch", "vgg16", "--labels", "cluster"], VGG, 1000, BERT),
        (["--arch", "vgg16", "--labels", "lda"], VGG, 40, BERT),
        (["--arch", "vgg16", "--labels", "instances"], VGG, None, BERT),
        (["--labels", "rotation"], ROTNET, None, None),
        (["--arch", "vgg16", "--labels", "rotation"], ROTNET, None, None),
    ],
)
def test_recipes_of_the_paper(flags, recipe, num_labels, lm):
    """App. F.1 and Tab. 2 on real data, whichever: optimiser, learning rate, weight decay, batch, length, steps, K, language model."""
    for data in ("coco", "vg", "photos.jsonl"):
        args = arguments("--data", data, *flags)
        assert {name: getattr(args, name) for name in recipe} == recipe
        assert (args.num_labels, args.lm, args.warmup, args.pos, args.tagger) == (num_labels, lm, 0.0, "nn+adj+vb", "textblob")


def test_defaults_on_shapes_and_the_user_s_flags():
    """No flag at all: a small ResNet on shapes, a small language model; a flag that the user gives always wins."""
    args = arguments()
    assert (args.data, args.arch, args.labels, args.optimizer, args.lm, args.steps) == ("shapes", "resnet18", "postag", "radam", "scratch", [0.8])
    given = {
        "arch": "vgg16", "labels": "cluster", "lr": 0.7, "weight_decay": 0.0, "iters": 3, "batch_size": 8, "optimizer": "radam", "num_labels": 9, "lm": "folder",
        "lm_iters": 5, "image_size": 32, "crop_min": 0.5, "colour_jitter": 0.0, "warmup": 0.1, "validate_every": 2, "checkpoint_every": 1, "log_every": 1,
        "probe_images": 5, "pos": "nn", "tagger": "spacy",
    }  # fmt: skip
    for data in ("shapes", "coco"):
        flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
        args = arguments("--data", data, *flags, "--steps", 0.3, 0.6)
        assert {name: getattr(args, name) for name in given} == given and args.steps == [0.3, 0.6]


def test_steps_are_radam_s_alone():
    """App. F.1: SGD follows a cosine, also for VGG-16; another optimiser than the recipe's needs its own --lr."""
    assert arguments("--data", "coco", "--arch", "vgg16", "--optimizer", "sgd", "--lr", 0.01).steps == []
    assert arguments("--data", "coco", "--optimizer", "radam", "--lr", 1e-4, "--steps", 0.5).steps == [0.5]
    for flags in (("--arch", "vgg16", "--optimizer", "sgd"), ("--optimizer", "radam")):
        with pytest.raises(SystemExit, match="needs its --lr"):
            arguments("--data", "coco", *flags)


@pytest.mark.parametrize("flags, lr", ((["--data", "coco"], 3e-2), (["--data", "coco", "--arch", "vgg16"], 1e-4), ([], tp.DEFAULTS["lr"][0])))
def test_another_batch_scales_the_learning_rate(flags, lr, capsys):
    """DESIGN 3: linearly, and what was chosen is printed; --lr is taken literally."""
    usual = arguments(*flags).batch_size
    assert arguments(*flags).lr == lr and capsys.readouterr().out == ""
    assert arguments(*flags, "--batch-size", 4 * usual).lr == pytest.approx(4 * lr) and f"--lr {4 * lr:g}" in capsys.readouterr().out
    assert arguments(*flags, "--batch-size", usual // 2).lr == pytest.approx(lr / 2)
    capsys.readouterr()
    assert arguments(*flags, "--batch-size", usual // 2, "--lr", 0.3).lr == 0.3 and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "flags, factors",
    [
        (["--arch", "vgg16"], {0: 1, 79_999: 1, 80_000: 0.1, 89_999: 0.1, 90_000: 0.01, 99_999: 0.01}),
        (["--labels", "rotation"], {0: 1, 99_999: 1, 100_000: 0.1, 109_999: 0.1, 110_000: 0.01, 119_999: 0.01}),
        ([], {0: 1, 25_000: 0.5 * (1 + math.cos(math.pi / 4)), 50_000: 0.5, 75_000: 0.5 * (1 - math.cos(math.pi / 4)), 100_000: 0}),
        (["--warmup", 0.02], {0: 0, 1000: 0.5, 2000: 1, 51_000: 0.5, 100_000: 0}),
        (["--arch", "vgg16", "--warmup", 0.02], {0: 0, 500: 0.25, 2000: 1, 79_999: 1, 80_000: 0.1}),
        (["--arch", "vgg16", "--steps"], {0: 1, 99_999: 1}),
    ],
)
def test_learning_rates_of_the_paper(flags, factors):
    """App. F.1: a tenth after 80K and 90K of 100K iterations, 100K and 110K of 120K (rotation); a cosine for ResNets."""
    args = arguments("--data", "coco", *flags)
    found = {iteration: common.learning_rate_factor(args, iteration, args.iters) for iteration in factors}
    assert found == pytest.approx(factors, rel=1e-9, abs=1e-12)


def test_sgd_of_the_paper():
    """App. F.1: momentum 0.9 and weight decay, two steps written out."""
    parameter, gradients = nn.Parameter(torch.tensor([1.0, -2.0])), ([0.5, 1.0], [-1.0, 0.25])
    optimizer = common.build_optimizer(arguments("--data", "coco"), [parameter])
    value, velocity = [1.0, -2.0], [0.0, 0.0]
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        velocity = [0.9 * v + g + 1e-4 * p for v, g, p in zip(velocity, gradient, value)]
        value = [p - 3e-2 * v for p, v in zip(value, velocity)]
        assert parameter.tolist() == pytest.approx(value, rel=1e-6)


def test_radam_of_the_paper():
    """App. F.1, Liu et al. 2020: Alg. 2 written out over ten steps, the first five without the adaptive rate; decoupled weight decay."""
    args = arguments("--data", "coco", "--arch", "vgg16")
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer, p, m, v = common.build_optimizer(args, [parameter]), 1.0, 0.0, 0.0
    limit, adaptive = 2 / (1 - 0.999) - 1, 0
    for t in range(1, 11):
        g = math.sin(3.0 * t)
        parameter.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        p -= 1e-4 * 1e-3 * p
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        length = limit - 2 * t * 0.999**t / (1 - 0.999**t)
        if length > 5:
            adaptive += 1
            rectify = math.sqrt((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length))
            p -= 1e-4 * rectify * m / (1 - 0.9**t) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        else:
            p -= 1e-4 * m / (1 - 0.9**t)
        assert parameter.item() == pytest.approx(p, abs=1e-10)
    assert 0 < adaptive < 10


# ------------------------------------------------------------------------------------------ heads


def test_head_of_a_resnet():
    """Sec. 4.3: the mean over the grid, then an MLP of two layers."""
    torch.manual_seed(0)
    head, features = common.tag_head("resnet50", 6, 4), torch.randn(3, 6, 2, 5)
    first, last = (module for module in head if isinstance(module, nn.Linear))
    for image, scores in zip(features, head(features)):
        pooled = sum(image[:, i, j] for i in range(2) for j in range(5)) / 10
        hidden = torch.stack([(w @ pooled + b).clamp(min=0) for w, b in zip(first.weight, first.bias)])
        torch.testing.assert_close(scores, torch.stack([w @ hidden + b for w, b in zip(last.weight, last.bias)]))
    assert scores.shape == (4,)


def test_head_of_vgg16():
    """Sec. 4, Networks: a CNN of four layers that keeps the grid, then its mean and one linear layer."""
    torch.manual_seed(0)
    head, features = common.tag_head("vgg16", 6, 4).eval(), torch.randn(3, 6, 2, 3)
    convolutions = [module for module in head if isinstance(module, nn.Conv2d)]
    norms = [module for module in head if isinstance(module, nn.BatchNorm2d)]
    (last,) = (module for module in head if isinstance(module, nn.Linear))
    assert len(convolutions) == 4
    x = features
    for convolution, norm in zip(convolutions, norms, strict=True):
        x = norm(convolution(x)).clamp(min=0)
        assert x.shape == features.shape
    torch.testing.assert_close(head(features), x.mean((2, 3)) @ last.weight.T + last.bias)


@pytest.mark.parametrize("arch", ("resnet18", "vgg16"))
def test_the_model_is_backbone_and_head(arch):
    """tp(phi(I)): (B, 3, h, w) -> (B, K); the backbone is common's, and everything is trained."""
    model = tp.TagPredictor(arch, 11).eval()
    images = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        scores = model(images)
        torch.testing.assert_close(scores, model.head(model.backbone(images)))
    assert scores.shape == (2, 11) and model.backbone.state_dict().keys() == common.build_backbone(arch).state_dict().keys()
    assert all(parameter.requires_grad for parameter in model.parameters())


# ------------------------------------------------------------------------------------------ language models

RHYMES = ["a red dog runs fast", "two men ride a bike", "the black cat sits on its mat", "one old bird sings"]


def frozen_model(folder, **kwargs):
    return language.language_model(arguments("--lm", folder), None, None, CPU, **kwargs)


@pytest.fixture(scope="module")
def scratch_folder(tmp_path_factory):
    """The folder of a language model trained on four captions until it knows them."""
    folder = tmp_path_factory.mktemp("scratch") / "language_model"
    language.train_language_model(common.PackedStrings(5 * RHYMES), folder, 60, 0, CPU, "off", {}, batch_size=16)
    return folder


def test_scratch_language_model_is_a_transformers_folder(scratch_folder):
    """--lm scratch: transformers loads it as it loads BERT; [CLS] stands before each caption and [SEP] behind it."""
    import transformers

    tokenizer, model = transformers.AutoTokenizer.from_pretrained(scratch_folder), transformers.AutoModelForMaskedLM.from_pretrained(scratch_folder)
    assert model.config.model_type == "bert" and model.config.vocab_size == len(tokenizer)
    tokens = [tokenizer.convert_ids_to_tokens(row) for row in tokenizer(["A red dog", "two men ride a bike"], padding=True)["input_ids"]]
    assert tokens == [["[CLS]", "a", "red", "dog", "[SEP]", "[PAD]", "[PAD]"], ["[CLS]", "two", "men", "ride", "a", "bike", "[SEP]"]]
    assert not (scratch_folder.parent / "language_model.tmp").exists()


def test_scratch_language_model_learns(scratch_folder):
    """It names a masked word from the words around it, and from [CLS] the tokens of the caption."""
    tokenizer, model = frozen_model(scratch_folder)
    masked = tokenizer([RHYMES[0].replace("dog", tokenizer.mask_token)], return_tensors="pt")
    logits, place = model(**masked).logits[0], (masked["input_ids"][0] == tokenizer.mask_token_id).nonzero().item()
    assert tokenizer.convert_ids_to_tokens(logits[place].argmax().item()) == "dog"
    for caption in RHYMES:
        inputs = tokenizer([caption], return_tensors="pt")
        assert inputs["input_ids"][0, 0] == tokenizer.cls_token_id
        words = set(inputs["input_ids"][0].tolist()) - set(tokenizer.all_special_ids)
        assert set(model(**inputs).logits[0, 0].topk(len(words)).indices.tolist()) == words


def test_language_model_is_frozen(tiny_bert, scratch_folder):
    """Sec. 3.1: psi is pretrained and stays as it is: in eval mode, no parameter is trained."""
    for folder in (tiny_bert, scratch_folder):
        _, model = frozen_model(folder)
        assert not model.training and not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_scratch_language_model_is_trained_once(scratch_folder, tmp_path, monkeypatch):
    """--lm scratch keeps its model in the folder, until it would be made of other things; the same seed gives the same weights."""
    captions = common.PackedStrings(RHYMES)

    def state(name, *flags):
        args = arguments("--labels", "cluster", "--lm", "scratch", "--lm-iters", 2, *flags)
        return language.language_model(args, captions, tmp_path / name, CPU)[1].state_dict()

    torch.manual_seed(5)
    first = state("one")
    torch.manual_seed(6)
    again, other = state("two"), state("three", "--seed", 1)
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert any(not torch.equal(value, other[name]) for name, value in first.items())
    monkeypatch.setattr(language, "train_language_model", rebuilt)
    assert all(torch.equal(value, first[name]) for name, value in state("one", "--lr", 7).items())
    for name, *flags in (("four",), ("one", "--seed", 1), ("one", "--lm-iters", 3)):
        with pytest.raises(Rebuilt):
            state(name, *flags)
    captions = common.PackedStrings(RHYMES[1:])
    with pytest.raises(Rebuilt):
        state("one")


def test_caption_vectors_do_not_depend_on_the_batch(tiny_bert):
    """Captions of different length side by side: each has the vector that it has alone; batches end where they end."""
    tokenizer, model = frozen_model(tiny_bert)
    captions, vectors = common.PackedStrings(SENTENCES[:7]), np.zeros((7, 16), np.float32)
    language.embed_captions(tokenizer, model, captions, vectors, CPU, "off", batch_size=3)
    np.testing.assert_allclose(vectors, [literal_cls(tiny_bert, sentence) for sentence in SENTENCES[:7]], atol=1e-5)


def test_an_encoder_alone_makes_clusters(tiny_bert, tmp_path):
    """Sec. 3.1 asks for [CLS] vectors only: a BERT without an output layer has the same ones; where words are predicted it is refused."""
    import transformers

    transformers.AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    transformers.BertModel.from_pretrained(tiny_bert, add_pooling_layer=True).save_pretrained(tmp_path)
    captions, found = common.PackedStrings(SENTENCES[:3]), []
    for folder in (tiny_bert, tmp_path):
        vectors = np.zeros((3, 16), np.float32)
        language.embed_captions(*frozen_model(folder, masked_words=False), captions, vectors, CPU, "off")
        found.append(vectors)
    assert (found[0] == found[1]).all() and found[0].any()
    with pytest.raises(SystemExit, match="is not a whole masked language model: it lacks cls.predictions"):
        frozen_model(tmp_path)


def test_a_long_caption_is_cut(tiny_bert):
    """A caption of more tokens than the model has positions is truncated, not an error."""
    tokenizer, model = frozen_model(tiny_bert)
    vectors = np.zeros((2, 16), np.float32)
    language.embed_captions(tokenizer, model, common.PackedStrings(["red dog " * 70, "red dog " * 31]), vectors, CPU, "off")
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)


@pytest.mark.parametrize("name", ("missing", "empty", "no-weights", "no-organisation-here/no-model-here"))
def test_a_language_model_that_is_not_there(name, tiny_bert, tmp_path, monkeypatch):
    """--lm of a missing folder, an empty one, one without weights, or an unknown name ends with one line that names it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-weights").mkdir()
    for path in tiny_bert.iterdir():
        if path.suffix == ".json":
            (tmp_path / "no-weights" / path.name).write_bytes(path.read_bytes())
    wanted = name if "/" in name else str(tmp_path / name)
    with pytest.raises(SystemExit) as stopped:
        frozen_model(wanted)
    assert (f"--lm {wanted}: no such folder" if name == "missing" else f"--lm {wanted} cannot be loaded") in str(stopped.value)
    assert "\n" not in str(stopped.value)


def test_the_same_seed_gives_the_same_clusters(tiny_bert, tmp_path):
    """Labels are a function of the captions and the seed: what a killed run builds anew is what it had."""
    train, val, made = captioned(*([SENTENCES[n], SENTENCES[-n]] for n in range(1, 12))), captioned([SENTENCES[0]]), []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(labels_in(tmp_path / name, train, val, "--labels", "cluster", "--lm", tiny_bert, "--num-labels", 4))
    assert made[0].names == made[1].names and (made[0].train != made[1].train).nnz == 0 and (made[0].val != made[1].val).nnz == 0
