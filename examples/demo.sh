#!/usr/bin/env bash
# The main job, end to end: plan, train on 2 processes, stop, resume on 1, let the model write; exact mode on 3 layouts.
set -euo pipefail
folder=runs/demo
rm -rf "$folder"

echo "== 0. plan: how to train an 8B model on 8 GPUs that this machine does not have =="
meshwright plan --model llama-3.1-8b --cluster 8xH100-SXM

echo
echo "== 1. train on 2 processes, up to step 590 of 600 =="
meshwright train recipes/demo.toml --nproc 2 --run-dir "$folder" --set train.stop_after=590

echo
echo "== 2. resume the same training on 1 process: the last 10 steps =="
meshwright train recipes/demo.toml --nproc 1 --run-dir "$folder" --resume

echo
echo "== 2b. memory of a step, moment by moment: what was predicted beside what was measured =="
python - "$folder/memory.json" <<'EOF'
import json, sys

memory = json.load(open(sys.argv[1]))
for moment, measured in memory["measured"].items():
    predicted = (memory["predicted"] or {}).get(moment, {})
    said = predicted.get("predicted_bytes", 0) / 2**20
    print(f"{moment:10} {said:9.2f} MiB predicted {measured['measured_bytes'] / 2**20:9.2f} MiB measured")
EOF

echo
echo "== 3. what was saved, read without torch =="
meshwright checkpoint ls "$folder"

echo
echo "== 4. the model writes =="
python examples/generate_text.py "$folder" --prompt "def " --tokens 240

echo
echo "== 5. exact mode: the same bits on 1 process, on 2, and cut over 2 =="
for layout in single ddp2 zero3x2; do
    rm -rf "$folder-$layout"
    meshwright train recipes/tiny.toml --run-dir "$folder-$layout" --set layout=$layout --set train.reduction=exact \
        > "$folder/$layout.log" 2>&1 || { cat "$folder/$layout.log"; exit 1; }
    meshwright checkpoint ls "$folder-$layout"
done

cat <<EOF

Everything is in $folder:
  plan.json       why this layout        memory.json    predicted beside measured
  metrics.jsonl   one line a step        summary.json   how it ended, with the weights' digest
  checkpoints/    what to resume from    tensorboard/   tensorboard --logdir $folder
Try next:
  meshwright train recipes/tiny.toml --nproc 3               the same losses as on 1 or 2 processes
  meshwright train recipes/tiny.toml --nproc 4               what does not divide is refused, with what would
  python examples/own_module.py --nproc 2                    your own nn.Module through the Python API
  meshwright checkpoint show $folder
  meshwright plan recipes/demo.toml --cluster 4x8xA100-80GB   the same recipe on other hardware
EOF
