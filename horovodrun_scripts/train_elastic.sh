#!/usr/bin/env bash
# Train on hosts that may come and go: a lost worker is replaced, and no finished step is lost. Start it on any host.
#
#   train_elastic.sh -- digits                                   2 workers here; kill one and watch
#   train_elastic.sh --hosts hostfiles/two_hosts -- digits       edit the host file while it runs
#   train_elastic.sh --with slurm -- digits                      in an allocation (salloc --no-kill)
#   train_elastic.sh --help                                      more options

set -eu
here=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")
PATH=$PATH:$here/.venv/bin
command -v hvd-train >/dev/null || { echo "there is no hvd-train: type make -C '$here' env" >&2 && exit 2; }
exec hvd-train launch --elastic "$@"
