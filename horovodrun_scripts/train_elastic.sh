#!/usr/bin/env bash
# Train on hosts that may come and go: workers die, spot hosts vanish, new ones join, and no finished step is lost.
#
#   train_elastic.sh [OPTIONS] [-- ARGUMENTS OF hvd-train train | -- SCRIPT.py ...]
#
#   train_elastic.sh -- digits                                       2 workers here; kill one and watch
#   train_elastic.sh --hosts hostfiles/two_hosts --min-np 1 -- digits
#   train_elastic.sh --slurm -- digits                               in an allocation (sbatch --no-kill)
#
#   --hosts FILE       a host file; edit it while the job runs (default: this machine, a slot per GPU, or 2)
#   --slurm            the nodes of this Slurm allocation that answer
#   --discover COMMAND the hosts that a command of yours prints, as in a host file
#   -np N              workers that the start waits for, a minute at most (default: all slots that are listed then)
#   --min-np N         with fewer workers the survivors wait for others (default: 1)
#   --max-np N         the greatest number of workers (default: all slots)
#   --interface NAMES  the network interface between the hosts (default: on each host the one that leads to the others)
#   --env NAME         a variable of this environment that workers on other hosts get, too (may be given more than once)
#   --restarts N       how often in a row the launcher may fail (default: 10)
#   --dry-run          print the command; run nothing
#
# Needs ssh without a password from here to each host, and the same hvd-train in the same place on all.
# Ctrl-C, SIGTERM or SIGUSR1, here or to all workers, makes the job commit and end; the same command resumes from there.
# So does the end of this terminal, unless under nohup. A signal to some of the workers, as where a spot host is told to
# go, makes these leave, and the others go on.

set -euo pipefail
scripts=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source-path=SCRIPTDIR source=_launch.sh
source "$scripts/_launch.sh"

declare -A takes=([--hosts]=hosts [--slurm]=slurm=yes [--discover]=discover [-np]=np# [-n]=np# [--min-np]=min_np#)
takes+=([--max-np]=max_np# [--interface]=interface [--env]=passed_on+ [--restarts]=restarts#)
hosts='' slurm='' discover='' np='' min_np=1 max_np='' interface='' restarts=10
read_options "$@"
[[ -z $max_np ]] || ((max_np >= min_np)) || fail "--max-np $max_np is less than --min-np $min_np"
find_programs
if [[ -n $hosts ]]; then
  [[ -f $hosts && -r $hosts ]] || fail "--hosts: there is no host file '$hosts'"
  discovery=("$scripts/discover_hosts.sh" "$(readlink -f -- "$hosts")")
elif [[ -n $slurm ]]; then
  discovery=("$scripts/discover_hosts.sh" --slurm)
elif [[ -n $discover ]]; then
  discovery=("$scripts/discover_hosts.sh" --command "$discover")
else
  discovery=(echo "localhost:$(default_num_ranks)")
fi
listed=$("${discovery[@]}") || exit 2
if [[ -z $np ]]; then
  np=$(awk -F: '{ slots += $2 } END { print slots + 0 }' <<<"$listed")
  [[ -z $max_np ]] || ((np <= max_np)) || np=$max_np
  ((np >= min_np)) || np=$min_np
fi
driver=("$python" -m hvd_train.elastic.driver -np "$np" --min-np "$min_np")
driver+=(--host-discovery-script "$(quoted "${discovery[@]}")")
[[ -z $max_np ]] || driver+=(--max-np "$max_np")
[[ -z $interface ]] || driver+=(--network-interfaces "$interface")
# Check the settings here, before a process is started anywhere.
[[ -n $dry_run || ${command[0]} != hvd-train ]] || hvd-train config "${arguments[@]}" >/dev/null || exit $?
supervisor=("$python" -m hvd_train.elastic.supervisor --restarts "$restarts")
start "${supervisor[@]}" -- "${driver[@]}" "${command[@]}"
