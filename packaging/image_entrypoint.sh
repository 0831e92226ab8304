#!/usr/bin/env bash
# What `docker run IMAGE ARGUMENTS` does; the Dockerfile has examples.
#
#   (nothing)             train the digits, one rank per GPU or 2 on the cores
#   train ARGUMENTS       hvd-train train ARGUMENTS, on as many ranks
#   doctor, evaluate ...  any other command of hvd-train
#   PROGRAM ARGUMENTS     any program of the image: horovodrun, python, bash, train_local.sh -n 4 -- digits

set -euo pipefail

PATH=/opt/hvd_train/horovodrun_scripts:$PATH
if (($# == 0)); then set -- train digits; fi
if [[ $1 == train ]]; then
  shift
  set -- train_local.sh -- "$@"
elif [[ $1 == -* ]] || [[ -z $(type -P -- "$1") ]]; then
  set -- hvd-train "$@"
fi
exec "$@"
