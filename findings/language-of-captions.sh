#!/usr/bin/env bash
# Forty plain captions in English, as a filter by language sees them: langid takes 8 and
# langdetect 11 for another language, "a red double decker bus" for French and "a laptop on a
# desk" for Catalan.
# Guess: langid loses at most 4 of them, langdetect at most 6.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    langid==1.1.6 langdetect==1.0.9 numpy==2.4.6

cat > expected.txt <<'END'
langid 1.1.6: 8 of 40 are not English:
  pt: two dogs
  fr: a man surfing
  mt: a pizza
  sl: a zebra in a zoo
  fr: a red double decker bus
  lt: a tennis player
  lv: two zebras graze
  ca: a laptop on a desk
langdetect 1.0.9: 11 of 40 are not English:
  pt: a dog
  pl: two dogs
  id: a man surfing
  it: a pizza
  cy: a giraffe
  sk: a zebra in a zoo
  fi: a person on skis
  pl: two zebras graze
  af: man in suit
  ca: a laptop on a desk
  ca: elephants near a river
END

venv/bin/python - > seen.txt <<'END'
from importlib.metadata import version

import langdetect
import langid

CAPTIONS = """
a dog
two dogs
red car
a man surfing
a cat on a mat
a bus in Paris
a pizza
a giraffe
a zebra in a zoo
a man on a red motorbike
a red double decker bus
a plate of pasta and broccoli
a kitchen with a sink
a tennis player
a baseball player in action
a person on skis
a bed with a pillow
two zebras graze
a train at a station
a large clock tower
a vase with flowers
a cake on a table
a bear in water
a surfer rides a wave
man in suit
children play in sand
a bird on a branch
a laptop on a desk
a group of people at a table
a woman holds an umbrella in the rain
a man is riding a horse along the beach
a young boy throws a frisbee in the park
a stop sign on a street corner
a black and white photo of a bench
a teddy bear sits on a chair
a bathroom with a toilet and a tub
a hot dog with mustard
donuts in a box
elephants near a river
a bowl of oranges
"""
captions = CAPTIONS.strip().splitlines()
langdetect.DetectorFactory.seed = 0
detectors = {"langid": lambda text: langid.classify(text)[0], "langdetect": langdetect.detect}
for package, detect in detectors.items():
    found = {caption: detect(caption) for caption in captions}
    others = {caption: code for caption, code in found.items() if code != "en"}
    print(f"{package} {version(package)}: {len(others)} of {len(captions)} are not English:")
    for caption, code in others.items():
        print(f"  {code}: {caption}")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "language-of-captions: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "language-of-captions: unchanged"
