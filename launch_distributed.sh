#!/usr/bin/env bash
# Start N ranks of a command: ./launch_distributed.sh 4 python train.py --lr 0.1
# or of an experiment: ./launch_distributed.sh 2 --config configs/digits_mlp.yaml
# one per GPU: ./launch_distributed.sh --num_gpus 4 --config configs/digits_mlp.yaml (all of them without a number)
# on several machines: ./launch_distributed.sh --num_nodes 2 --node_rank 0 --master_addr HOST ...
# PYTHON selects the interpreter. All options: ./launch_distributed.sh --help
set -euo pipefail

python="${PYTHON:-}"
for candidate in python python3; do
  if [[ -z "$python" ]] && command -v "$candidate" >/dev/null; then
    python="$candidate"
  fi
done
if [[ -z "$python" ]]; then
  echo "launch_distributed.sh: found neither python nor python3; set PYTHON to yours" >&2
  exit 2
fi

exec "$python" -m cyxtrain launch "$@"
