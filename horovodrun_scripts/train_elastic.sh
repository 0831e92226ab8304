#!/usr/bin/env bash
# Train on hosts that may come and go: workers die, spot hosts vanish, new ones join, and no finished step is lost.
#
#   train_elastic.sh [OPTIONS] [-- ARGUMENTS OF hvd-train train]
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

# number FLAG VALUE: fail unless VALUE is a whole number from 1.
number() { [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || fail "$1 takes a number from 1, not '$2'"; }

np='' min_np=1 max_np='' interface='' restarts=10 dry_run='' discover=()
while (($#)); do
  case $1 in
    --hosts)
      [[ -f ${2-} && -r ${2-} ]] || fail "--hosts: there is no host file '${2-}'"
      "$scripts/discover_hosts.sh" "$2" >/dev/null || exit 2
      discover=("$scripts/discover_hosts.sh" "$(readlink -f -- "$2")")
      shift
      ;;
    --slurm)
      "$scripts/discover_hosts.sh" --slurm >/dev/null || exit 2
      discover=("$scripts/discover_hosts.sh" --slurm)
      ;;
    --discover)
      [[ -n ${2-} ]] || fail "--discover takes a command that prints hosts"
      discover=("$scripts/discover_hosts.sh" --command "$2")
      shift
      ;;
    -np | -n) number "$1" "${2-}" && np=$2 && shift ;;
    --min-np) number "$1" "${2-}" && min_np=$2 && shift ;;
    --max-np) number "$1" "${2-}" && max_np=$2 && shift ;;
    --restarts) number "$1" "${2-}" && restarts=$2 && shift ;;
    --interface)
      [[ -n ${2-} ]] || fail "--interface takes a name, such as eth0"
      interface=$2
      shift
      ;;
    --env) pass_on "${2-}" && shift ;;
    --dry-run) dry_run=yes ;;
    -h | --help) usage ;;
    --) shift && break ;;
    *) fail "unknown argument '$1'; what is for hvd-train train goes after --; see --help" ;;
  esac
  shift
done
[[ -z $max_np ]] || ((max_np >= min_np)) || fail "--max-np $max_np is less than --min-np $min_np"

find_programs
if ((${#discover[@]} == 0)); then discover=(echo "localhost:$(default_num_ranks)"); fi
python=$(dirname -- "$(type -P hvd-train)")/python
command -v "$python" >/dev/null || python=python3
if [[ -z $np ]]; then
  np=$("${discover[@]}" | awk -F: '{ slots += $2 } END { print slots + 0 }')
  [[ -z $max_np ]] || ((np <= max_np)) || np=$max_np
  ((np >= min_np)) || np=$min_np
fi
driver=("$python" -m hvd_train.elastic.driver -np "$np" --min-np "$min_np")
driver+=(--host-discovery-script "$(quoted "${discover[@]}")")
[[ -z $max_np ]] || driver+=(--max-np "$max_np")
[[ -z $interface ]] || driver+=(--network-interfaces "$interface")
# Check the settings here, before a process is started anywhere.
[[ -n $dry_run ]] || hvd-train config "$@" >/dev/null || exit $?
set -- "$python" -m hvd_train.elastic.supervisor --restarts "$restarts" -- "${driver[@]}" hvd-train train "$@"
[[ -z $dry_run ]] || show "$@"
exec "$@"
