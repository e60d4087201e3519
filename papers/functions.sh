# What the shell scripts of this folder share: where runs are, how one is made, and the measures.

trap "exit 130" INT
RUN=${RUN:-torchrun --nproc_per_node=8}  # on one GPU: RUN=python
DATA=${DATA:-datasets}                   # the folder of all data sets
OUT=${OUT:-runs/papers}                  # the folder of all runs
PHOTO=${PHOTO:-photo.jpg}                # a photo to caption  [VirTex Figs. 6, 9, 10]
ONLY="$*" STARTED="" FAILED=""

once() {  # FOLDER COMMAND...: runs it with --output OUT/FOLDER, unless its result is there
    [[ -z $ONLY || " $ONLY " == *" ${1%%/*} "* ]] || return 0
    STARTED+=" ${1%%/*} "
    local folder=$OUT/$1 line before
    line=$(printf '%q ' "${@:2}" --output "$folder")
    before=$(cat "$folder.command" 2> /dev/null)
    # A training writes result.json at each validation, and backbone.pth at its end.
    if [ -f "$folder/result.json" ] && { [ ! -f "$folder/args.json" ] || [ -f "$folder/backbone.pth" ]; }; then
        [ "$line" = "$before" ] && echo "# $folder has its result" || echo "# $folder has the result of another command: $before"
        return
    fi
    mkdir -p "$(dirname "$folder")"
    echo "$line" | tee "$folder.command"
    "${@:2}" --output "$folder" || { echo "# FAILED: $folder" >&2; FAILED+=" $folder"; }
}

report() {  # the last line of a script
    local name
    for name in $ONLY; do [[ $STARTED == *" $name "* ]] || echo "# no row has a run $name" >&2; done
    [ -z "$FAILED" ] || { echo "# FAILED:$FAILED" >&2; exit 1; }
}

best() {  # NAME: best.pth is the kept model that is best on VOC07's validation split  [ours: the official code takes its test split]
    once "$1/voc07-val" python eval_linear.py --weights "$OUT/$1"/model_*.pth --data voc07 --root "$DATA/VOCdevkit" --train-split train --val-split val
    local result=$OUT/$1/voc07-val/result.json
    [ -f "$result" ] && [ ! -f "$OUT/$1/best.pth" ] || return
    ln "$(python -c 'import json, sys
scores = json.load(open(sys.argv[1]))["backbones"]
print(max(scores, key=lambda path: scores[path]["mean"]["mAP"]))' "$result")" "$OUT/$1/best.pth"
}

weights() {  # NAME: a run's backbone, or the best of the models that it kept; or the weights of others
    local kept=("$OUT/$1"/model_*.pth)
    case $1 in
        random | imagenet) echo "$1" ;;
        moco-v1-in) echo "$DATA/weights/moco_v1_200ep_pretrain.pth.tar" ;;
        moco-v2-in) echo "$DATA/weights/moco_v2_200ep_pretrain.pth.tar" ;;
        pcl-v1-in) echo "$DATA/weights/PCL_v1_epoch200.pth.tar" ;;
        swav-in) echo "$DATA/weights/swav_200ep_bs256_pretrain.pth.tar" ;;
        *) [ -e "${kept[0]}" ] && echo "$OUT/$1/best.pth" || echo "$OUT/$1/backbone.pth" ;;
    esac
}

# Measures: NAME FLAGS...
voc07() { once "$1/voc07" python eval_linear.py --weights "$(weights "$1")" --data voc07 --root "$DATA/VOCdevkit" "${@:2}"; }
in1k() { once "$1/in1k" $RUN eval_linear.py --weights "$(weights "$1")" --data folder --root "$DATA/imagenet" --protocol sgd-virtex "${@:2}"; }
coco() { once "$1/coco" $RUN -m downstream.detection --weights "$(weights "$1")" --data coco --root "$DATA/coco" "${@:2}"; }
lvis() { once "$1/lvis" $RUN -m downstream.detection --weights "$(weights "$1")" --data lvis --root "$DATA/coco" "${@:2}"; }
lvis05() { once "$1/lvis05" $RUN -m downstream.detection --weights "$(weights "$1")" --data lvis --root "$DATA/coco" --train-split v0.5_train --val-split v0.5_val --min-score 0 "${@:2}"; }
voc() { once "$1/voc" $RUN -m downstream.detection --weights "$(weights "$1")" --data voc --root "$DATA/VOCdevkit" --model c4 "${@:2}"; }
inat() { once "$1/inat" $RUN -m downstream.finetune --weights "$(weights "$1")" --data inat --root "$DATA/inat" "${@:2}"; }
captions() { once "$1/captions" python -m downstream.captioning --weights "$(weights "$1")" --evaluate --data coco --root "$DATA/coco" "${@:2}"; }
captions-picture() { once "$1/captions-picture" python -m downstream.captioning --weights "$(weights "$1")" "$PHOTO" "${@:2}"; }
voc07-icmlm() { once "$1/voc07-icmlm" python eval_linear.py --weights "$(weights "$1")" --data voc07 --root "$DATA/VOCdevkit" --protocol svm-icmlm --runs 5 "${@:2}"; }
in1k-icmlm() { once "$1/in1k-icmlm" python eval_linear.py --weights "$(weights "$1")" --data folder --root "$DATA/imagenet" --protocol logreg-icmlm --runs 5 "${@:2}"; }
coco-icmlm() { once "$1/coco-icmlm" python eval_linear.py --weights "$(weights "$1")" --data coco --root "$DATA/coco" --protocol svm-icmlm "${@:2}"; }
voc07-layers-val() { once "$1/voc07-layers-val" $RUN eval_linear.py --weights "$(weights "$1")" --data voc07 --root "$DATA/VOCdevkit" --protocol layers --train-split train --val-split val "${@:2}"; }
voc07-layers() { once "$1/voc07-layers" $RUN eval_linear.py --weights "$(weights "$1")" --data voc07 --root "$DATA/VOCdevkit" --protocol layers --runs 5 "${@:2}"; }
in1k-layers() { once "$1/in1k-layers" $RUN eval_linear.py --weights "$(weights "$1")" --data folder --root "$DATA/imagenet" --protocol layers "${@:2}"; }
places-layers() { once "$1/places-layers" $RUN eval_linear.py --weights "$(weights "$1")" --data folder --root "$DATA/places" --protocol layers --lr 0.01 0.01 0.02 "${@:2}"; }
cub() { once "$1/cub" python -m downstream.zeroshot --weights "$(weights "$1")" --data cub --root "$DATA/cub" "${@:2}"; }
awa2() { once "$1/awa2" python -m downstream.zeroshot --weights "$(weights "$1")" --data awa2 --root "$DATA/awa2" "${@:2}"; }
attention() { once "$1/attention" python -m downstream.masked_words --weights "$OUT/$1/checkpoint.pth" --photos 10 "${@:2}"; }
layers() { voc07-layers "$@"; in1k-layers "$@"; places-layers "$@"; }
in1k-mct() { once "$1/in1k-mct" python eval_linear.py --weights "$(weights "$1")" --data folder --root "$DATA/imagenet" --protocol sgd-mct "${@:2}"; }
retrieval() { once "$1/retrieval" python -m downstream.retrieval --weights "$(weights "$1")" --data coco --root "$DATA/coco" "${@:2}"; }
stock-tags() { once "$1/stock-tags" python -m downstream.tagging --weights "$(weights "$1")" --data "$DATA/stock.jsonl" "${@:2}"; }
stock-retrieval() { once "$1/stock-retrieval" python -m downstream.retrieval --weights "$(weights "$1")" --recipe paper --data "$DATA/stock.jsonl" --test-images 10000 "${@:2}"; }
