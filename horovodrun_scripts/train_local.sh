#!/usr/bin/env bash
# Train on this machine: one rank per GPU or, where there is none, 2 ranks on its cores.
#
#   train_local.sh                            the digits, 20 epochs: under a minute on 2 cores
#   train_local.sh --np 4 -- digits --epochs 5
#   train_local.sh --help                     more options

set -eu
here=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")
PATH=$PATH:$here/.venv/bin
command -v hvd-train >/dev/null || { echo "there is no hvd-train: type make -C '$here' env" >&2 && exit 2; }
exec hvd-train launch "$@"
