#!/usr/bin/env bash
# Train in a container on each host of a host file, over ssh. The first host needs Docker and Python 3.10, nothing else.
#
#   docker build -t hvd_train . && train_docker.sh hostfiles/two_hosts -- digits --epochs 5
#   train_docker.sh hostfiles/two_hosts --volume /data:/data:ro -- imagenet-resnet50 --data-dir /data/imagenet
#   CONTAINER_ENGINE=podman CONTAINER_FLAGS='--userns keep-id' train_docker.sh hostfiles/two_hosts -- digits
#   train_docker.sh hostfiles/two_hosts --help                   more options

set -eu
here=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec python3 -m hvd_train launch --with docker --hosts "$@"
