#!/usr/bin/env bash
# Train all methods on your own captioned photos, measure the backbones on labelled photos, and print one table.
#
#     bash papers/compare.sh photos.jsonl labelled
#     SEEDS="0 1 2" bash papers/compare.sh photos.jsonl flowers textures
#     SEEN=51200 bash papers/compare.sh photos.jsonl labelled -- --image-size 112 --init imagenet
#
# Labelled folders have train/<class>/ and val/<class>/. Each method sees SEEN photos at 64 px; flags after
# -- go to all trainings. The columns are the mAP of svm-virtex at 112 px: on each folder, its mean over
# them, and on words of the photos' own captions (tools/own_words.py). With several SEEDS they are the mean
# and the deviation. IMAGENET=FILE is a ResNet-18 with torchvision's weights, which are downloaded without
# it. What has its result in OUT is not repeated, so give another OUT for other photos or flags. An
# interrupted training goes on, and a row that fails does not stop the others.

REPO=$(dirname "$0")/..
OUT=${OUT:-runs/compare}
. "$REPO/papers/functions.sh"
ONLY="" ROWS=""
SEEDS=${SEEDS:-0}
SEEN=${SEEN:-100096}
IMAGENET=${IMAGENET:-imagenet}

PHOTOS=$1
SETS=()
while shift && [ $# -gt 0 ] && [ "$1" != -- ]; do
    SETS+=("$1")
done
FLAGS=("${@:2}")
if [ ${#SETS[@]} = 0 ]; then
    echo "error: give captioned photos and labelled folders: bash papers/compare.sh photos.jsonl labelled" >&2
    exit 2
fi
for path in "$PHOTOS" "${SETS[@]}"; do
    [ -e "$path" ] || { echo "error: there is no $path" >&2; exit 2; }
done
same=$(for set in "${SETS[@]}"; do basename "$set"; done | sort | uniq -d)
[ -z "$same" ] || { echo "error: the table cannot tell folders of one name apart: $same" >&2; exit 2; }

train() {  # NAME SCRIPT PHOTOS FLAGS...: the photos that it sees, in batches of 64
    once "seed-$seed/$1" python "$REPO/$2" --data "$PHOTOS" --recipe small --image-size 64 --iters $(($3 / 64)) --seed "$seed" "${FLAGS[@]}" "${@:4}"
}

measure-on() {  # SET NAME WEIGHTS FLAGS...
    ROWS+=" $2"
    once "seed-$seed/$2/on $(basename "$1")" python "$REPO/eval_linear.py" --weights "$3" --image-size 112 --data folder --root "$1" --seed "$seed" "${@:4}"
}

measure() {  # NAME WEIGHTS FLAGS...: on all sets, and on own words
    local set ways=()
    for set in "${SETS[@]}"; do measure-on "$set" "$@"; done
    [ -f "$OUT/own_words.jsonl" ] || return
    [ "$(wc -l < "$OUT/own_words.jsonl")" -ge 1000 ] || ways=(--both-ways)  # each half is learned from and scored
    once "seed-$seed/$1/own words" python "$REPO/eval_linear.py" --weights "$2" --image-size 112 --data "$OUT/own_words.jsonl" --train-split learn --val-split score "${ways[@]}" --seed "$seed" "${@:3}"
}

row() {  # NAME SCRIPT PHOTOS FLAGS...
    train "$@"
    measure "$1" "$run/$1/backbone.pth"
}

mkdir -p "$OUT"
[ -f "$OUT/own_words.jsonl" ] || python "$REPO/tools/own_words.py" "$PHOTOS" --output "$OUT/own_words.jsonl"
for seed in $SEEDS; do
    run=$OUT/seed-$seed
    measure random random --arch resnet18
    [ "$seed" != "${SEEDS%% *}" ] || measure imagenet "$IMAGENET" --arch resnet18  # the same for all seeds

    # J_ii alone, with tau 0.07 and the recipe's augmentations. 5e-4 was the best of three rates; from given weights the
    # backbone has a tenth of it, and the layers above it the recipe's.
    rates=(--lr 5e-4)
    [[ " ${FLAGS[*]} " == *" --init "* ]] && rates=(--lr 5e-5 --head-lr 1e-3)
    row moco mmcontrastive.py $SEEN --lambda-tag 0 --lambda-cc 0 --lambda-ic 0 --lambda-ci 0 "${rates[@]}"

    # The paper's loss; with the recipe's addition, the words from the image alone
    row virtex-paper virtex.py $SEEN --lambda-words 0
    row virtex virtex.py $SEEN
    row words-alone virtex.py $SEEN --task token_classification
    row tp tp.py $SEEN

    # From TP: TP sees the first half of the photos, and the method the second.
    train tp-half tp.py $((SEEN / 2))
    row tp-from-tp tp.py $((SEEN / 2)) --init "$run/tp-half/backbone.pth" --lr 2e-4 --warmup 0.1

    # One iteration of ICMLM, for the small BERT that it trains first, and that three methods share
    train language-model icmlm.py 64
    row tfm-from-tp icmlm.py $((SEEN / 2)) --init "$run/tp-half/backbone.pth" --lm "$run/language-model/language_model"
    row att-fc-from-tp icmlm.py $((SEEN / 2)) --init "$run/tp-half/backbone.pth" --lm "$run/language-model/language_model" --head att-fc
    row contrastive mmcontrastive.py $SEEN --lm "$run/language-model/language_model"

    # On the labels of the set that it is measured on
    for set in "${SETS[@]}"; do
        name=$(basename "$set")
        [ -f "$OUT/labels of $name.jsonl" ] || python "$REPO/papers/label_list.py" --root "$set" --output "$OUT/labels of $name.jsonl"
        train "supervised on $name" tp.py $SEEN --data "$OUT/labels of $name.jsonl" --val-split train --labels instances
        measure-on "$set" supervised "$run/supervised on $name/backbone.pth"
    done
done

python - "$OUT" "$SEEDS" "$ROWS" "${SETS[@]}" <<'END' | tee "$OUT/table.md"
import json, statistics, sys
from pathlib import Path

out, seeds, rows, *sets = sys.argv[1:]
columns = [f"on {Path(folder).name}" for folder in sets]
found = {}  # {(row, column, seed): mAP}
for seed in seeds.split():
    for path in Path(out, f"seed-{seed}").glob("*/*/result.json"):
        [backbone] = json.loads(path.read_text())["backbones"].values()
        found[path.parts[-3], path.parts[-2], seed] = backbone["mean"]["mAP"]
for row in rows.split():
    for seed in seeds.split():
        scores = [found[row, column, seed] for column in columns if (row, column, seed) in found]
        if len(scores) == len(columns):
            found[row, "mean", seed] = statistics.mean(scores)
print(f"|  | {' | '.join(columns)} | mean | own words |")
print("|---" * (len(columns) + 3) + "|")
for row in dict.fromkeys(rows.split()):
    cells = [row]
    for column in (*columns, "mean", "own words"):
        scores = [found[row, column, seed] for seed in seeds.split() if (row, column, seed) in found]
        deviation = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        cells.append(f"{statistics.mean(scores):.1f}{deviation}" if scores else "")
    print(f"| {' | '.join(cells)} |")
END
report
