#!/usr/bin/env bash
# Transfer learning: a ResNet-18 that has seen ImageNet learns the classes of your own folders of images.
#
#     examples/transfer_learning.sh DATA
#
# DATA holds train/ and val/, with a folder of images for each class, and test/ if you like. The last layer is trained for
# two epochs, then the last block with it. On two cores some hundred images take a minute; with a GPU, thousands do.
# What to expect: a few hundred photographs are enough for classes that a person tells apart at a glance.
#
# WEIGHTS (default: those of torchvision, which are fetched) may be a file. What follows DATA goes to `hvd-train train`.
set -euo pipefail
data=${1:?name the folder with train/ and val/}
shift
exec hvd-train train --data folder --data-dir "$data" --model resnet18 --weights "${WEIGHTS:-DEFAULT}" \
  --freeze backbone --unfreeze '2:layer4.*' --epochs 4 --batch-size 16 --optimizer adamw --no-nesterov \
  --learning-rate 1e-3 "$@"
