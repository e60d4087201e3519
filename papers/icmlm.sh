#!/usr/bin/env bash
# The tables of ICMLM (ECCV 2020), row by row: how to train and measure each, and what the paper prints.
#
#     bash papers/icmlm.sh          # all rows, one after the other
#     bash papers/icmlm.sh tp tfm   # only these runs, and what is measured of them
#
# Behind a row are its name and the numbers that the paper prints, in the order of the heading's columns:
# "figure" where the number is only in a figure, "-" where there is none. Our score is in the result.json
# of OUT/RUN/MEASURE. A run's command stands at the first row that has it. What has its result is not
# repeated, an interrupted run goes on, and a row that fails does not stop the others. docs/evaluation.md
# says which data they need. We have run none of these rows at the paper's size.
#
# spaCy is the paper's tagger: pip install spacy; python -m spacy download en_core_web_sm. VGG-16
# starts from rotations [App. F.1]. TP runs in one process: its batch norm sees all 128 photos [App. F.1].
# "Masked words" and l_tp are in the run's own result.json (masked_words, validation). Fig. 2 is an illustration.

cd "$(dirname "$0")/.." || exit
. papers/functions.sh  # once, best, report and the measures

# ----- ICMLM Tab. 1: Proxy and target, VGG-16, 1K nouns and adjectives | masked words top-1 / top-5 | VOC val C-11 / C-12 / C-13
# VOC: the validation split. Masked words: in the run's result.json, which also has those of BERT alone.
once vgg-rotation-vg python tp.py --data vg --root "$DATA/vg" --arch vgg16_bn --labels rotation
once vgg-tfm-nn-adj-vg $RUN icmlm.py --data vg --root "$DATA/vg" --arch vgg16_bn --init "$OUT/vgg-rotation-vg/backbone.pth" --tagger spacy --pos nn+adj
# BERT, VG | 17.4 / 36.9 |
voc07-layers-val vgg-tfm-nn-adj-vg       # ICMLM-tfm, VG | 49.7 / 79.2 | 71.3 / 75.8 / 80.5
once vgg-att-fc-nn-adj-vg $RUN icmlm.py --data vg --root "$DATA/vg" --arch vgg16_bn --init "$OUT/vgg-rotation-vg/backbone.pth" --tagger spacy --pos nn+adj --head att-fc
voc07-layers-val vgg-att-fc-nn-adj-vg    # ICMLM-att-fc, VG | 41.1 / 71.3 | 73.7 / 78.7 / 83.1
once vgg-rotation-coco python tp.py --data coco --root "$DATA/coco" --arch vgg16_bn --labels rotation
once vgg-tfm-nn-adj-coco $RUN icmlm.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy --pos nn+adj
# BERT, COCO | 25.7 / 40.3 |
voc07-layers-val vgg-tfm-nn-adj-coco     # ICMLM-tfm, COCO | 70.3 / 91.5 | 70.2 / 74.2 / 77.5
once vgg-att-fc-nn-adj-coco $RUN icmlm.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy --pos nn+adj --head att-fc
voc07-layers-val vgg-att-fc-nn-adj-coco  # ICMLM-att-fc, COCO | 59.4 / 83.4 | 72.3 / 77.5 / 82.2

# ----- ICMLM Tab. 2: All methods, VGG-16 | VOC C-11 / C-12 / C-13 | IN-1K C-11 / C-12 / C-13 | Places C-11 / C-12 / C-13
# As printed; one is probably a slip: RotNet has the same three numbers on Places (COCO) and on IN-1K (VG).
# DeeperCluster's VGG-16 begins with a Sobel filter and has 2 input channels: our scripts cannot load its weights.
# S-ImageNet: means of four draws of images, hence the loop. We found no published weights: label_list.py draws the images, each
# with its class as its only tag. The paper does not say how it was trained; we train it like TP.
layers imagenet --arch vgg16_bn   # ImageNet | 77.5 / 81.0 / 84.7 | 59.8 / 65.7 / 71.8 | 43.0 / 43.5 / 47.3
for draw in 0 1 2 3; do
    once s-imagenet-1k-$draw.jsonl python papers/label_list.py --root "$DATA/imagenet" --per-class 100 --seed $draw
    once s-imagenet-1k-$draw python tp.py --recipe paper --arch vgg16_bn --labels instances --data "$OUT/s-imagenet-1k-$draw.jsonl" --val-split train --seed $draw
    layers s-imagenet-1k-$draw  # S-ImageNet, 1K classes | 69.3 / 72.4 / 74.1 | 50.5 / 52.5 / 53.8 | 40.9 / 41.6 / 41.1
    once s-imagenet-100-$draw.jsonl python papers/label_list.py --root "$DATA/imagenet" --per-class 1000 --classes 100 --seed $draw
    once s-imagenet-100-$draw python tp.py --recipe paper --arch vgg16_bn --labels instances --data "$OUT/s-imagenet-100-$draw.jsonl" --val-split train --seed $draw
    layers s-imagenet-100-$draw  # S-ImageNet, 100 classes | 67.4 / 69.6 / 70.5 | 47.4 / 48.4 / 46.3 | 39.3 / 39.3 / 35.8
done
once vgg-labels-coco python tp.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --labels instances
layers vgg-labels-coco            # TP-Label, COCO | 72.4 / 76.3 / 79.9 | 50.4 / 50.6 / 49.9 | 44.5 / 45.0 / 44.5
# DeeperCluster, YFCC | 71.4 / 73.3 / 73.1 | 48.0 / 48.8 / 45.1 | 43.1 / 44.1 / 41.0
layers vgg-rotation-coco          # RotNet, COCO | 60.3 / 61.1 / 58.6 | 41.8 / 40.1 / 33.3 | 39.5 / 38.4 / 34.7
layers vgg-rotation-vg            # RotNet, VG | 59.9 / 60.9 / 59.2 | 39.5 / 38.4 / 34.7 | 39.7 / 38.9 / 34.9
once vgg-lda-coco python tp.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --labels lda
layers vgg-lda-coco               # TP-LDA, COCO | 70.6 / 73.9 / 76.3 | 48.7 / 48.4 / 46.7 | 43.7 / 44.1 / 43.0
once vgg-cluster-1k-coco python tp.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --labels cluster
layers vgg-cluster-1k-coco        # TP-Cluster 1K, COCO | 71.5 / 74.5 / 77.0 | 49.5 / 49.8 / 48.1 | 44.1 / 44.6 / 43.7
once vgg-cluster-10k-coco python tp.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --labels cluster --num-labels 10000
layers vgg-cluster-10k-coco       # TP-Cluster 10K, COCO | 72.1 / 75.0 / 77.2 | 50.2 / 50.3 / 48.7 | 45.1 / 45.3 / 44.2
once vgg-postag-1k-coco python tp.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy
layers vgg-postag-1k-coco         # TP-Postag 1K, COCO | 73.3 / 76.4 / 79.3 | 50.6 / 51.1 / 50.0 | 45.9 / 46.5 / 45.8
once vgg-postag-10k-coco python tp.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy --num-labels 10000
layers vgg-postag-10k-coco        # TP-Postag 10K, COCO | 73.6 / 77.0 / 79.4 | 51.2 / 51.7 / 50.5 | 46.1 / 47.0 / 46.1
once vgg-tfm-coco $RUN icmlm.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy
layers vgg-tfm-coco               # ICMLM-tfm, COCO | 74.8 / 77.8 / 80.5 | 52.0 / 52.0 / 50.8 | 46.8 / 47.3 / 46.2
once vgg-att-fc-coco $RUN icmlm.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy --head att-fc
layers vgg-att-fc-coco            # ICMLM-att-fc, COCO | 75.4 / 79.1 / 82.5 | 52.2 / 52.2 / 49.4 | 46.4 / 47.0 / 44.6
once vgg-lda-vg python tp.py --data vg --root "$DATA/vg" --arch vgg16_bn --init "$OUT/vgg-rotation-vg/backbone.pth" --labels lda
layers vgg-lda-vg                 # TP-LDA, VG | 71.5 / 74.6 / 77.7 | 49.3 / 49.2 / 47.8 | 44.4 / 44.9 / 44.0
once vgg-cluster-1k-vg python tp.py --data vg --root "$DATA/vg" --arch vgg16_bn --init "$OUT/vgg-rotation-vg/backbone.pth" --labels cluster
layers vgg-cluster-1k-vg          # TP-Cluster 1K, VG | 73.0 / 76.2 / 79.4 | 50.0 / 49.8 / 47.3 | 45.4 / 45.8 / 44.5
once vgg-cluster-10k-vg python tp.py --data vg --root "$DATA/vg" --arch vgg16_bn --init "$OUT/vgg-rotation-vg/backbone.pth" --labels cluster --num-labels 10000
layers vgg-cluster-10k-vg         # TP-Cluster 10K, VG | 73.9 / 77.8 / 81.3 | 50.8 / 50.7 / 48.5 | 46.2 / 46.9 / 45.6
once vgg-postag-1k-vg python tp.py --data vg --root "$DATA/vg" --arch vgg16_bn --init "$OUT/vgg-rotation-vg/backbone.pth" --tagger spacy
layers vgg-postag-1k-vg           # TP-Postag 1K, VG | 72.9 / 76.4 / 79.6 | 49.9 / 49.8 / 49.1 | 46.0 / 46.5 / 46.4
once vgg-postag-10k-vg python tp.py --data vg --root "$DATA/vg" --arch vgg16_bn --init "$OUT/vgg-rotation-vg/backbone.pth" --tagger spacy --num-labels 10000
layers vgg-postag-10k-vg          # TP-Postag 10K, VG | 73.5 / 76.9 / 80.1 | 50.9 / 51.3 / 50.0 | 46.1 / 46.7 / 46.7
once vgg-tfm-vg $RUN icmlm.py --data vg --root "$DATA/vg" --arch vgg16_bn --init "$OUT/vgg-rotation-vg/backbone.pth" --tagger spacy
layers vgg-tfm-vg                 # ICMLM-tfm, VG | 75.5 / 79.3 / 82.6 | 52.4 / 52.2 / 51.1 | 47.3 / 47.8 / 47.5
once vgg-att-fc-vg $RUN icmlm.py --data vg --root "$DATA/vg" --arch vgg16_bn --init "$OUT/vgg-rotation-vg/backbone.pth" --tagger spacy --head att-fc
layers vgg-att-fc-vg              # ICMLM-att-fc, VG | 76.9 / 81.2 / 85.0 | 52.2 / 52.2 / 47.8 | 47.4 / 47.9 / 47.7

# ----- ICMLM Tab. 3: ResNet-50 | VOC mAP | IN-1K top-1
# TP-Postag for as long asks what ICMLM adds to longer training: it sees 500K x 512 photos after TP.
voc07-icmlm imagenet --arch resnet50; in1k-icmlm imagenet --arch resnet50  # ImageNet | 87.9 | 74.7
once tp-labels python tp.py --data coco --root "$DATA/coco" --labels instances
voc07-icmlm tp-labels; in1k-icmlm tp-labels                                # TP-Label | 80.2 | 34.0
once tp python tp.py --data coco --root "$DATA/coco" --tagger spacy
voc07-icmlm tp; in1k-icmlm tp                                              # TP-Postag | 82.6 | 43.9
once tfm $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth"
voc07-icmlm tfm; in1k-icmlm tfm                                            # ICMLM-tfm | 87.3 | 51.9
once att-fc $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --head att-fc
voc07-icmlm att-fc; in1k-icmlm att-fc                                      # ICMLM-att-fc | 87.5 | 47.9
once tp-tp python tp.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --iters 2000000
voc07-icmlm tp-tp; in1k-icmlm tp-tp                                        # TP-Postag for as long [ours] | - | -

# ----- ICMLM Tab. 4: Label sets, ResNet-50 | VOC mAP | IN-1K top-1 | COCO mAP
voc07-icmlm tp-labels; in1k-icmlm tp-labels; coco-icmlm tp-labels  # GT labels (TP-Label, 80) | 80.2 | 34.0 | 73.5
once tp-nn python tp.py --data coco --root "$DATA/coco" --tagger spacy --pos nn
voc07-icmlm tp-nn; in1k-icmlm tp-nn; coco-icmlm tp-nn              # NN (5K) | 81.8 | 43.9 | 75.3
once tp-nn-adj python tp.py --data coco --root "$DATA/coco" --tagger spacy --pos nn+adj
voc07-icmlm tp-nn-adj; in1k-icmlm tp-nn-adj; coco-icmlm tp-nn-adj  # NN + ADJ (5K) | 82.3 | 44.5 | 75.5
voc07-icmlm tp; in1k-icmlm tp; coco-icmlm tp                       # NN + ADJ + VB (5K) | 82.6 | 43.9 | 75.5
once tp-1k python tp.py --data coco --root "$DATA/coco" --tagger spacy --num-labels 1000
voc07-icmlm tp-1k                                                  # NN + ADJ + VB (1K) | 81.4 |  |
once tp-2500 python tp.py --data coco --root "$DATA/coco" --tagger spacy --num-labels 2500
voc07-icmlm tp-2500                                                # NN + ADJ + VB (2.5K) | 82.1 |  |
once tp-10k python tp.py --data coco --root "$DATA/coco" --tagger spacy --num-labels 10000
voc07-icmlm tp-10k                                                 # NN + ADJ + VB (10K) | 81.9 |  |

# ----- ICMLM Tab. 5: Layers and heads, ResNet-50, lambda 0 | masked words top-1 | VOC mAP | IN-1K top-1 | COCO mAP
# Masked words: on all of COCO's validation triplets, in the run's result.json. BERT alone: 25.7, which is also its number in
# Tab. 1, for other words.
once tfm-1-1 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0
voc07-icmlm tfm-1-1; in1k-icmlm tfm-1-1; coco-icmlm tfm-1-1     # tfm, L = 1, H = 1 | 65.2 | 85.7 | 50.6 | 77.6
once tfm-1-4 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --heads 4
voc07-icmlm tfm-1-4; in1k-icmlm tfm-1-4; coco-icmlm tfm-1-4     # tfm, L = 1, H = 4 | 66.1 | 85.3 | 50.7 | 77.5
once tfm-1-12 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --heads 12
voc07-icmlm tfm-1-12; in1k-icmlm tfm-1-12; coco-icmlm tfm-1-12  # tfm, L = 1, H = 12 | 66.5 | 85.5 | 50.4 | 77.2
once tfm-2-1 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --layers 2
voc07-icmlm tfm-2-1; in1k-icmlm tfm-2-1; coco-icmlm tfm-2-1     # tfm, L = 2, H = 1 | 66.7 | 85.0 | 46.6 | 76.2
once tfm-2-4 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --layers 2 --heads 4
voc07-icmlm tfm-2-4; in1k-icmlm tfm-2-4; coco-icmlm tfm-2-4     # tfm, L = 2, H = 4 | 67.1 | 85.0 | 46.7 | 76.3
once tfm-2-12 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --layers 2 --heads 12
voc07-icmlm tfm-2-12; in1k-icmlm tfm-2-12; coco-icmlm tfm-2-12  # tfm, L = 2, H = 12 | 67.5 | 84.8 | 46.6 | 76.1
once att-1-1 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --head att-fc
voc07-icmlm att-1-1; in1k-icmlm att-1-1; coco-icmlm att-1-1     # att-fc, L = 1, H = 1 | 58.5 | 86.8 | 47.2 | 78.9
once att-1-4 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --head att-fc --heads 4
voc07-icmlm att-1-4; in1k-icmlm att-1-4; coco-icmlm att-1-4     # att-fc, L = 1, H = 4 | 59.4 | 86.7 | 46.8 | 78.9
once att-1-12 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --head att-fc --heads 12
voc07-icmlm att-1-12; in1k-icmlm att-1-12; coco-icmlm att-1-12  # att-fc, L = 1, H = 12 | 59.5 | 86.6 | 47.3 | 78.9
once att-2-1 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --head att-fc --layers 2
voc07-icmlm att-2-1; in1k-icmlm att-2-1; coco-icmlm att-2-1     # att-fc, L = 2, H = 1 | 59.5 | 86.4 | 48.1 | 78.8
once att-2-4 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --head att-fc --layers 2 --heads 4
voc07-icmlm att-2-4; in1k-icmlm att-2-4; coco-icmlm att-2-4     # att-fc, L = 2, H = 4 | 60.2 | 86.3 | 48.5 | 78.6
once att-2-12 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 0 --head att-fc --layers 2 --heads 12
voc07-icmlm att-2-12; in1k-icmlm att-2-12; coco-icmlm att-2-12  # att-fc, L = 2, H = 12 | 60.4 | 86.3 | 48.7 | 78.5

# ----- ICMLM Tab. 6: Zero-shot classification, VGG-16 | CUB C-11 / C-12 / C-13 | AWA2 C-11 / C-12 / C-13
# Top-1 over all classes, seen and unseen, mean of 5 runs. As printed, but AWA2 after C-11 is probably wrong for ImageNet and
# S-ImageNet: all else is above 30, and exchanging columns does not help.
cub imagenet --arch vgg16_bn; awa2 imagenet --arch vgg16_bn  # ImageNet | 10.2 / 19.4 / 24.4 | 11.4 / 37.1 / 38.9
for draw in 0 1 2 3; do
    cub s-imagenet-1k-$draw; awa2 s-imagenet-1k-$draw  # S-ImageNet, 1K classes | 11.6 / 16.1 / 18.3 | 12.7 / 33.2 / 34.9
    cub s-imagenet-100-$draw; awa2 s-imagenet-100-$draw  # S-ImageNet, 100 classes | 12.5 / 14.1 / 15.7 | 13.1 / 32.0 / 33.3
done
cub vgg-labels-coco; awa2 vgg-labels-coco                    # TP-Label, COCO | 11.1 / 11.7 / 11.5 | 31.1 / 32.0 / 32.8
cub vgg-cluster-1k-vg; awa2 vgg-cluster-1k-vg                # TP-Cluster 1K, VG | 9.8 / 10.3 / 10.3 | 30.3 / 30.8 / 30.6
cub vgg-cluster-10k-vg; awa2 vgg-cluster-10k-vg              # TP-Cluster 10K, VG | 10.3 / 10.7 / 10.4 | 30.9 / 31.6 / 31.9
cub vgg-postag-1k-vg; awa2 vgg-postag-1k-vg                  # TP-Postag 1K, VG | 10.6 / 11.1 / 11.5 | 30.8 / 31.7 / 32.3
cub vgg-postag-10k-vg; awa2 vgg-postag-10k-vg                # TP-Postag 10K, VG | 10.4 / 10.9 / 11.3 | 31.0 / 31.9 / 32.4
cub vgg-tfm-vg; awa2 vgg-tfm-vg                              # ICMLM-tfm, VG | 12.5 / 13.0 / 13.7 | 32.2 / 32.8 / 33.1
cub vgg-att-fc-vg; awa2 vgg-att-fc-vg                        # ICMLM-att-fc, VG | 12.1 / 12.0 / 10.9 | 31.5 / 32.1 / 31.5
cub vgg-tfm-coco; awa2 vgg-tfm-coco                          # ICMLM-tfm, COCO | 12.4 / 12.8 / 13.3 | 32.2 / 32.9 / 33.8
cub vgg-att-fc-coco; awa2 vgg-att-fc-coco                    # ICMLM-att-fc, COCO | 11.9 / 12.3 / 12.4 | 31.8 / 32.7 / 33.1

# ----- ICMLM App. B: Lambda of Eq. 8, and VGG-16 with one attention head | l_tp | VOC mAP (VGG-16: after C-11 / C-12 / C-13)
# The paper chose lambda among 0, 0.1, 1 by the loss of tag prediction (l_tp, in the run's result.json) on COCO's or VG's validation
# split: 0.1 with ResNet-50, 1 with VGG-16. It prints no numbers for this choice; those here are of Tabs. 2, 3, 5. With lambda 0 the
# tag head learns from features that it does not change [ours].
# One head and lambda 0 gave "inferior models" with VGG-16; it has 12 heads elsewhere.
voc07-icmlm tfm-1-1                  # tfm, ResNet-50, lambda 0 | - | 85.7
voc07-icmlm tfm                      # tfm, ResNet-50, lambda 0.1 | - | 87.3
once tfm-lambda-1 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --lambda-tp 1
voc07-icmlm tfm-lambda-1             # tfm, ResNet-50, lambda 1 | - | -
voc07-icmlm att-1-1                  # att-fc, ResNet-50, lambda 0 | - | 86.8
voc07-icmlm att-fc                   # att-fc, ResNet-50, lambda 0.1 | - | 87.5
once att-fc-lambda-1 $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --head att-fc --lambda-tp 1
voc07-icmlm att-fc-lambda-1          # att-fc, ResNet-50, lambda 1 | - | -
once vgg-tfm-lambda-0-coco $RUN icmlm.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy --lambda-tp 0
voc07-layers vgg-tfm-lambda-0-coco   # tfm, VGG-16, lambda 0 | - | -
once vgg-tfm-lambda-01-coco $RUN icmlm.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy --lambda-tp 0.1
voc07-layers vgg-tfm-lambda-01-coco  # tfm, VGG-16, lambda 0.1 | - | -
voc07-layers vgg-tfm-coco            # tfm, VGG-16, lambda 1 | - | 74.8 / 77.8 / 80.5
once vgg-tfm-1-head-coco $RUN icmlm.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy --lambda-tp 0 --heads 1
voc07-layers vgg-tfm-1-head-coco     # tfm, VGG-16, lambda 0, one head | - | -
once vgg-att-fc-1-head-coco $RUN icmlm.py --data coco --root "$DATA/coco" --arch vgg16_bn --init "$OUT/vgg-rotation-coco/backbone.pth" --tagger spacy --head att-fc --lambda-tp 0 --heads 1
voc07-layers vgg-att-fc-1-head-coco  # att-fc, VGG-16, lambda 0, one head | - | -

# ----- ICMLM Figs. 1, 3: Attention, ResNet-50: pictures | attention
attention tfm  # ICMLM-tfm | figure

# ----- ICMLM Figs. 4, 5: Attention, VGG-16: pictures | attention
attention vgg-att-fc-coco  # ICMLM-att-fc | figure

report
