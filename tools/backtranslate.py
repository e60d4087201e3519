"""Back-translate the training captions: the second views for mmcontrastive.py [Sec. 4.1]

    python tools/backtranslate.py --data coco \\
        --output runs/mmcontrastive-coco/backtranslations.jsonl
    python mmcontrastive.py --data coco

MarianMT models of the hub [ours] translate each caption to French and back, and to German and back.
Writes lines {"caption", "fr", "de"}, batch by batch; interrupted, the same command resumes.
"""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import fail, print_main, progress

BATCH_SIZE = 64
MAX_TOKENS = 128  # per translation


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--data", default="coco", help="shapes (built in), coco, vg, a .jsonl, folder of shards")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--train-split", help="split to translate (default train2017 for coco, else train)")
    add("--output", default="backtranslations.jsonl", help="file that mmcontrastive.py reads")
    add("--translator", default="Helsinki-NLP/opus-mt-{}-{}",
        help="models of the hub or folders; the two {} are languages, say en and fr")
    add("--amp", choices=("bf16", "fp16", "off"), help="precision; default bf16 if supported")
    args = parser.parse_args(argv)
    args.train_split = args.train_split or ("train2017" if args.data == "coco" else "train")
    return args


@torch.no_grad()
def main(args):
    device = common.init_distributed()
    amp = common.choose_amp(device, args.amp)
    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = keep_whole_lines(path)
    [data] = common.caption_data(args.data, args.root, [args.train_split])
    todo = [caption for caption in dict.fromkeys(data.all_captions()) if caption not in done]
    todo.sort(key=len)  # similar lengths in a batch: less padding
    print_main(f"{len(done)} captions are in {path} already, {len(todo)} to translate")
    if not todo:
        return
    pairs = ("en", "fr"), ("fr", "en"), ("en", "de"), ("de", "en")
    names = [args.translator.format(*pair) for pair in pairs]
    to_fr, from_fr, to_de, from_de = [Translator(name, device, amp) for name in names]
    starts = range(0, len(todo), BATCH_SIZE)
    with open(path, "a") as file:
        for start in progress(starts, desc="back-translation", unit=" batches"):
            batch = todo[start : start + BATCH_SIZE]
            for caption, fr, de in zip(batch, from_fr(to_fr(batch)), from_de(to_de(batch))):
                file.write(json.dumps({"caption": caption, "fr": fr, "de": de}) + "\n")
            file.flush()
    print_main(f"{path} is complete")


def keep_whole_lines(path):
    """Drop an incomplete last line, of an interrupted run -> set of the captions that are done"""
    content = path.read_text() if path.exists() else ""
    whole = content[: content.rfind("\n") + 1]
    if whole != content:
        os.truncate(path, len(whole.encode()))
    return {json.loads(line)["caption"] for line in whole.splitlines()}


class Translator:
    """A MarianMT model with greedy decoding [ours]: list of texts -> list of translations"""

    def __init__(self, name, device, amp):
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # only here: it takes seconds

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForSeq2SeqLM.from_pretrained(name)
        except OSError:
            fail(f"{name} cannot be read: --translator is of the hub (huggingface.co) or a folder")
        model.generation_config.max_length = None  # or else it warns of MAX_TOKENS at each batch
        self.model = model.float().to(device).eval()  # transformers 5 keeps the file's precision
        self.device, self.amp = device, amp

    def __call__(self, texts):
        inputs = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with common.autocast(self.device, self.amp):
            tokens = self.model.generate(
                **inputs.to(self.device), num_beams=1, do_sample=False, max_new_tokens=MAX_TOKENS
            )
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    main(get_args())
