#!/usr/bin/env bash
# The tables of VirTex (CVPR 2021), row by row: how to train and measure each, and what the paper prints.
#
#     bash papers/virtex.sh                  # all rows, one after the other
#     bash papers/virtex.sh virtex moco-v1   # only these runs, and what is measured of them
#
# Behind a row are its name and the numbers that the paper prints, in the order of the heading's columns:
# "figure" where the number is only in a figure, "-" where there is none. Our score is in the result.json
# of OUT/RUN/MEASURE. A run's command stands at the first row that has it. What has its result is not
# repeated, an interrupted run goes on, and a row that fails does not stop the others. docs/evaluation.md
# says which data they need. We have run none of these rows at the paper's size.
#
# Early stopping, as in the paper: all runs of virtex.py keep models, and `best` picks one. Iterations
# scale with the number of photos [App. A.1]. IN-sup and the crops have torchvision's schedule [App. A.1].
# No numbers: Figs. 1, 2, 3 are illustrations. Tabs. 5, 6, 7 are the defaults of downstream.detection.
# Figs. 7, 8 are scores of all kept models (train with --keep-every 4000 to have the paper's best, at
# 496K and 492K iterations): give eval_linear.py --weights runs/papers/virtex/model_*.pth, and
# runs/papers/virtex-mlm/model_*.pth; give downstream.captioning --evaluate each of them.

cd "$(dirname "$0")/.." || exit
. papers/functions.sh  # once, best, report and the measures

# ----- VirTex Tab. 1: Annotation cost efficiency | VOC07 mAP | IN-1k top-1
# The table's costs in hours are estimates [App. A.1].
# MoCo-COCO has the loss of MoCo-v2; head (linear), augmentation and schedule are v1's.
# Multi-label classification trains one linear layer on the backbone; the target is 1/K for each of the K tags of a photo [Sec. 4.1].
# Instance segmentation is trained from random weights with the 9x schedule of Detectron2's model zoo. The paper does not say
# which of the zoo's from-scratch models it used.
once moco-v1 $RUN mmcontrastive.py --data coco --root "$DATA/coco" --lambda-tag 0 --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 --temperature 0.07 --batch-size 256 --lr 0.03 --queue 65536 --moco-v1 --blur 0 --mlp-hidden 0 --steps 0.6 0.8
voc07 moco-v1; in1k moco-v1                                  # MoCo-COCO (v1) | 63.3 | 41.1
once virtex-labels $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --task multilabel_classification
best virtex-labels; voc07 virtex-labels; in1k virtex-labels  # multi-label classification | 86.2 | 46.2
once mask-rcnn $RUN -m downstream.detection --data coco --root "$DATA/coco" --weights random --arch resnet50 --schedule 9x
voc07 mask-rcnn; in1k mask-rcnn                              # instance segmentation | 82.3 | 51.0
once virtex-1cap $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --captions-per-image 1
best virtex-1cap; voc07 virtex-1cap; in1k virtex-1cap        # VirTex, 1 caption | 84.2 | 50.2
once virtex $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000
best virtex; voc07 virtex; in1k virtex                       # VirTex, 5 captions | 88.7 | 53.8

# ----- VirTex Tab. 2: Comparison with other methods | VOC07 mAP | IN-1k top-1
# MoCo-IN's 60.8 and PCL's 61.5 are those projects' own numbers, by probes of their own: with augmentation, 100 epochs, and
# learning rates of 30 (MoCo; a tenth after 60 and 80 epochs) and 5 (PCL). The rows use VirTex's (0.3, cosine), so that our numbers
# may differ from the printed ones without an error; theirs are eval_linear.py's --lr 30 --steps 0.6 0.8, and --lr 5.
# ICMLM's numbers are from its paper, by its protocols. MoCo's 60.8 is what its code reports as the mean of five training runs; the
# published weights reach 60.6.
voc07 moco-v1-in; in1k moco-v1-in      # MoCo-IN v1 | 79.4 | 60.8
voc07 pcl-v1-in; in1k pcl-v1-in        # PCL v1 | 83.1 | 61.5
voc07 swav-in; in1k swav-in            # SwAV, 200 epochs | 87.9 | 72.7
once tp python tp.py --data coco --root "$DATA/coco" --tagger spacy
once att-fc $RUN icmlm.py --data coco --root "$DATA/coco" --tagger spacy --init "$OUT/tp/backbone.pth" --head att-fc
voc07-icmlm att-fc; in1k-icmlm att-fc  # ICMLM att-fc | 87.5 | 47.9
voc07 virtex; in1k virtex              # VirTex | 88.7 | 53.8

# ----- VirTex Tab. 3: Fine-tuning tasks for transfer | COCO box AP/50/75 | COCO mask AP/50/75 | LVIS mask AP/50/75 | VOC box AP/50/75 | iNat 18 top-1
# Random Init has the schedule of the other rows in the authors' configurations, too. Next to four iNat scores the paper prints
# differences from an IN-sup of about 64.9, not 65.2.
# iNaturalist: 100 epochs, batch 256 on 8 GPUs, learning rate 0.025 (0.1 for random initialisation).
# LVIS: batch norm stays frozen in the rows IN-sup [Sec. 4.3].
coco random --arch resnet50; lvis random --arch resnet50; voc random --arch resnet50; inat random --arch resnet50                      # Random Init | 36.7 / 56.7 / 40.0 | 33.7 / 53.8 / 35.9 | 17.4 / 27.8 / 18.4 | 33.8 / 60.2 / 33.1 | 61.4
coco imagenet --arch resnet50; lvis imagenet --arch resnet50 --frozen-bn; voc imagenet --arch resnet50; inat imagenet --arch resnet50  # IN-sup | 41.1 / 62.0 / 44.9 | 37.2 / 59.1 / 40.0 | 22.6 / 35.1 / 23.7 | 54.3 / 81.6 / 59.7 | 65.2
once in-sup-50 $RUN -m downstream.finetune --data folder --root "$DATA/imagenet" --weights random --arch resnet50 --epochs 90 --steps 30 60 --fraction 0.5
coco in-sup-50; lvis in-sup-50 --frozen-bn; voc in-sup-50; inat in-sup-50                                                              # IN-sup-50% | 40.3 / 61.0 / 44.0 | 36.6 / 58.0 / 39.3 | 21.2 / 33.3 / 22.3 | 52.1 / 80.4 / 57.0 | 63.2
once in-sup-10 $RUN -m downstream.finetune --data folder --root "$DATA/imagenet" --weights random --arch resnet50 --epochs 90 --steps 30 60 --fraction 0.1
coco in-sup-10; lvis in-sup-10 --frozen-bn; voc in-sup-10; inat in-sup-10                                                              # IN-sup-10% | 37.9 / 58.2 / 41.1 | 34.7 / 55.2 / 37.1 | 17.5 / 28.0 / 18.4 | 42.6 / 72.0 / 43.8 | 60.2
coco moco-v1-in; lvis moco-v1-in; voc moco-v1-in; inat moco-v1-in                                                                      # MoCo-IN | 40.8 / 61.6 / 44.7 | 36.9 / 58.4 / 39.7 | 22.8 / 35.4 / 24.2 | 56.1 / 81.5 / 62.4 | 63.2
coco moco-v1; lvis moco-v1; voc moco-v1; inat moco-v1                                                                                  # MoCo-COCO | 38.5 / 58.5 / 42.0 | 35.0 / 55.6 / 37.5 | 20.7 / 32.3 / 21.9 | 47.6 / 75.4 / 51.0 | 60.5
coco virtex; lvis virtex; voc virtex; inat virtex                                                                                      # VirTex | 40.9 / 61.7 / 44.8 | 36.9 / 58.4 / 39.7 | 23.0 / 35.4 / 24.3 | 55.3 / 81.3 / 61.0 | 63.4

# ----- VirTex Tab. 4: Backbones; Fig. 5 (b) draws its first two columns | VOC07 mAP | IN-1k top-1 | VOC box AP/50/75
once virtex-h1024 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --hidden 1024
best virtex-h1024; voc07 virtex-h1024; in1k virtex-h1024; voc virtex-h1024  # ResNet-50 | 88.3 | 53.2 | 55.2 / 81.2 / 60.8
once virtex-w2x $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --hidden 1024 --arch wide_resnet50_2
best virtex-w2x; voc07 virtex-w2x; in1k virtex-w2x; voc virtex-w2x          # ResNet-50 w2x | 88.5 | 52.9 | 56.6 / 82.0 / 62.8
once virtex-r101 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --hidden 1024 --arch resnet101
best virtex-r101; voc07 virtex-r101; in1k virtex-r101; voc virtex-r101      # ResNet-101 | 88.7 | 52.0 | 57.9 / 82.0 / 63.6

# ----- VirTex Tab. 8: LVIS v0.5 | LVIS v0.5 mask AP/50/75
# Its heading says boxes, its text masks: here masks; result.json has both. The differences printed for IN-sup-10% (-6.2 and -5.2)
# would fit an AP50 of 31.8 and an AP75 of 20.9.
lvis05 random --arch resnet50                # Random Init | 22.5 / 34.8 / 23.8
lvis05 imagenet --arch resnet50 --frozen-bn  # IN-sup | 24.5 / 38.0 / 26.1
lvis05 in-sup-50 --frozen-bn                 # IN-sup-50% | 23.7 / 36.7 / 25.1
lvis05 in-sup-10 --frozen-bn                 # IN-sup-10% | 20.5 / 32.8 / 21.7
lvis05 moco-v1-in                            # MoCo-IN | 24.1 / 37.4 / 25.5
lvis05 moco-v1                               # MoCo-COCO | 23.1 / 35.3 / 24.9
lvis05 virtex                                # VirTex | 25.4 / 39.0 / 26.9

# ----- VirTex Fig. 4: Data efficiency | VOC07 mAP | IN-1k top-1
# The paper repeats runs on at most 100K images of IN-1k five times and prints the mean, hence the loop.
# The iterations of the --fraction rows scale with the number of images, and the probe of IN-sup uses --lr 0.1 [App. A.1].
once virtex-10 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 1000 --fraction 0.1 --iters 50000
best virtex-10; voc07 virtex-10; in1k virtex-10                         # VirTex, 10% | 69.3 | figure
once virtex-20 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 2000 --fraction 0.2 --iters 100000
best virtex-20; voc07 virtex-20; in1k virtex-20                         # VirTex, 20% | figure | figure
once virtex-50 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 5000 --fraction 0.5 --iters 250000
best virtex-50; voc07 virtex-50; in1k virtex-50                         # VirTex, 50% | figure | figure
voc07 virtex; in1k virtex                                               # VirTex, 100% | 88.7 | 53.8
once virtex-10-1cap $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 1000 --fraction 0.1 --iters 50000 --captions-per-image 1
best virtex-10-1cap; voc07 virtex-10-1cap; in1k virtex-10-1cap          # ... 1 caption, 10% | figure | figure
once virtex-20-1cap $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 2000 --fraction 0.2 --iters 100000 --captions-per-image 1
best virtex-20-1cap; voc07 virtex-20-1cap; in1k virtex-20-1cap          # ... 1 caption, 20% | figure | figure
once virtex-50-1cap $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 5000 --fraction 0.5 --iters 250000 --captions-per-image 1
best virtex-50-1cap; voc07 virtex-50-1cap; in1k virtex-50-1cap          # ... 1 caption, 50% | 79.4 | figure
voc07 virtex-1cap; in1k virtex-1cap                                     # ... 1 caption, 100% | 84.2 | 50.2
for seed in 0 1 2 3 4; do
    once in-sup-1-$seed $RUN -m downstream.finetune --data folder --root "$DATA/imagenet" --weights random --arch resnet50 --epochs 90 --steps 30 60 --fraction 0.01 --seed $seed
    voc07 in-sup-1-$seed; in1k in-sup-1-$seed --lr 0.1  # IN-sup, 1% | figure | figure
    once in-sup-2-$seed $RUN -m downstream.finetune --data folder --root "$DATA/imagenet" --weights random --arch resnet50 --epochs 90 --steps 30 60 --fraction 0.02 --seed $seed
    voc07 in-sup-2-$seed; in1k in-sup-2-$seed --lr 0.1  # IN-sup, 2% | figure | figure
    once in-sup-5-$seed $RUN -m downstream.finetune --data folder --root "$DATA/imagenet" --weights random --arch resnet50 --epochs 90 --steps 30 60 --fraction 0.05 --seed $seed
    voc07 in-sup-5-$seed; in1k in-sup-5-$seed --lr 0.1  # IN-sup, 5% | figure | figure
done
voc07 in-sup-10; in1k in-sup-10 --lr 0.1                                # IN-sup, 10% | figure | 53.6
once in-sup-20 $RUN -m downstream.finetune --data folder --root "$DATA/imagenet" --weights random --arch resnet50 --epochs 90 --steps 30 60 --fraction 0.2
voc07 in-sup-20; in1k in-sup-20 --lr 0.1                                # IN-sup, 20% | figure | figure
voc07 in-sup-50; in1k in-sup-50 --lr 0.1                                # IN-sup, 50% | figure | figure
voc07 imagenet --arch resnet50; in1k imagenet --arch resnet50 --lr 0.1  # IN-sup, 100% | 87.6 | figure

# ----- VirTex Fig. 5 (a): Pretraining tasks | VOC07 mAP | IN-1k top-1
# The figure has no numbers: they are of the authors' model zoo, whose bicaptioning is the paper's. By VOC07 there, token
# classification is first.
voc07 virtex; in1k virtex                                       # bicaptioning | 88.7 | 53.8
once virtex-forward $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --task captioning
best virtex-forward; voc07 virtex-forward; in1k virtex-forward  # forward captioning | 88.6 | 50.8
once virtex-tokens $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --task token_classification
best virtex-tokens; voc07 virtex-tokens; in1k virtex-tokens     # token classification | 88.8 | 48.6
once virtex-mlm $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --task masked_lm
best virtex-mlm; voc07 virtex-mlm; in1k virtex-mlm              # masked language modeling | 86.4 | 46.7

# ----- VirTex Fig. 5 (c): Transformer size | VOC07 mAP | IN-1k top-1
# The figure has no numbers: they are of the authors' model zoo, as in Fig. 5 (a).
once virtex-h512 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --hidden 512
best virtex-h512; voc07 virtex-h512; in1k virtex-h512  # H = 512 | 88.4 | 51.8
once virtex-h768 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --hidden 768
best virtex-h768; voc07 virtex-h768; in1k virtex-h768  # H = 768 | 88.3 | 52.3
voc07 virtex-h1024; in1k virtex-h1024                  # H = 1024, L = 1 | 88.3 | 53.2
voc07 virtex; in1k virtex                              # H = 2048 | 88.7 | 53.8
once virtex-l2 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --hidden 1024 --layers 2
best virtex-l2; voc07 virtex-l2; in1k virtex-l2        # L = 2 | 88.8 | 53.8
once virtex-l3 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --hidden 1024 --layers 3
best virtex-l3; voc07 virtex-l3; in1k virtex-l3        # L = 3 | 88.7 | 53.9
once virtex-l4 $RUN virtex.py --data coco --root "$DATA/coco" --keep-every 10000 --hidden 1024 --layers 4
best virtex-l4; voc07 virtex-l4; in1k virtex-l4        # L = 4 | 88.7 | 53.9

# ----- VirTex Fig. 6: Image captioning | CIDEr / SPICE
# The paper's scores are of the official code, whose beam search leaves [SOS] out from the second step on, which moves all
# positions by one, and writes up to 30 tokens. Ours keeps [SOS] and writes up to 29 [ours]: captions and scores differ, also of
# the official weights.
captions virtex-h512   # R-50, L = 1, H = 512 | 103.2 / 19.3
captions virtex-h768   # R-50, L = 1, H = 768 | 103.7 / 19.6
captions virtex-h1024  # R-50, L = 1, H = 1024 | 103.5 / 19.8
captions virtex        # R-50, L = 1, H = 2048 | 104.2 / 19.9
captions virtex-h1024  # R-50, L = 1, H = 1024 (again) | 103.5 / 19.8
captions virtex-l2     # R-50, L = 2, H = 1024 | 106.9 / 20.0
captions virtex-l3     # R-50, L = 3, H = 1024 | 104.3 / 19.5
captions virtex-l4     # R-50, L = 4, H = 1024 | 103.8 / 19.2
captions virtex-w2x    # R-50 w2x, L = 1, H = 1024 | 102.7 / 19.6
captions virtex-r101   # R-101, L = 1, H = 1024 | 106.6 / 20.1

# ----- VirTex Figs. 6, 9, 10: Captions, attention: pictures | attention
captions-picture virtex-h512  # VirTex, H = 512 | figure

# ----- VirTex App. A.1: Cropped COCO | VOC07 mAP
# A ResNet-50 trained on the 860K objects of COCO: crop_coco.py cuts them out with a margin of 0 to 30 pixels (without crowds,
# which the 860K seem to include).
[ -f "$OUT/coco-crops/backbone.pth" ] || once crops python papers/crop_coco.py --root "$DATA/coco"
once coco-crops $RUN -m downstream.finetune --data folder --root "$OUT/crops" --weights random --arch resnet50 --epochs 90 --steps 30 60
voc07 coco-crops  # objects cut out of COCO | 79.1
voc07 virtex      # VirTex | 88.7

report
