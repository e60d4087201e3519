#!/usr/bin/env bash
# The tables of multimodal contrastive training (CVPR 2021), row by row: how to train and measure each, and what the paper prints.
#
#     bash papers/contrastive.sh                               # all rows, one after the other
#     bash papers/contrastive.sh backtranslations.jsonl ours   # only these runs, and what is measured of them
#
# Behind a row are its name and the numbers that the paper prints, in the order of the heading's columns:
# "figure" where the number is only in a figure, "-" where there is none. Our score is in the result.json
# of OUT/RUN/MEASURE. A run's command stands at the first row that has it. What has its result is not
# repeated, an interrupted run goes on, and a row that fails does not stop the others. docs/evaluation.md
# says which data they need. We have run none of these rows at the paper's size.
#
# MoCo is trained as by its code: batches of 256, 65,536 keys; v1 has a linear head, tau 0.07, steps and an
# augmentation of its own. Figs. 1, 2, 3 are illustrations.

cd "$(dirname "$0")/.." || exit
. papers/functions.sh  # once, best, report and the measures

# ----- Contrastive Tab. 1: Linear classification | IN-1K top-1
# Not of this protocol: VirTex (52.8 in the first version of its paper, 53.8 now), ICMLM (from its paper), probably IN-Sup on IN-1K
# (76.1 is the accuracy of torchvision's own classifier).
# MoCo-v2 has its own hyper-parameters (Sec. 4.2: "default"), as in Tabs. 2-4. Sec. 4.4 says 49.3 of J_ii alone, too, with those of
# this paper.
# IN-100: 100 images per class, drawn at random; the paper does not say how it was trained (here by torchvision's schedule), nor
# whether its 53.3 is the accuracy of that run or of a linear probe.
in1k-mct imagenet --arch resnet50  # IN-Sup, IN-1K | 76.1
once in-100 $RUN -m downstream.finetune --data folder --root "$DATA/imagenet" --weights random --arch resnet50 --epochs 90 --steps 30 60 --shots 100
in1k-mct in-100                    # IN-Sup, IN-100 | 53.3
once moco-v1 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --lambda-tag 0 --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 --temperature 0.07 --batch-size 256 --lr 0.03 --queue 65536 --moco-v1 --blur 0 --mlp-hidden 0 --steps 0.6 0.8
in1k-mct moco-v1                   # MoCo | 44.5
once moco-v2 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --lambda-tag 0 --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 --temperature 0.2 --batch-size 256 --lr 0.03 --queue 65536
in1k-mct moco-v2                   # MoCo-v2 | 49.3
once virtex $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000
best virtex; in1k virtex           # VirTex | 52.8
once tp python tp.py --data coco --root "$DATA/coco" --tagger spacy
once tfm $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth"
in1k-icmlm tfm                     # ICMLM-tfm | 51.9
once backtranslations.jsonl python tools/backtranslate.py --data coco --root "$DATA/coco"
once ours $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-tag 0
in1k-mct ours                      # Ours | 54.9
once ours-scratch $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-tag 0 --lm scratch
in1k-mct ours-scratch              # Ours (scratch) | 54.6
once ours-tag $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl"
in1k-mct ours-tag                  # Ours (with tag) | 55.3

# ----- Contrastive Tab. 2: Detection on VOC | VOC box AP/50/75
# Random Init and In-Sup are VirTex's (Tab. 3). MoCo and MoCo-v2 on IN-1K are from MoCo's code, means of five trials; VirTex
# measured 56.1 for MoCo. MoCo on COCO and VirTex (1000 epochs) are 0.1 to 0.5 from VirTex Tab. 3, which a run should meet: those
# here are perhaps of its first version.
# VirTex*: 10K iterations of warm-up, and early stopping, which the paper does not mention [ours].
voc random --arch resnet50       # Random Init | 33.8 / 60.2 / 33.1
voc imagenet --arch resnet50     # In-Sup, IN-1K | 54.3 / 81.6 / 59.7
voc moco-v1-in                   # MoCo, IN-1K | 55.9 / 81.5 / 62.6
voc moco-v2-in                   # MoCo-v2, IN-1K | 57.0 / 82.4 / 63.6
voc moco-v1                      # MoCo, COCO | 47.5 / 75.4 / 51.1
voc moco-v2                      # MoCo-v2, COCO | 48.4 / 75.5 / 52.1
voc virtex                       # VirTex, 1000 epochs | 55.6 / 81.4 / 61.5
once virtex-200 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 2000 --epochs 200 --warmup 0.108
best virtex-200; voc virtex-200  # VirTex*, 200 epochs | 54.8 / 80.2 / 60.9
voc ours                         # Ours | 55.6 / 80.8 / 61.9
voc ours-scratch                 # Ours (scratch) | 55.4 / 80.7 / 61.5
once ours-scratch-1000 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-tag 0 --lm scratch --epochs 1000
voc ours-scratch-1000            # Ours (scratch), 1000 epochs | 56.1 / 82.1 / 62.4
voc ours-tag                     # Ours (with tag) | 55.8 / 81.8 / 61.7

# ----- Contrastive Tab. 3: Instance segmentation on COCO | COCO box AP/50/75 | COCO mask AP/50/75
# Random Init, In-Sup, MoCo and VirTex (1000 epochs) are the numbers of VirTex Tab. 3.
coco random --arch resnet50    # Random Init | 36.7 / 56.7 / 40.0 | 33.7 / 53.8 / 35.9
coco imagenet --arch resnet50  # In-Sup, IN-1K | 41.1 / 62.0 / 44.9 | 37.2 / 59.1 / 40.0
coco moco-v1-in                # MoCo, IN-1K | 40.8 / 61.6 / 44.7 | 36.9 / 58.4 / 39.7
coco moco-v2-in                # MoCo-v2, IN-1K | 41.5 / 62.2 / 45.7 | 37.4 / 59.6 / 40.5
coco moco-v1                   # MoCo, COCO | 38.5 / 58.5 / 42.0 | 35.0 / 55.6 / 37.5
coco moco-v2                   # MoCo-v2, COCO | 39.8 / 59.6 / 43.1 | 35.8 / 56.9 / 38.8
coco virtex                    # VirTex, 1000 epochs | 40.9 / 61.7 / 44.8 | 36.9 / 58.4 / 39.7
coco virtex-200                # VirTex*, 200 epochs | 39.6 / 60.9 / 44.0 | 36.0 / 57.6 / 38.9
coco ours                      # Ours | 41.1 / 61.8 / 44.9 | 36.9 / 58.2 / 40.0
coco ours-tag                  # Ours (with tag) | 41.2 / 61.9 / 44.9 | 37.1 / 58.9 / 40.1

# ----- Contrastive Tab. 4: Cross-modal search on COCO | image to text R@1 / R@10 / Med r | text to image R@1 / R@10 / Med r
# The paper does not say whether MoCo-v2 was trained on ImageNet or on COCO: here on COCO.
retrieval imagenet --arch resnet50  # IN-sup | 57.9 / 92.7 / 1.0 | 42.8 / 87.0 / 2.0
retrieval moco-v2                   # MoCo-v2 | 51.6 / 90.0 / 1.0 | 39.0 / 84.8 / 2.0
retrieval virtex                    # VirTex | 58.1 / 93.0 / 1.0 | 44.0 / 88.5 / 2.0
retrieval ours                      # Ours | 58.4 / 93.4 / 1.0 | 45.1 / 90.0 / 2.0

# ----- Contrastive Tab. 5: Image tagging on Stock, or on data of your own | mIOU@5 / @10 / @15 / @20
# Stock is not public: 5.8M training photos, 50K test photos, 18,157 tags. stock.jsonl stands for data of your own, with titles,
# splits and tags. downstream.tagging keeps the 18,157 most frequent tags, as the paper does; stock-sup learns all tags of the file.
# Ours: without tags, as elsewhere; the paper does not say.
# The paper says neither with which loss nor for how long Stock-sup was trained. We use TP's: 100,000 iterations of 128 are 12.8M
# photos, 2.2 epochs; "Ours" sees 348M in 60 epochs. For as many add --iters 2718750.
once stock-sup python tp.py --recipe paper --data "$DATA/stock.jsonl" --labels instances
stock-tags stock-sup  # Stock-sup | 12.86 / 13.93 / 14.88 / 15.74
once stock-backtranslations.jsonl python tools/backtranslate.py --data "$DATA/stock.jsonl"
once stock $RUN mmcontrastive.py --recipe paper --data "$DATA/stock.jsonl" --backtranslations "$OUT/stock-backtranslations.jsonl" --lambda-tag 0 --queue 65536 --epochs 60
stock-tags stock      # Ours | 13.81 / 14.69 / 15.55 / 16.42

# ----- Contrastive Tab. 6: Cross-modal search on Stock, or on data of your own | image to text R@1 / R@10 / Med r | text to image R@1 / R@10 / Med r
# Ours: without tags, as in Tab. 5.
stock-retrieval stock-sup  # Stock-sup | 33.76 / 71.22 / 3 | 30.64 / 68.18 / 4
stock-retrieval stock      # Ours | 36.98 / 74.02 / 2 | 33.83 / 70.76 / 3

# ----- Contrastive Tab. 7: Cross-modal search without fine-tuning | image to text R@1 / R@10 / Med r | text to image R@1 / R@10 / Med r
# Among 1,000 photos that the seed draws from the validation split, in the result.json of the run; RS (random) is in that of `ours`.
# The paper does not say which 1,000 it used, nor whether Multimodal (here `ours`) was trained with tags: here without.
# RS | 0.1 / 1.0 / 650 | 0.1 / 1.0 / 500
once inter-modal $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-ii 0 --lambda-cc 0 --lambda-tag 0 --intra-dim 1024
# Inter-modal | 13.2 / 42.2 / 10.0 | 9.5 / 36.7 / 16.0
# Multimodal | 24.1 / 66.0 / 5.0 | 18.6 / 58.4 / 7.0

# ----- Contrastive Sec. 4.4: Ablations | IN-1K top-1
once unified-128 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-tag 0 --intra-dim 0 --inter-dim 128
in1k-mct unified-128    # unified MLPs, 128 | 49.6
once unified-1024 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-tag 0 --intra-dim 0 --inter-dim 1024
in1k-mct unified-1024   # unified MLPs, 1024 | 50.2
once unified-1152 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-tag 0 --intra-dim 0 --inter-dim 1152
in1k-mct unified-1152   # unified MLPs, 1152 | 52.3
once distinct-128 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-tag 0 --intra-dim 128 --inter-dim 128
in1k-mct distinct-128   # distinct MLPs, 128 | 53.6
once distinct-1024 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-tag 0 --intra-dim 1024 --inter-dim 1024
in1k-mct distinct-1024  # distinct MLPs, 1024 | 53.8
once distinct-1152 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --lambda-tag 0 --intra-dim 1152 --inter-dim 1152
in1k-mct distinct-1152  # distinct MLPs, 1152 | 53.9
in1k-mct ours           # distinct MLPs, 128 and 1024 | 54.9
once ii $RUN mmcontrastive.py --data coco --root "$DATA/coco" --lambda-tag 0 --lambda-cc 0 --lambda-ic 0 --lambda-ci 0
in1k-mct ii             # J_ii | 49.3
once ii-tag $RUN mmcontrastive.py --data coco --root "$DATA/coco" --lambda-cc 0 --lambda-ic 0 --lambda-ci 0
in1k-mct ii-tag         # J_ii + J_tag | 50.2
in1k-mct ours-tag       # all five losses | 55.3
once ours-nouns $RUN mmcontrastive.py --data coco --root "$DATA/coco" --backtranslations "$OUT/backtranslations.jsonl" --tags nouns-spacy
in1k-mct ours-nouns     # ... nouns as tags | 54.5

report
