#!/usr/bin/env bash
# A training for each combination of values, one after the other, and a page about all: examples/sweep.sh
#
# examples/sweep.sh --np 2 trains each on two ranks. The six trainings of digits took four minutes on two busy CPU
# cores; a learning rate of 0.2 with a momentum of 0.8 was best, with a top-1 of 95%.
set -euo pipefail

hvd-train sweep digits --learning-rate 0.2,0.1,0.05 --momentum 0.8,0.9 --epochs 5 --output-dir runs/sweep "$@"
hvd-train report runs/sweep --output sweep.html
