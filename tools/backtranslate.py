"""Back-translate the training captions: the second views for mmcontrastive.py [Sec. 4.1]

    python tools/backtranslate.py --data coco \\
        --output runs/mmcontrastive-coco/backtranslations.jsonl
    python mmcontrastive.py --data coco

MarianMT models of the hub translate each caption to French and back, and to German and back.
Writes lines {"caption", "fr", "de"}, batch by batch; interrupted, the same command resumes.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import language
from common import error_context, print_main, progress

BATCH_SIZE = 64
MAX_TOKENS = 128  # per translation


def get_args(argv=None):
    parser = common.build_parser(__doc__)
    add = parser.add_argument
    add("--data", default="coco", help=common.DATA)
    add("--root", help="folder of the data (default datasets/<name>; for a .jsonl, its folder)")
    add("--train-split", help="split to translate (default train2017 for coco, else train)")
    add("--output", default="backtranslations.jsonl", help="file that mmcontrastive.py reads")
    add("--translator", default="Helsinki-NLP/opus-mt-{}-{}",
        help="models of the hub or folders; the two {} are languages, say en and fr")  # fmt: skip
    add("--amp", choices=("bf16", "fp16", "off"), help="default bf16 where the device has it")
    args = parser.parse_args(argv)
    usual = common.choose_recipe({}, ["--data", args.data])
    args.train_split = args.train_split or usual["train_split"]
    return args


@torch.no_grad()
def main(args):
    device = common.init_distributed().device
    amp = common.choose_amp(device, args.amp)
    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = keep_whole_lines(path)
    data = common.caption_data(args.data, args.root, args.train_split)
    todo = [caption for caption in dict.fromkeys(data.all_captions()) if caption not in done]
    todo.sort(key=len)  # similar lengths in a batch: less padding
    print_main(f"{len(done)} captions are in {path} already, {len(todo)} to translate")
    if not todo:
        return

    pairs = ("en", "fr"), ("fr", "en"), ("en", "de"), ("de", "en")
    models = [Translator(args.translator.format(*pair), device, amp) for pair in pairs]
    to_french, from_french, to_german, from_german = models
    starts = range(0, len(todo), BATCH_SIZE)
    with open(path, "a", encoding="utf-8") as file:
        for start in progress(starts, desc="back-translation", unit=" batches"):
            batch = todo[start : start + BATCH_SIZE]
            french = from_french(to_french(batch))
            german = from_german(to_german(batch))
            for caption, fr, de in zip(batch, french, german):
                file.write(json.dumps({"caption": caption, "fr": fr, "de": de}) + "\n")
            file.flush()
    print_main(f"{path} is complete")


def keep_whole_lines(path):
    """Drop an incomplete last line, of an interrupted run -> set of the captions that are done"""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        path.write_text("".join(lines), "utf-8")
    with error_context(f'{path} should have lines {{"caption", "fr", "de"}}'):
        return {json.loads(line)["caption"] for line in lines}


class Translator:
    """A MarianMT model with greedy decoding: list of texts -> list of translations"""

    def __init__(self, name, device, amp):
        transformers = language.quiet_transformers()
        with error_context(f"--translator {name}: give MarianMT models of the hub or folders"):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(name)
            model = transformers.AutoModelForSeq2SeqLM.from_pretrained(name)
        self.model = model.to(device).eval()
        self.device = device
        self.amp = amp

    def __call__(self, texts):
        inputs = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with common.autocast(self.device, self.amp):
            tokens = self.model.generate(
                **inputs.to(self.device),
                num_beams=1,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
            )
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    common.run(main, get_args)
